"""The figures of an evaluation: what chains without a score do to them, and their intervals."""

from __future__ import annotations

import math
import random
from itertools import combinations

import pytest

from agentfly.runs.compare import mean
from agentfly.types import Outcome, Task, Trajectory
from agentfly.watch.held_out import (
    bounds,
    held_out_metrics,
    interval_text,
    is_part,
    left_out,
    pass_all_k,
    pass_at_k,
    success_interval,
)
from agentfly.watch.metrics import unknown
from agentfly.watch.progress import summary_line


def groups_of(*patterns: str) -> list[list[Trajectory]]:
    """A group per pattern: 1 succeeded, 0 failed, x has no score."""
    outcomes = {"x": Outcome.WORLD_FAILURE}
    return [
        [
            Trajectory(f"v-{g}-{c}", Task(str(g), ()), c, outcome=outcomes.get(sign, Outcome.FINISHED),
                       reward=None if sign == "x" else float(sign))
            for c, sign in enumerate(pattern)
        ]
        for g, pattern in enumerate(patterns)
    ]  # fmt: skip


def figures(*patterns: str) -> dict[str, float]:
    found = held_out_metrics(groups_of(*patterns), len(patterns[0]), 1.0, 1.0)
    assert unknown(found) == []
    return {name.removeprefix("validation/"): value for name, value in found.items()}


def test_a_task_with_fewer_than_k_scored_chains_stays_in_pass_at_k() -> None:
    found = figures("1xxx", "0000")
    assert found["pass_at_1"] == found["pass_at_2"] == found["pass_at_4"] == 0.5
    assert (found["tasks"], found["chains"], found["scored"]) == (2, 8, 5)


def test_bounds_count_the_chains_without_a_score_as_failures_and_as_successes() -> None:
    found = figures("1x", "0x", "xx", "00")
    assert found["success"] == pytest.approx(0.25)
    assert (found["success_min"], found["success_max"]) == pytest.approx((1 / 8, 5 / 8))
    assert (found["pass_at_2_min"], found["pass_at_2_max"]) == pytest.approx((1 / 4, 3 / 4))
    assert found["pass_at_1_min"] <= found["pass_at_1"] <= found["pass_at_1_max"]


def test_bounds_are_left_out_where_at_most_one_chain_in_a_hundred_has_no_score() -> None:
    assert "success_min" not in figures(*["1"] * 99, "x")
    assert "success_min" in figures(*["1"] * 98, "x", "x")
    assert left_out({"validation/success": 1.0, "validation/scored": 99.0, "validation/chains": 100.0}) is None


def test_without_a_scored_chain_the_figures_are_nan_and_the_bounds_everything() -> None:
    found = figures("xx")
    assert math.isnan(found["success"]) and math.isnan(found["pass_at_2"])
    assert (found["success_min"], found["success_max"]) == (0.0, 1.0)


@pytest.mark.parametrize(("n", "good"), [(4, 1), (5, 2), (3, 3), (6, 0)])
def test_pass_at_k_is_the_share_of_choices_of_k_chains_with_a_success(n: int, good: int) -> None:
    for k in range(1, n + 1):
        drawn = [any(chain < good for chain in chosen) for chosen in combinations(range(n), k)]
        assert pass_at_k(n, good, k) == pytest.approx(sum(drawn) / len(drawn))


@pytest.mark.parametrize(("n", "good"), [(4, 1), (5, 2), (3, 3), (6, 0), (8, 7)])
def test_pass_all_k_is_the_share_of_choices_of_k_chains_that_all_succeed(n: int, good: int) -> None:
    for k in range(1, n + 1):
        drawn = [all(chain < good for chain in chosen) for chosen in combinations(range(n), k)]
        assert pass_all_k(n, good, k) == pytest.approx(sum(drawn) / len(drawn))


def test_pass_all_k_falls_where_pass_at_k_rises_and_counts_missing_chains_as_it_does() -> None:
    found = figures("1110", "1111", "0000")
    assert (found["pass_at_2"], found["pass_all_2"]) == pytest.approx((2 / 3, (1 / 2 + 1) / 3))
    assert (found["pass_at_4"], found["pass_all_4"]) == pytest.approx((2 / 3, 1 / 3))
    assert "pass_all_1" not in found  # is pass_at_1
    lost = figures("1x", "11")
    assert (lost["pass_all_2"], lost["pass_all_2_min"], lost["pass_all_2_max"]) == (1.0, 0.5, 1.0)
    assert is_part("validation/pass_all_2_min") and interval_text({f"validation/{k}": v for k, v in lost.items()},
                                                                  "validation/pass_all_2") == " (0.50-1.00 of all)"  # fmt: skip


def test_the_interval_of_equal_tasks_is_not_a_point() -> None:
    assert success_interval([1.0] * 20) == pytest.approx((0.025 ** (1 / 20), 1.0))
    assert success_interval([0.0] * 20) == pytest.approx((0.0, 1 - 0.025 ** (1 / 20)))
    assert all(map(math.isnan, success_interval([])))


def test_the_interval_holds_the_true_share_in_about_95_percent_of_evaluations() -> None:
    rng, held = random.Random(0), 0
    for _ in range(100):
        shares = [float(rng.random() < 0.6) for _ in range(80)]
        low, high = success_interval(shares)
        assert low <= mean(shares) <= high
        held += low <= 0.6 <= high
    assert 85 <= held <= 100


def test_a_figure_is_told_with_its_interval_and_the_parts_are_not_told_alone() -> None:
    metrics = {"validation/success": 0.5, "validation/success_ci_low": 0.41, "validation/success_ci_high": 0.6}
    assert interval_text(metrics, "validation/success") == " (0.41-0.60)"
    assert interval_text(metrics, "validation/reward") == ""
    lost = held_out_metrics(groups_of("0x"), 2, 1.0, 1.0)
    assert interval_text(lost, "validation/pass_at_2") == " (0.00-1.00 of all)"
    assert interval_text(lost, "validation/success") == " (0.00-0.97; 0.00-0.50 of all)"
    assert [name for name in metrics if not is_part(name)] == ["validation/success"]
    assert not is_part("validation/pass_at_4") and is_part("validation/pass_at_4_min")


def test_the_line_of_a_step_says_over_how_many_chains_its_success_is() -> None:
    metrics = {"rollout/success": 1.0, "rollout/scored": 64.0, "rollout/chains": 128.0}
    assert "success 1.00 of 64/128 chains (0.50-1.00 of all)" in summary_line(1, 2, metrics)
    assert summary_line(1, 2, metrics | {"rollout/scored": 127.0}) == "step 1/2  success 1.00"


def test_bounds_are_shares_of_all_chains() -> None:
    assert bounds(0.5, 16, 32) == (0.25, 0.75)
    assert bounds(math.nan, 0, 32) == (0.0, 1.0)
