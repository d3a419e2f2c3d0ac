"""Two runs side by side: the difference of their configs, their results, and a paired test over tasks that both hold out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..data import row_key
from ..errors import ConfigError
from ..runs import RunDirectory, RunStore
from ..runs.catalog import read_config
from ..runs.compare import PairedTest, config_difference, mean, paired_test
from ..types import Trajectory
from .held_out import SHOWN as HONESTY
from .held_out import held_out_metrics, is_part, is_told
from .metrics import is_success

RESULTS = (
    "validation/success",
    "validation/reward",
    "validation/turns",
    "validation/tool_calls",
    "reward/mean",
    "rollout/success",
    "rollout/turns",
    "rollout/reply_tokens",
    "rollout/invalid_call_rate",
    *(f"validation/{name}" for name in HONESTY if name != "judged_answers"),
    "cost/wall_s",
    "cost/gpu_s",
    "cost/cpu_s",
    "cost/dollars",
    "cost/points_per_dollar",
    "rollout/tokens_per_s",
    "time/step_s",
)
"""The metrics that are compared unless others are named."""
MEASURES = ("success", "reward")
When = int | Literal["last", "best"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Run B against run A. `results` are the last values of metrics, NaN where a run has none.

    `steps` are the steps whose validations are compared, `tasks` the numbers of held-out tasks of A, of B, and of both. `test`
    is None if no task is in both. `chains` are the scored and all held-out chains of A and of B. If more than 1 % of them have
    no score, `bounds` are the least and the largest difference in success that these could make.
    """

    a: str
    b: str
    config: dict[str, tuple[Any, ...]]
    results: dict[str, tuple[float, float]]
    measure: str
    steps: tuple[int | None, int | None]
    tasks: tuple[int, int, int]
    test: PairedTest | None
    chains: tuple[tuple[int, int], tuple[int, int]]
    bounds: tuple[float, float] | None

    def to_json(self) -> dict[str, Any]:
        """For JSON, which has no NaN: None instead."""
        return {
            "a": self.a,
            "b": self.b,
            "config": {key: list(values) for key, values in self.config.items()},
            "results": {
                name: [value if math.isfinite(value) else None for value in pair] for name, pair in self.results.items()
            },
            "held_out": {
                "measure": self.measure,
                "steps": list(self.steps),
                "tasks": dict(zip(("a", "b", "both"), self.tasks, strict=True)),
                "chains": {
                    side: {"scored": scored, "all": total}
                    for side, (scored, total) in zip(("a", "b"), self.chains, strict=True)
                },
                "bounds": None if self.bounds is None else list(self.bounds),
                "test": None if self.test is None else self.test.to_json(),
            },
        }


def compare_runs(
    a: str | Path, b: str | Path, *, measure: str = "success", when: When = "last", metrics: Sequence[str] = ()
) -> Comparison:
    """Compare two run folders. `when` is the step of the validation: the last one, the best one of each run, or a number.

    A task is the same in both runs if its whole row is the same, whatever its id. Figures of validation that a run did not
    record are those of its stored chains. Raises ConfigError.
    """
    if measure not in MEASURES:
        raise ConfigError(f"a paired test compares {' or '.join(MEASURES)}, not {measure!r}")
    left, right = (_Side.read(RunDirectory.existing(run), measure, when) for run in (a, b))
    names = metrics or shown_names((left.last, right.last))
    for name in metrics:
        if name not in left.last and name not in right.last:
            raise ConfigError(f"neither run has the metric {name!r}")
    test = paired_test(left.values, right.values)
    return Comparison(
        a=Path(a).name,
        b=Path(b).name,
        config=config_difference(left.config, right.config),
        results={name: (left.last.get(name, math.nan), right.last.get(name, math.nan)) for name in names},
        measure=measure,
        steps=(left.step, right.step),
        tasks=(len(left.values), len(right.values), 0 if test is None else test.num_tasks),
        test=test,
        chains=(left.chains, right.chains),
        bounds=_bounds(left, right) if measure == "success" and any(is_told(*side.chains) for side in (left, right)) else None,
    )


def shown_names(sides: Sequence[Mapping[str, float]]) -> list[str]:
    """The metrics that are compared unless others are named, of those that a run has: RESULTS, and pass@k and pass^k."""
    passes = dict.fromkeys(name for side in sides for name in side if name.startswith("validation/pass_") and not is_part(name))
    return [*(name for name in RESULTS if any(name in side for side in sides)), *passes]


def last_values(directory: RunDirectory) -> dict[str, float]:
    """The last value of each metric of a run; see `compare_runs` for what a run did not record."""
    return _Side.read(directory, "success", "last").last


def _bounds(left: _Side, right: _Side) -> tuple[float, float] | None:
    """The mean difference over the tasks of both, with chains without a score for A and against B, and the other way round."""
    shared = [task for task in left.lost if task in right.lost]
    if not shared:
        return None

    def share(side: _Side, task: str, each: float) -> float:
        values = side.values.get(task, [])
        return (sum(values) + each * side.lost[task]) / (len(values) + side.lost[task])

    ends = [mean([share(right, task, b) - share(left, task, 1.0 - b) for task in shared]) for b in (0.0, 1.0)]
    return ends[0], ends[1]


@dataclass(frozen=True, slots=True)
class _Side:
    """What is compared of one run: `values` has the measure of each scored chain of a held-out task, by its row; `lost` counts
    the others of every task."""

    config: dict[str, Any]
    last: dict[str, float]
    step: int | None
    values: dict[str, list[float]]
    lost: dict[str, int]

    @property
    def chains(self) -> tuple[int, int]:
        """The number of chains with a score, and of all."""
        scored = sum(map(len, self.values.values()))
        return scored, scored + sum(self.lost.values())

    @classmethod
    def read(cls, directory: RunDirectory, measure: str, when: When) -> _Side:
        config = read_config(directory.path)
        value = _measure(measure, float(config.get("agent", {}).get("success_at", 1.0)))
        with RunStore(directory.database, readonly=True) as store:
            history = store.metrics_by_step()
            step = _validated(store, history, when, directory.path)
            chains = [] if step is None else store.trajectories(step=step, split="validation", limit=1_000_000)
        last = {name: value for row in history.values() for name, value in row.items() if math.isfinite(value)}
        if "validation/invalid_call_chains" not in last:  # of a version that did not record it
            last = _recomputed(chains, float(config.get("agent", {}).get("success_at", 1.0))) | last
        values: dict[str, list[float]] = {}
        lost: dict[str, int] = {}
        for chain in chains:
            key = row_key(chain.task)
            lost[key] = lost.get(key, 0) + (not chain.scored)
            if chain.scored:
                values.setdefault(key, []).append(value(chain))
        return cls(config, last, step, values, lost)


def _recomputed(chains: Sequence[Trajectory], success_at: float) -> dict[str, float]:
    """The figures of a validation, from its chains."""
    groups: dict[str, list[Trajectory]] = {}
    for chain in chains:
        groups.setdefault(f"{chain.task.id}/{chain.draw}", []).append(chain)
    figures = held_out_metrics(list(groups.values()), max(map(len, groups.values())), 0.0, success_at) if groups else {}
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def _measure(measure: str, success_at: float) -> Callable[[Trajectory], float]:
    if measure == "reward":
        return lambda chain: chain.total_reward
    return lambda chain: float(is_success(chain, success_at))


def _validated(store: RunStore, history: Mapping[int, Mapping[str, float]], when: When, path: Path) -> int | None:
    """The step whose validation is meant; None if the run has no validation."""
    validated = {step: row["validation/success"] for step, row in history.items() if "validation/success" in row}
    if isinstance(when, int):
        if not store.count(step=when, split="validation"):
            steps = ", ".join(map(str, validated)) or "none"
            raise ConfigError(f"{path} has no validation of step {when}; it has those of {steps}")
        return when
    if not validated:  # a run that was killed in its first validation
        newest = store.rows(split="validation", limit=1)
        return newest[0].step if newest else None
    if when == "best":
        return max(validated, key=lambda step: (validated[step] if math.isfinite(validated[step]) else -math.inf, step))
    return max(validated)
