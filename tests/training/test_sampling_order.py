"""Trainings with samplers and sources: what is learned reaches the sampler, resume repeats the draws, sources have figures."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest

import agentfly
from agentfly import cli, reward
from agentfly.build import build_tasks
from agentfly.config import Config
from agentfly.health import diagnose
from agentfly.protocols import GroupResult
from agentfly.runs import RunStore
from agentfly.training.samplers import CurriculumSampler
from tests.tiny import sample_in_float64, save_tiny_model, tiny_agent

ROWS = [{"question": f"Say something about {i}.", "kind": ("solved", "learnable", "impossible")[i % 3]} for i in range(30)]
SMALL: dict[str, Any] = {
    "num_tasks": 3, "num_chains": 4, "threads": 1, "lr": 1e-2, "validation_count": 4, "validate_at_start": False,
    "validate_every": 0,
}  # fmt: skip


STOP_AT: set[str] = set()
"""Ids of chains whose reward raises."""


@reward(name="even_if_learnable")
def even_if_learnable(trajectory: Any) -> float:
    """A third of the tasks always succeeds, a third never; the others do if most tokens have an even id."""
    if trajectory.id in STOP_AT:
        raise ZeroDivisionError("stop")
    ids = [token for turn in trajectory.turns for token in turn.completion.token_ids]
    kind = trajectory.task.fields["kind"]
    return float(kind == "solved" or (kind == "learnable" and 2 * sum(token % 2 == 0 for token in ids) > len(ids)))


class Recording(CurriculumSampler):
    """A curriculum that remembers its calls."""

    calls: ClassVar[list[tuple[str, Any]]] = []

    def draw(self) -> int:
        row = super().draw()
        self.calls.append(("draw", row))
        return row

    def learn(self, result: GroupResult) -> None:
        self.calls.append(("learn", result))
        super().learn(result)


OWN_SAMPLER = """
class Backwards:
    def __init__(self, tasks, seed, *, every=1):
        self.rows, self.number = range(len(tasks))[::-every], 0

    def draw(self):
        self.number += 1
        return self.rows[(self.number - 1) % len(self.rows)]

    def state(self):
        return {"number": self.number}

    def restore(self, state):
        self.number = state["number"]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def train(model: Path, folder: Path, name: str = "run", rows: Any = ROWS, **options: Any) -> Any:
    agent = tiny_agent(model, reward=even_if_learnable)
    if rows is not None:
        file = folder / "rows.json"
        file.write_text(json.dumps(rows))
        rows = file
    return agentfly.train(agent, rows, run={"dir": str(folder), "name": name}, **(SMALL | options))


def chains_of(folder: Path) -> list[Any]:
    with RunStore(folder / "run.db", readonly=True) as store:
        return store.trajectories(split="train", limit=9999)


def draws(folder: Path) -> list[tuple[int, int, str]]:
    """Step, position and task of every group that the store holds, in the order of the draws."""
    return sorted({(*map(int, chain.id[1:].split("-")[:2]), chain.task.id) for chain in chains_of(folder)})


def problems(folder: Path) -> list[Any]:
    return [check.problems for check in diagnose(folder).checks if not check.ok]


def check_of_draws(folder: Path) -> Any:
    return next(check for check in diagnose(folder).checks if check.name == "draws")


@pytest.mark.parametrize("options", [{}, {"refill": 4}, {"max_lag": 2, "depth": 2}, {"max_lag": 1, "refill": 3}])
def test_a_sampler_learns_once_of_each_draw_in_the_order_of_draws(model: Path, tmp_path: Path, options: Any) -> None:
    Recording.calls.clear()
    result = train(model, tmp_path, steps=5, **{"data.sampler": Recording}, **options)
    drawn = [row for call, row in Recording.calls if call == "draw"]
    learned = [each for call, each in Recording.calls if call == "learn"]
    assert Counter(drawn) == Counter(each.row for each in learned)
    assert all(len(each.rewards) == len(each.successes) == 4 for each in learned)
    by_task: dict[str, list[float]] = {}
    for chain in chains_of(result.directory):
        by_task.setdefault(chain.task.id, []).append(chain.total_reward)
    assert sum(map(sum, by_task.values())) == sum(sum(each.rewards) for each in learned)
    assert sum(each.teaches for each in learned) == result.history[-1]["ledger/trained"]
    assert not problems(result.directory)
    if not options.get("max_lag"):
        assert drawn == [each.row for each in learned]
        assert not check_of_draws(result.directory).skipped  # the doctor has drawn and learned the same


@pytest.mark.parametrize("options", [{}, {"refill": 4}])
def test_a_resumed_run_draws_what_an_uninterrupted_one_draws(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Any
) -> None:
    sample_in_float64(monkeypatch)
    options = {"data.sampler": {"kind": "curriculum", "floor": 0.05}, **options}
    whole = train(model, tmp_path, "whole", steps=6, **options)
    train(model, tmp_path, "parts", steps=2, **options)
    train(model, tmp_path, "parts", steps=4, resume=tmp_path / "parts", **options)
    again = train(model, tmp_path, "parts", steps=6, resume=tmp_path / "parts", **options)
    assert draws(again.directory) == draws(whole.directory)
    assert [row["reward/mean"] for row in again.history] == [row["reward/mean"] for row in whole.history[4:]]
    assert not problems(again.directory)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_run_that_stops_with_groups_in_flight_goes_on_with_them(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """The state of the sampler in the checkpoint has their draws, but nothing of what came of them."""
    sample_in_float64(monkeypatch)
    Recording.calls.clear()
    options = {"data.sampler": Recording, "max_lag": depth, **({"depth": depth} if depth else {})}

    STOP_AT.add("t4-1-0")
    try:
        with pytest.raises(Exception, match="stop"):
            train(model, tmp_path, steps=7, **options)
    finally:
        STOP_AT.clear()
    result = train(model, tmp_path, steps=7, resume=tmp_path / "run", **options)
    drawn = Counter(row for call, row in Recording.calls if call == "draw")
    assert drawn == Counter(each.row for call, each in Recording.calls if call == "learn")
    assert drawn.total() == 21 == result.history[-1]["ledger/drawn"]
    assert not problems(result.directory)
    if not depth:
        whole = train(model, tmp_path, "whole", steps=7, **options)
        assert draws(result.directory) == draws(whole.directory)


def test_the_doctor_finds_draws_that_do_not_follow_from_what_was_learned(model: Path, tmp_path: Path) -> None:
    result = train(model, tmp_path, rows=ROWS[:12], steps=8, **{"data.sampler": "curriculum"})
    assert check_of_draws(result.directory).ok
    config = result.directory / "config.toml"
    written = config.read_text()
    for before, after in (("success_at = 1.0", "success_at = 0.0"), ('sampler = "curriculum"', 'sampler = "epochs"')):
        assert before in written
        config.write_text(written.replace(before, after))
        assert any("but the sampler draws" in problem for problem in check_of_draws(result.directory).problems)
    config.write_text(written.replace('sampler = "curriculum"', 'sampler = "python:Lost"'))
    assert "was a Python object" in check_of_draws(result.directory).skipped


@pytest.mark.slow
def test_a_curriculum_reaches_a_reward_with_fewer_chains_than_epochs(model: Path, tmp_path: Path) -> None:
    """One row of ten can be learned from: the others are solved or impossible."""
    rows = [{**row, "kind": "learnable" if i % 10 == 0 else ("solved", "impossible")[i % 2]} for i, row in enumerate(ROWS)]

    def chains_needed(name: str) -> int:
        """The chains that were sampled until 22 of the last 24 chains of learnable rows succeeded."""
        options = {"data.sampler": name, "data.holdout": 0.04, "num_chains": 8, "lr": 2e-2, "seed": 1}
        result = train(model, tmp_path, name, rows, steps=60, **options)
        used, recent = 0, [0.0] * 24
        with RunStore(result.directory / "run.db", readonly=True) as store:
            for step in range(1, 61):
                chains = store.trajectories(step=step, split="train", limit=999)
                used += len(chains)
                recent += [chain.total_reward for chain in chains if chain.task.fields["kind"] == "learnable"]
                if sum(recent[-24:]) >= 22:
                    break
        return used

    assert chains_needed("curriculum") < 0.75 * chains_needed("epochs")  # 720, and more than 1,440


def test_two_sources_have_figures_of_their_own(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("easy", "hard"):
        kind = {"easy": "solved", "hard": "impossible"}[name]
        (tmp_path / f"{name}.json").write_text(json.dumps([{"question": f"{name} {i}", "kind": kind} for i in range(20)]))
    sources = {name: {"train": str(tmp_path / f"{name}.json"), "weight": weight} for name, weight in (("easy", 1), ("hard", 2))}
    options = {"data.sources": sources, "validate_every": 2, "validate_at_start": True, "validation_count": None}
    result = train(model, tmp_path, rows=None, steps=4, **options)
    for row in result.history:
        assert (row["source/easy/tasks"], row["source/hard/tasks"]) == (1, 2)
        assert (row["source/easy/success"], row["source/hard/success"]) == (1, 0)
        assert (row["source/easy/reward"], row["source/hard/reward"]) == (1, 0)
    for figures in (result.before, result.history[1], result.after):
        assert (figures["validation/easy/success"], figures["validation/hard/success"]) == (1, 0)
        assert figures["validation/success"] == 0.5
        assert figures["validation/hard/tasks"] == 2
        assert figures["validation/easy/success_ci_low"] < 1
    shown = capsys.readouterr().out
    assert "source hard: 67% of the draws, 18 training rows, sampler epochs" in shown
    assert "held-out success 0.50 (easy 1.00, hard 0.00)" in shown
    assert not problems(result.directory)
    assert {chain.task.fields["source"] for chain in chains_of(result.directory)} == {"easy", "hard"}


def test_a_sampler_of_a_file_and_the_figures_of_sources_go_through_the_command_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        Path(f"{name}.json").write_text(json.dumps([{"question": f"{name} {i}", "id": f"{name}{i}"} for i in range(12)]))
    Path("mine.py").write_text(OWN_SAMPLER)
    words = [
        "agent.kind=tests.tiny:TwoTurns", f"agent.model={model}", "agent.tools=tests.tiny:look", "agent.max_turns=2",
        "agent.reward=tests.tiny:even", "sampling.max_tokens=8", "data.sources.one.train=one.json", "data.sources.one.weight=2",
        "data.sources.one.sampler.kind=mine.py:Backwards", "data.sources.one.sampler.every=2",
        "data.sources.two.train=two.json", "rollout.num_tasks=3", "rollout.num_chains=2", "train.steps=2", "run.name=mine",
        "run.dir=runs", "run.threads=1", "train.validate_every=0",
    ]  # fmt: skip
    assert cli.main(["train", *words, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "# source one: 67% of the draws, 11 training rows, sampler mine.py:Backwards" in shown
    assert "# source two: 33% of the draws, 11 training rows, sampler epochs" in shown
    assert cli.main(["train", *words]) == 0
    drawn = [task for _, _, task in draws(Path("runs/mine")) if task.startswith("one")]
    rows = [task.id for task in build_tasks(Config.load("runs/mine/config.toml"))[0] if task.source == "one"]
    assert drawn == rows[::-2][:4]
    assert not problems(Path("runs/mine"))
    assert not check_of_draws(Path("runs/mine")).skipped
    capsys.readouterr()
    assert cli.main(["eval", "runs/mine", "--json", "figures.json"]) == 0
    figures = json.loads(Path("figures.json").read_text())
    assert figures["validation/one/reward"] > 0
    assert {"validation/two/success", "validation/success", "validation/two/tasks"} <= set(figures)
    assert "validation/one/reward" in capsys.readouterr().out
