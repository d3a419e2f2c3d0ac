"""Trajectory to training rows; the only place that makes a mask.

The turns of a trajectory hold the sampled ids and the ids between them, so nothing is rendered or tokenised here. A chain that
failed through no fault of the policy gives no row.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    rewards = _place_rewards(trajectory)
    rows, begin = [], 0
    for number in range(1, len(trajectory.turns) + 1):
        if number == len(trajectory.turns) or trajectory.turns[number].restarts:
            row = _row(trajectory, group, begin, number, rewards)
            rows += [] if row is None else [row]
            begin = number
    return rows


def _place_rewards(trajectory: Trajectory) -> list[float]:
    """Returns, for each turn, the reward on its last sampled token. It is 0 for turns without sampled tokens."""
    placed = [0.0] * len(trajectory.turns)
    last: int | None = None
    unplaced = 0.0
    for number, turn in enumerate(trajectory.turns):
        if len(turn.completion.token_ids):
            last = number
        unplaced += turn.reward
        if last is not None:
            placed[last] += unplaced
            unplaced = 0.0
    assert last is not None  # guaranteed by trainable, like the next
    assert trajectory.reward is not None
    placed[last] += trajectory.reward
    return placed


def _row(trajectory: Trajectory, group: str, begin: int, stop: int, rewards: list[float]) -> Sample | None:
    """Returns the row of turns `begin` to `stop`; None if none of them has a sampled token."""
    turns = trajectory.turns[begin:stop]
    ids = _joined([part for turn in turns for part in (turn.context_ids, turn.completion.token_ids)], np.int64)
    mask, placed = np.zeros(len(ids), dtype=np.bool_), np.zeros(len(ids))
    at = end = 0
    for turn, reward in zip(turns, rewards[begin:stop], strict=True):
        at += len(turn.context_ids)
        if count := len(turn.completion.token_ids):
            if at == 0:
                raise InvariantError(
                    f"chain {trajectory.id!r} has a row that begins with a sampled token, which nothing predicts"
                )
            mask[at : at + count] = True
            at = end = at + count
            placed[end - 1] = reward
    if not end:
        return None
    logprobs, versions = np.zeros(end), np.full(end, -1, dtype=np.int64)
    ids, mask, placed = ids[:end], mask[:end], placed[:end]  # later context predicts nothing
    logprobs[mask] = _joined([turn.completion.logprobs for turn in turns], np.float64)
    versions[mask] = _joined([turn.completion.versions for turn in turns], np.int64)
    return Sample(ids, mask, logprobs, versions, placed, np.zeros(end), group=group, trajectory=trajectory.id)


def _joined(parts: Sequence[Sequence[float] | NDArray[Any]], kind: type[np.generic]) -> NDArray[Any]:
    """Returns lists or arrays of int64 or float64 numbers, one after the other."""
    if set(map(type, parts)) - {list}:
        return np.concatenate([np.zeros(0, dtype=kind), *(np.asarray(part, dtype=kind) for part in parts)])
    buffer, at = bytearray(8 * sum(map(len, parts))), 0
    for part in parts:  # struct converts Python numbers twice as fast as NumPy does
        struct.pack_into(f"{len(part)}{'d' if kind is np.float64 else 'q'}", buffer, at, *part)
        at += 8 * len(part)
    return np.frombuffer(buffer, dtype=kind)


def _trained(rows: Sequence[Sample], name: str) -> NDArray[Any]:
    """Returns one of the arrays of the rows at the masked positions."""
    parts = [getattr(row, name)[row.mask] for row in rows]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def check_tokens(trajectory: Trajectory, rows: Sequence[Sample], *, versions: range) -> None:
    """Checks that `rows` train the sampled tokens of a chain, each once and in order, and nothing else.

    `versions` are those that may have drawn a token. Raises InvariantError, also if a log-prob differs from the engine's, is
    not finite or is above 0.
    """
    name = f"chain {trajectory.id!r}"
    replies = [turn.completion for turn in trajectory.turns]
    sampled = _joined([reply.token_ids for reply in replies], np.int64)
    drawn = _joined([reply.versions for reply in replies], np.int64)
    if len(drawn) and not (versions.start <= drawn.min() and drawn.max() < versions.stop):
        outside = int(drawn.min() if drawn.min() < versions.start else drawn.max())
        raise InvariantError(
            f"{name} holds tokens of version {outside}, but only those of versions {versions.start} to {versions.stop - 1} "
            "may be trained"
        )
    if not rows:
        if trajectory.trainable:
            raise InvariantError(f"{name} has {len(sampled)} sampled tokens, but no training row")
        return
    # Equal bytes are equal numbers: both sides have the same type.
    trained, logprobs = _trained(rows, "token_ids"), _trained(rows, "logprobs")
    if trained.tobytes() != sampled.tobytes():
        raise InvariantError(f"{name}: the mask covers {len(trained)} tokens that are not the {len(sampled)} sampled ones")
    if not (logprobs.max() <= 1e-6 and logprobs.min() > -np.inf):  # false for a NaN
        raise InvariantError(f"{name} holds a log-prob that is not a finite number of at most 0")
    if logprobs.tobytes() != _joined([reply.logprobs for reply in replies], np.float64).tobytes():
        raise InvariantError(f"{name}: the log-probs of its training rows are not those that the engine recorded")
    if _trained(rows, "versions").tobytes() != drawn.tobytes():
        raise InvariantError(f"{name}: the versions of its training rows are not those that the engine recorded")
