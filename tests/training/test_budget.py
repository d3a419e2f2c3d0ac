"""What a run has used, and `train.budget`, which ends it in order; both go on over a resume."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import agentfly
from agentfly.cli.train import print_result
from agentfly.config import Config
from agentfly.errors import ConfigError
from agentfly.runs import RunDirectory, RunStore
from agentfly.schema import read_budget
from agentfly.training import stopping
from agentfly.training.stopping import Spending, num_gpus
from agentfly.watch.comparison import compare_runs
from tests.tiny import ROWS, save_tiny_model, tiny_agent

SMALL: dict[str, Any] = {
    "num_tasks": 1, "num_chains": 2, "threads": 1, "lr": 1e-2, "validation_count": 2, "validate_every": 2, "save_every": 0,
    "sampling": {"max_tokens": 3}, "steps": 9, "run.price": 3600.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


class Clock:
    """A second per look of `Spending.reason`, which the loop asks once before each step. `beat` is the last of them."""

    def __init__(self) -> None:
        self.now = self.beat = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Each step takes a second of this clock."""
    clock, reason = Clock(), Spending.reason.fget
    made = Spending.__init__

    def make(self: Spending, config: Any, gpus: int, meta: Any, began: float) -> None:
        heartbeat = {"heartbeat": clock.beat} if "began" in meta else {}
        made(self, config, gpus, {**meta, **heartbeat}, clock.now, clock)

    def look(self: Spending) -> str | None:
        told: str | None = reason(self)  # type: ignore[misc]
        clock.now += 1.0
        clock.beat = clock.now
        return told

    monkeypatch.setattr(Spending, "__init__", make)
    monkeypatch.setattr(Spending, "reason", property(look))
    monkeypatch.setattr(stopping, "available_processors", lambda: 4)
    return clock


def train(model: Path, folder: Path, **options: Any) -> Any:
    return agentfly.train(tiny_agent(model), ROWS, run={"dir": str(folder), "name": "run"}, **(SMALL | options))


def test_a_budget_ends_a_run_in_order_and_counts_what_was_used_before_a_resume(
    model: Path, tmp_path: Path, clock: Clock
) -> None:
    options = {"train.budget": "3s"}
    result = train(model, tmp_path, **options)
    assert result.steps == 3
    assert result.stopped == (
        "the run ends after step 3 of 9: the budget of 3s is used up: 3s, resumed runs together (train.budget)"
    )
    assert result.checkpoint == tmp_path / "run" / "checkpoints" / "step-000003"
    assert "validation/success" in result.after
    console = Console(file=io.StringIO(), width=500)
    print_result(console, Config.load(tmp_path / "run"), result, None)
    assert "used 4s, 16 processor-seconds, $4.00" in console.file.getvalue()  # type: ignore[attr-defined]
    clock.now += 100.0  # between the two runs nothing is used
    again = train(model, tmp_path, resume=tmp_path / "run", **options)
    assert (again.steps, again.cost["cost/wall_s"]) == (3, 4.0 + 1.0)
    raised = train(model, tmp_path, resume=tmp_path / "run", **options | {"train.budget": "7s"})
    assert raised.steps == 5


def test_a_budget_of_dollars_is_spent_by_the_price(model: Path, tmp_path: Path, clock: Clock) -> None:
    result = train(model, tmp_path, **{"train.budget": "$2", "run.price": 1800.0})
    assert result.steps == 4  # four seconds at half a dollar
    with RunStore(RunDirectory(result.directory).database, readonly=True) as store:
        steps = store.metrics_by_step()
    assert [steps[step]["cost/dollars"] for step in (1, 2, 3, 4)] == [0.5, 1.0, 1.5, 2.0]
    assert steps[4]["cost/cpu_s"] == 16.0 and "cost/gpu_s" not in steps[4]
    compared = compare_runs(result.directory, result.directory).results
    assert compared["cost/dollars"] == (2.0, 2.0) and "cost/points_per_dollar" in compared


def test_without_a_price_a_run_says_no_dollars(model: Path, tmp_path: Path, clock: Clock) -> None:
    cost = train(model, tmp_path, **{"steps": 1, "run.price": None}).cost
    assert set(cost) == {"cost/wall_s", "cost/cpu_s"}


def test_gpu_seconds_count_all_gpus_and_each_leg_has_its_own() -> None:
    config = Config.from_dict({"sampler": {"replicas": 3, "place": "own"}, "run": {"price": 2.0}})
    assert num_gpus(config) == 4 and num_gpus(Config()) == 1
    now = 10_000.0
    leg = {"began": 0.0, "heartbeat": 100.0, "used": [50.0, 60.0], "devices": 2}
    spending = Spending(config, 4, leg, now, lambda: now + 900.0)
    used = spending.metrics({"validation/success": 0.25}, {"validation/success": 0.5})
    assert used["cost/wall_s"] == 50 + 100 + 900 and used["cost/gpu_s"] == 60 + 200 + 3600
    assert used["cost/dollars"] == pytest.approx(2.0 * 3860 / 3600)
    assert used["cost/points_per_dollar"] == pytest.approx(25 / used["cost/dollars"])
    assert spending.meta == {"began": now, "used": [150.0, 260.0], "devices": 4}
    older = Spending(config, 4, {"started": 0.0, "resumed": 60.0, "heartbeat": 100.0}, now, lambda: now)
    assert older.metrics({}, {})["cost/wall_s"] == 40.0  # a store of an older version knows its last leg


@pytest.mark.parametrize(
    ("text", "read"),
    [("90s", (90.0, None)), ("20min", (1200.0, None)), ("1.5 h", (5400.0, None)), ("2d", (172_800.0, None)),
     ("$2", (None, 2.0)), ("$0.50", (None, 0.5))],
)  # fmt: skip
def test_budgets_are_times_and_dollars(text: str, read: Any) -> None:
    assert read_budget("train.budget", text) == read


@pytest.mark.parametrize("text", ["soon", "20", "$", "$2h", "-5min", "0s", "", "2 weeks", "20 min $2"])
def test_what_is_no_budget_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match=r'train.budget is a time such as "90s", "20min", .* not ') as caught:
        Config.from_dict({"train": {"budget": text}})
    assert "\n" not in str(caught.value)


def test_a_budget_of_dollars_needs_a_price_and_a_price_is_above_0() -> None:
    with pytest.raises(ConfigError, match="train.budget = .* needs run.price, the dollars per GPU-hour"):
        Config.from_dict({"train": {"budget": "$2"}})
    with pytest.raises(ConfigError, match="run.price"):
        Config.from_dict({"run": {"price": 0}})
