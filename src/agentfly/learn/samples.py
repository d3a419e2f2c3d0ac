"""Trajectory to training rows; the only place that makes a mask.

The turns of a trajectory hold the sampled ids and the ids between them, so nothing is rendered or tokenised here. A chain that
failed through no fault of the policy gives no row.
"""

from __future__ import annotations

from ..errors import InvariantError
from ..types import Sample, Trajectory


def to_samples(trajectory: Trajectory) -> list[Sample]:
    """Returns the rows of a chain, in order; none if it is not trainable.

        turn 0  restarts  context [P]  sampled [A]
        turn 1            context [R]  sampled [B]  ->  [P A R B], mask [0 1 0 1]
        turn 2  restarts  context [Q]  sampled [C]  ->  [Q C],     mask [0 1]      (history was rewritten)

        rewards   P A R B  |  Q C
                    |   |       |
               turn 0   1       2 and the final reward: each on the last sampled token of its turn

    A row ends with its last sampled token, because later context predicts nothing. The reward of a turn without sampled tokens
    goes to the sampled token before it (at the very start: after it), so that the rewards always add up to
    `trajectory.total_reward`.
    """
    if not trajectory.trainable:
        return []
    group = f"{trajectory.task.id}#{trajectory.draw}" if trajectory.draw else trajectory.task.id
    rows: list[Sample] = []
    last: tuple[Sample, int] | None = None
    unplaced = 0.0
    for turn in trajectory.turns:
        if turn.restarts or not rows:
            rows.append(Sample([], [], [], [], [], [], group=group, trajectory=trajectory.id))
        row, sampled = rows[-1], turn.completion
        num_context, num_sampled = len(turn.context_ids), len(sampled.token_ids)
        row.token_ids += turn.context_ids + sampled.token_ids
        row.mask += [0] * num_context + [1] * num_sampled
        row.logprobs += [0.0] * num_context + sampled.logprobs
        row.versions += [-1] * num_context + sampled.versions
        row.rewards += [0.0] * (num_context + num_sampled)
        if num_sampled:
            last = row, len(row.mask) - 1
        unplaced += turn.reward
        if last is not None:
            last[0].rewards[last[1]] += unplaced
            unplaced = 0.0
    assert last is not None  # guaranteed by trainable, like the next
    assert trajectory.reward is not None
    last[0].rewards[last[1]] += trajectory.reward
    return [_finish(row, trajectory) for row in rows if any(row.mask)]


def _finish(row: Sample, trajectory: Trajectory) -> Sample:
    if row.mask[0]:
        raise InvariantError(f"chain {trajectory.id!r} has a row that begins with a sampled token, which nothing predicts")
    end = len(row.mask) - row.mask[::-1].index(1)
    for part in (row.token_ids, row.mask, row.logprobs, row.versions, row.rewards):
        del part[end:]
    row.advantages = [0.0] * end
    return row
