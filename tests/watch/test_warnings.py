"""Every warning speaks when its cause is there, is silent otherwise, and says what to try."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from agentfly.config import keys
from agentfly.watch.metrics import unknown
from agentfly.watch.warnings import RULES, WATCHED, warnings_of

Series = dict[str, list[tuple[int, float]]]
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def curve(*values: float) -> list[tuple[int, float]]:
    return list(enumerate(values, 1))


def ramp(first: float, last: float, steps: int = 12) -> list[tuple[int, float]]:
    return curve(*(first + (last - first) * step / (steps - 1) for step in range(steps)))


def counted(*per_step: float) -> list[tuple[int, float]]:
    return curve(*(sum(per_step[: step + 1]) for step in range(len(per_step))))


HEALTHY: Series = {
    "ledger/trained": counted(*[7.0] * 12),
    "ledger/filtered": counted(*[1.0] * 12),
    "ledger/failed": counted(*[0.0] * 12),
    "train/entropy": ramp(1.0, 0.7),
    "rollout/success": ramp(0.2, 0.7),
    "reward/mean": ramp(0.2, 0.7, 24),
    "rollout/outcome/max_tokens": ramp(0.05, 0.08),
    "rollout/outcome/max_turns": ramp(0.3, 0.25),
    "rollout/invalid_call_rate": ramp(0.3, 0.1),
    "rollout/outcome/world_failure": curve(*[0.01] * 12),
    "train/logprob_gap": curve(*[1e-6] * 12),
    "train/idle_steps": curve(*[0.0] * 12),
    "train/grad_norm": curve(*[1.0, 1.3, 0.8] * 4),
    "time/step_s": curve(*[10.0] * 12),
    "time/stalls_s": curve(*[0.1] * 12),
    "time/environments_s": curve(*[0.5] * 12),
}
SICK: dict[str, tuple[Series, str, str]] = {
    "groups_equal": (
        {"ledger/trained": counted(*[1.0] * 6), "ledger/filtered": counted(*[3.0] * 6), "ledger/failed": counted(*[0.0] * 6)},
        "yellow",
        "75%",
    ),
    "entropy_collapsed": (
        {"train/entropy": curve(*[1.0] * 6, *[0.02] * 6), "rollout/success": curve(*[0.3] * 12)},
        "red",
        "entropy",
    ),
    "success_falls": ({"rollout/success": curve(*[0.7, 0.68, 0.72, 0.7] * 3, *[0.3] * 5)}, "red", "in steps 3-7"),
    "length_runs_away": (
        {"rollout/reply_tokens": curve(*[40.0] * 6, *[600.0] * 6), "rollout/success": curve(*[0.3] * 12)},
        "red",
        "longer",
    ),
    "truncated_rising": ({"rollout/outcome/max_time": ramp(0.0, 0.9)}, "red", "max_time"),
    "invalid_rising": ({"rollout/invalid_call_rate": ramp(0.05, 0.45)}, "yellow", "invalid"),
    "logprob_gap": ({"train/logprob_gap": curve(0.001, 0.03)}, "yellow", "0.03"),
    "nothing_learned": ({"train/idle_steps": curve(0, 1, 2, 3, 4)}, "red", "last 4 steps"),
    "lost_chains": ({"rollout/outcome/world_failure": curve(0.3, 0.3)}, "red", "world_failure"),
    "stalled": ({"time/stalls_s": curve(*[3.0] * 12)}, "yellow", "stalls"),
    "waits_for_environments": ({"time/environments_s": curve(*[4.0] * 12)}, "yellow", "40%"),
    "gradient_spikes": ({"train/grad_norm": curve(*[1.0] * 11, 40.0)}, "yellow", "40"),
}


def test_a_healthy_run_has_no_warning() -> None:
    assert warnings_of(HEALTHY) == []
    assert warnings_of({}) == []


@pytest.mark.parametrize("name", SICK)
def test_each_cause_is_told_alone_with_evidence_and_advice(name: str) -> None:
    series, level, words = SICK[name]
    (warned,) = warnings_of({**HEALTHY, **series})
    assert (warned.name, warned.level) == (name, level)
    assert words in warned.text
    assert warned.tips
    assert warned.evidence
    assert not unknown([metric for metric, _ in warned.evidence])
    assert warned.step == max(step for metric, _ in warned.evidence[:1] for step, _ in {**HEALTHY, **series}[metric])


def test_every_rule_is_tested() -> None:
    assert {rule.__name__ for rule in RULES} == set(SICK)


@pytest.mark.parametrize(("success", "advice"), [(0.97, "harder tasks"), (0.02, "easier tasks"), (0.5, "temperature")])
def test_equal_groups_are_explained_by_what_the_chains_reach(success: float, advice: str) -> None:
    series = {**HEALTHY, **SICK["groups_equal"][0], "rollout/success": curve(*[success] * 12)}
    (warned,) = [each for each in warnings_of(series) if each.name == "groups_equal"]
    assert advice in " ".join(warned.tips)


def test_a_solved_task_is_no_collapse() -> None:
    solved = {"rollout/success": curve(*[0.99] * 12)}
    assert warnings_of({**HEALTHY, **SICK["entropy_collapsed"][0], **solved}) == []


def recorded_runs() -> list[Any]:
    """The step series of the published runs, all of which learned."""
    runs = []
    for path in sorted(RESULTS.glob("qwen_*.json")) + sorted(RESULTS.glob("curves_*.json")):
        for run in json.loads(path.read_text(encoding="utf-8"))["runs"]:
            if run.get("steps"):
                runs.append(pytest.param(run["steps"], id=f"{path.stem}-{run['name']}"))
    return runs


@pytest.mark.parametrize("steps", recorded_runs())
def test_no_step_of_a_published_run_is_warned_of(steps: list[dict[str, float]]) -> None:
    series: Series = {}
    for row in steps[1:]:
        for name in set(row) & set(WATCHED):
            series.setdefault(name, []).append((int(row["step"]), row[name]))
        assert warnings_of(series) == []


def test_a_collapse_of_a_published_run_is_told_within_a_few_steps() -> None:
    steps = json.loads((RESULTS / "qwen_webshop.json").read_text(encoding="utf-8"))["runs"][0]["steps"]
    success = [(int(row["step"]), row["rollout/success"]) for row in steps[1:]]
    for last in range(1, 8):
        collapsing = [*success[:40], *((41 + at, 0.1) for at in range(last))]
        if warned := warnings_of({"rollout/success": collapsing}):
            break
    assert [each.name for each in warned] == ["success_falls"]
    assert last <= 4
    assert dict(warned[0].evidence)["rollout/success"] < 0.5


def test_noise_is_no_fall_and_steps_of_few_tasks_are_noisy() -> None:
    for seed, tasks, share in itertools.product(range(20), (2, 16), (0.1, 0.5, 0.9)):
        rng = random.Random(seed)
        success = [sum(rng.random() < share for _ in range(tasks)) / tasks for _ in range(150)]
        for last in range(10, 151, 5):
            assert warnings_of({"rollout/success": curve(*success[:last])}) == []


def test_replies_that_run_away_are_told_in_both_directions_unless_they_help() -> None:
    flat, learned = {"rollout/success": curve(*[0.3] * 12)}, {"rollout/success": ramp(0.2, 0.7)}
    for last, word in ((600, "longer"), (3, "shorter")):
        lengths = {"rollout/reply_tokens": curve(*[60.0] * 6, *[float(last)] * 6)}
        (warned,) = warnings_of({**HEALTHY, **flat, **lengths})
        assert word in warned.text
        assert warnings_of({**HEALTHY, **learned, **lengths}) == []


def test_a_policy_that_learned_may_be_sure_of_itself() -> None:
    sure = {"train/entropy": ramp(0.04, 0.002), "rollout/success": ramp(0.3, 0.7)}
    assert warnings_of({**HEALTHY, **sure}) == []


def test_a_reward_that_stays_is_told_after_enough_steps() -> None:
    flat = curve(*[0.3, 0.32, 0.28, 0.31] * 6)
    (warned,) = warnings_of({**HEALTHY, "reward/mean": flat})
    assert (warned.name, warned.level) == ("nothing_learned", "yellow")
    assert warnings_of({**HEALTHY, "reward/mean": flat[:16]}) == []


def test_the_limit_of_the_run_decides_about_the_gap() -> None:
    series = {**HEALTHY, "train/logprob_gap": curve(0.06)}
    assert [each.level for each in warnings_of(series)] == ["red"]
    assert warnings_of(series, max_logprob_gap=0.15) == []
    assert [each.level for each in warnings_of(series, max_logprob_gap=0.1)] == ["yellow"]


def test_red_comes_first_and_values_that_are_no_numbers_are_left_out() -> None:
    series = {**HEALTHY, **SICK["stalled"][0], **SICK["lost_chains"][0], "train/entropy": curve(*[math.nan] * 12)}
    assert [each.level for each in warnings_of(series)] == ["red", "yellow"]


def test_the_advice_names_keys_that_exist() -> None:
    known = {key for key, *_ in keys()}
    for name in SICK:
        for warned in warnings_of({**HEALTHY, **SICK[name][0]}):
            for tip in warned.tips:
                for word in tip.replace(",", " ").replace("(", " ").replace(")", " ").replace(":", " ").split():
                    if word.split(".")[0] in ("train", "loss", "rollout", "sampling", "agent", "resources") and "." in word:
                        key = word.rstrip(".")
                        assert key in known or any(key.startswith(f"{each}.") for each in known), key
