"""What training did with a stored chain, and which chains are worth training on again.

`training_of` says which tokens of a chain were in the loss, and why the others were not. The other functions choose the best
chains of each task, and the best and the worst of each group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..rows import rows_of
from ..types import Outcome, Trajectory
from .catalog import read_config
from .filters import ChainFilter
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
    turns, start = [list[bool]() for _ in lengths], 0
    for index in (index for order in rows_of(trajectory) for index in order):
        turns[index] = flags[start : start + lengths[index]]
        start += lengths[index]
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


def every_row(reader: RunReader, chosen: ChainFilter) -> Iterator[ChainRow]:
    """All chains that match, in the order in which they were added."""
    cursor: str | None = None
    while True:
        rows, cursor = reader.page(chosen, "added", cursor, 1000)
        yield from rows
        if cursor is None:
            return


def success_of(reader: RunReader) -> float:
    """The reward that counts as success in the run's config."""
    agent = read_config(reader.path.parent).get("agent")
    return float(agent.get("success_at", 1.0)) if isinstance(agent, dict) else 1.0


def by_task(reader: RunReader, chosen: ChainFilter) -> list[list[ChainRow]]:
    """The scored chains of each task: the highest reward first, then the fewest tokens."""
    tasks: dict[str, list[ChainRow]] = {}
    for row in every_row(reader, chosen):
        if row.score is not None:
            tasks.setdefault(row.task_id, []).append(row)
    return [sorted(rows, key=lambda row: (-(row.score or 0), row.num_tokens)) for rows in tasks.values()]


def best_and_worst(reader: RunReader, chosen: ChainFilter, min_gap: float = 0.0) -> Iterator[tuple[ChainRow, ChainRow]]:
    """The best and the worst chain of each group in which they have different rewards, `min_gap` apart at least."""
    steps = reader.values("step") if chosen.step is None else [chosen.step]
    for step in steps:
        groups: dict[tuple[str, int], list[ChainRow]] = {}
        for row in every_row(reader, replace(chosen, step=step)):
            if row.score is not None and row.num_turns:
                groups.setdefault((row.task_id, row.draw), []).append(row)
        for rows in groups.values():
            high, low = max(rows, key=lambda row: row.score or 0), min(rows, key=lambda row: row.score or 0)
            gap = (high.score or 0) - (low.score or 0)
            if gap > 0 and gap >= min_gap:
                yield high, low


def why_none_is_good(reader: RunReader, chosen: ChainFilter) -> str:
    """Why no chain reaches the lower bound of the reward in `chosen`, as a sentence that names the option."""
    rows, run = every_row(reader, replace(chosen, reward_low=None)), reader.path.parent
    best = max((row.score for row in rows if row.score is not None), default=None)
    if best is None:
        return f"{run} has no training chain with a reward that the options choose"
    low = chosen.reward_low or 0.0
    return f"no training chain of {run} has a reward of at least {low:g}; the best has {best:g}: set --min-reward"
