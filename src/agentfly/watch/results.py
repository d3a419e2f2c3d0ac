"""What a training and an evaluation return: figures, trajectories, and how they show themselves."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..display import Displayed, chains_html, data_frame, run_html
from ..errors import RolloutError
from ..types import RunResult, Trajectory
from .held_out import interval_text, is_part, left_out


@dataclass(slots=True, repr=False)
class TrainResult(Displayed):
    """The run's folder and results. `before` and `after` are validations; `history` has one row per step.

    `checkpoint` is the newest one, `best` that with the best validation (`train.keep_best`). `stopped`
    says why the run ended before its last step (`train.stop_after`, `train.budget`). `cost` has the metrics cost/* at the end.
    """

    directory: Path
    steps: int
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list, repr=False)
    sample: Trajectory | None = None
    checkpoint: Path | None = None
    best: Path | None = None
    stopped: str | None = None
    cost: dict[str, float] = field(default_factory=dict)

    def to_pandas(self) -> Any:
        """The history as a pandas.DataFrame: a row per step, a column per metric. Raises MissingExtra."""
        first = self.steps - len(self.history) + 1
        return data_frame({"step": first + number, **row} for number, row in enumerate(self.history))

    def __repr__(self) -> str:
        ends = [row["validation/success"] for row in (self.before, self.after) if "validation/success" in row]
        about = interval_text(self.after, "validation/success")
        held = f", held-out success {' -> '.join(f'{value:.3g}' for value in ends)}{about}" if ends else ""
        missing = "" if (note := left_out(self.after)) is None else f"; {note}"
        return f"<TrainResult {self.directory}: {self.steps} steps{held}{missing}>"

    def _repr_html_(self) -> str:
        names = list(dict.fromkeys([*self.before, *self.after]))
        held = [(name, self.before.get(name), self.after.get(name)) for name in names]
        return run_html(
            repr(self).strip("<>"),
            {"steps": self.steps, "folder": self.directory, "checkpoint": self.checkpoint, "best": self.best},
            {"reward/mean": [row.get("reward/mean", math.nan) for row in self.history]},
            {"held-out tasks": (("metric", "before", "after"), held)},
            self.sample,
        )


@dataclass(frozen=True, slots=True, repr=False)
class Evaluation(Displayed):
    """Metrics by name (validation/success, validation/pass_at_4, ...) and all trajectories.

    A metric of no chains is NaN: success is that of the chains that have a score, and validation/scored counts them.
    `directory` is the folder that holds the trajectories, if they were stored.
    """

    metrics: dict[str, float]
    trajectories: list[Trajectory]
    num_chains: int
    directory: Path | None = None

    def to_pandas(self) -> Any:
        """A pandas.DataFrame with a row per chain. Raises MissingExtra."""
        return RunResult(self.trajectories, self.num_chains, 0.0).to_pandas()

    def __repr__(self) -> str:
        figures = ", ".join(
            f"{name.removeprefix('validation/')} {value:.4g}{interval_text(self.metrics, name)}"
            for name, value in self.metrics.items()
            if not is_part(name)
        )
        missing = f"; {note}" if (note := left_out(self.metrics)) is not None else ""
        return f"<Evaluation {len(self.trajectories)} chains, {self.num_chains} per task: {figures}{missing}>"

    def _repr_html_(self) -> str:
        return chains_html(repr(self).strip("<>"), self.trajectories)

    def to_json(self) -> dict[str, Any]:
        """The metrics for a JSON file, which has no NaN: None instead. `chains` and `scored` say how many there were."""
        figures = {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}
        return {**figures, "chains": len(self.trajectories), "scored": sum(each.scored for each in self.trajectories)}

    def check(self) -> None:
        """Raises RolloutError if no chain has a score, so the metrics say nothing about the agent."""
        if any(trajectory.scored for trajectory in self.trajectories):
            return
        ends = Counter(trajectory.outcome.value for trajectory in self.trajectories)
        counts = ", ".join(f"{count} {outcome}" for outcome, count in ends.most_common())
        why = next((trajectory.error for trajectory in self.trajectories if trajectory.error), None)
        raise RolloutError(f"no chain has a score ({counts})" + (f"; the first error: {why}" if why else ""))
