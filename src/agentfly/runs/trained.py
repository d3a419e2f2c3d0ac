"""What training did with a stored chain: which of its tokens were in the loss, and why the others were not."""

from __future__ import annotations

from dataclasses import dataclass

from ..types import Outcome, Trajectory
from .query import RunReader
from .rows import ChainRow, TokenSeries


@dataclass(frozen=True, slots=True)
class Training:
    """`turns` has, for each turn, one value per sampled token: whether it was in the loss of an optimizer step.

    `turns` is None if the run did not record it or the step is not finished. `reason` says why no token was trained,
    or only some were; it is None if all were, or if nothing is known.
    """

    turns: list[list[bool]] | None
    reason: str | None

    @property
    def num_trained(self) -> int | None:
        """The number of trained tokens; None if it is not known."""
        return None if self.turns is None else sum(map(sum, self.turns))


def training_of(
    reader: RunReader, row: ChainRow, trajectory: Trajectory | None = None, series: TokenSeries | None = None
) -> Training:
    """What the store says about a chain. `trajectory` and `series` are read if they are not given."""
    trajectory = reader.trajectory(row.id) if trajectory is None else trajectory
    lengths = [len(turn.completion.token_ids) for turn in trajectory.turns]
    untrainable = _untrainable(row, trajectory)
    if untrainable is not None:
        return Training([[False] * length for length in lengths], untrainable)
    flags = (reader.token_series(row.id) if series is None else series).trained
    if flags is None:
        finished = row.step in {step for step, _, _ in reader.series(["train/skipped"])["train/skipped"]}
        return Training(None, None if finished else f"step {row.step} is not finished")
    turns, start = [], 0
    for length in lengths:
        turns.append(flags[start : start + length])
        start += length
    count = sum(flags)
    if count == len(flags):
        return Training(turns, None)
    if count:
        return Training(turns, f"{len(flags) - count} of its {len(flags)} tokens were too old, or had no advantage")
    return Training(turns, _why_none(reader, row))


def _untrainable(row: ChainRow, trajectory: Trajectory) -> str | None:
    if row.split != "train":
        return "a held-out task"
    if not Outcome(row.outcome).trainable:
        return f"the chain ended in {row.outcome}"
    if not trajectory.trainable:
        return "no reward" if trajectory.reward is None else "no token ids"
    return None


def _why_none(reader: RunReader, row: ChainRow) -> str:
    series = reader.series(["train/skipped", "train/critic_warmup"], row.step - 1)
    at_step = {name: next((value for step, _, value in points if step == row.step), None) for name, points in series.items()}
    if at_step["train/critic_warmup"]:
        return f"the critic learned alone in step {row.step}"
    if row.advantage:
        return "its tokens were older than rollout.max_lag versions"
    scores = {each.score for each in reader.group(row.step, row.task_id, row.draw) if each.score is not None}
    if len(scores) == 1:
        return "its siblings have the same reward, so its advantage is 0"
    if at_step["train/skipped"]:
        return f"step {row.step} was skipped, because every advantage was 0"
    return "its advantage is 0"
