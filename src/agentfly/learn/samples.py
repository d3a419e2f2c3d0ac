"""Trajectory to training rows; the only place that makes a mask.

The turns of a trajectory hold the sampled ids and the ids between them, so nothing is rendered or tokenised here. A chain that
failed through no fault of the policy gives no row.
"""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import InvariantError
from ..rows import row_numbers, rows_of, turns_by_row
from ..types import Sample, Trajectory, Turn


def to_samples(trajectory: Trajectory) -> list[Sample]:
    """Returns the rows of a chain, in order; none if it is not trainable.

        turn 0  restarts  context [P]  sampled [A]
        turn 1            context [R]  sampled [B]  ->  [P A R B], mask [0 1 0 1]
        turn 2  restarts  context [Q]  sampled [C]  ->  [Q C],     mask [0 1]      (history was rewritten)

        rewards   P A R B  |  Q C
                    |   |       |
               turn 0   1       2 and the final reward: each on the last sampled token of its turn

    The rows are in the order of `rows.rows_of`: the one that ended the chain, which gets the final reward, is last. A row ends
    with its last sampled token, because later context predicts nothing. The reward of a turn without sampled tokens goes to the
    sampled token before it (at the very start: after it), so that the rewards always add up to `trajectory.total_reward`.
    """
    return rows_of_chains([trajectory])[0]


def rows_of_chains(trajectories: Sequence[Trajectory]) -> list[list[Sample]]:
    """Returns the rows of each chain, as `to_samples` does. The arrays of all rows are slices of one array of each kind."""
    segments = [_segments(trajectory) for trajectory in trajectories]
    turns = [turn for chain in segments for segment in chain for turn in segment.turns]
    replies = [turn.completion for turn in turns]
    ids = _joined([part for turn in turns for part in (turn.context_ids, turn.completion.token_ids)], np.int64)
    lengths = [(len(turn.context_ids), len(turn.completion.token_ids)) for turn in turns]
    sizes = np.array(lengths, dtype=np.int64).reshape(-1, 2)
    mask = np.repeat(np.tile([False, True], len(turns)), sizes.ravel())
    logprobs, versions, rewards = np.zeros(len(ids)), np.full(len(ids), -1, dtype=np.int64), np.zeros(len(ids))
    logprobs[mask] = _joined([reply.logprobs for reply in replies], np.float64)
    versions[mask] = _joined([reply.versions for reply in replies], np.int64)
    with_reply = sizes[:, 1] > 0
    rewards[np.cumsum(sizes.sum(1))[with_reply] - 1] = np.array(
        [reward for chain in segments for segment in chain for reward in segment.rewards]
    )[with_reply]
    advantages = np.zeros(len(ids))
    rows_by_chain, at = [], 0
    for trajectory, chain in zip(trajectories, segments, strict=True):
        group = f"{trajectory.task.id}#{trajectory.draw}" if trajectory.draw else trajectory.task.id
        rows = []
        for segment in chain:
            part = slice(at, at + segment.size)
            at += segment.size
            row = Sample(
                ids[part], mask[part], logprobs[part], versions[part], rewards[part], advantages[part],
                group=group, trajectory=trajectory.id,
            )  # fmt: skip
            rows.append(row)
        rows_by_chain.append(rows)
    return rows_by_chain


def row_of(parts: Sequence[tuple[Sequence[int], Sequence[int], Sequence[float]]]) -> Sample:
    """Returns a row that no update trains. Each part is a context, the tokens that follow it, and their log-probs."""
    ids = _joined([each for context, drawn, _ in parts for each in (context, drawn)], np.int64)
    mask = np.repeat(
        np.tile([False, True], len(parts)), [size for context, drawn, _ in parts for size in (len(context), len(drawn))]
    )
    nothing, logprobs = np.zeros(len(ids)), np.zeros(len(ids))
    logprobs[mask] = _joined([part[2] for part in parts], np.float64)
    return Sample(ids, mask, logprobs, nothing, nothing, nothing)


def opening_row(trajectory: Trajectory, most: int) -> Sample | None:
    """Returns a chain up to its `most`-th sampled token or to where a template rewrites its history, however it ended.

    Nothing that was drawn later decides which tokens the row holds, so they are a fair sample of what the sampler draws.
    """
    parts, left = [], most
    first = row_numbers(trajectory.turns)
    for turn in (turn for turn, row in zip(trajectory.turns, first, strict=True) if row == first[0]):
        reply = turn.completion
        parts.append((turn.context_ids, reply.token_ids[:left], reply.logprobs[:left]))
        left -= len(parts[-1][1])
        if not left:
            break
    while parts and not len(parts[-1][1]):
        parts.pop()
    return row_of(parts) if parts and len(parts[0][0]) else None


class _Segment(NamedTuple):
    """The turns of one row, up to its last sampled token, and the reward on the last sampled token of each."""

    turns: list[Turn]
    rewards: list[float]
    size: int


def _segments(trajectory: Trajectory) -> list[_Segment]:
    """Returns what each row of a chain is made of."""
    if not trajectory.trainable:
        return []
    rows, turns = rows_of(trajectory), trajectory.turns
    rewards = _place_rewards(trajectory, rows)
    segments = []
    for row in rows:
        while row and not len(turns[row[-1]].completion.token_ids):
            row.pop()  # later context predicts nothing
        if not row:
            continue
        own = [turns[index] for index in row]
        first = next(turn for turn in own if len(turn.context_ids) or len(turn.completion.token_ids))
        if not len(first.context_ids):
            raise InvariantError(f"chain {trajectory.id!r} has a row that begins with a sampled token, which nothing predicts")
        size = sum(len(turn.context_ids) + len(turn.completion.token_ids) for turn in own)
        segments.append(_Segment(own, [rewards[index] for index in row], size))
    return segments


def _place_rewards(trajectory: Trajectory, rows: Sequence[Sequence[int]]) -> list[float]:
    """Returns, for each turn, the reward on its last sampled token. It is 0 for turns without sampled tokens.

    The final reward is on the last turn of the row that ended the chain.
    """
    placed = [0.0] * len(trajectory.turns)
    last: int | None = None
    unplaced = 0.0
    for number in (number for row in rows for number in row):
        turn = trajectory.turns[number]
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


def _joined(parts: Sequence[Sequence[float] | NDArray[Any]], kind: type[np.generic]) -> NDArray[Any]:
    """Returns lists or arrays of int64 or float64 numbers, one after the other."""
    if set(map(type, parts)) - {list}:
        return np.concatenate(parts, dtype=kind, casting="unsafe")  # an empty list counts as floats
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
    """Checks that `rows` train the sampled tokens of a chain, each once, after what the engine read, and nothing else.

    `versions` are those that may have drawn a token. Raises InvariantError, also if a log-prob differs from the engine's, is
    not finite or is above 0.
    """
    name = f"chain {trajectory.id!r}"
    replies = [turn.completion for turn in turns_by_row(trajectory)]
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
    if (wrong := _wrong_context(trajectory, rows)) is not None:
        raise InvariantError(
            f"{name}: the reply of turn {wrong} would be trained after other tokens than those that the engine read before it"
        )


def _wrong_context(trajectory: Trajectory, rows: Sequence[Sample]) -> int | None:
    """The index of the first turn whose reply follows other ids than those of its request; None if there is none.

    The rows hold the sampled tokens of all turns, row by row. Turns without a recorded digest are not compared.
    """
    places = [np.flatnonzero(row.mask) for row in rows]
    number, used, digest, done = 0, 0, 0, 0
    for index in (index for row in rows_of(trajectory) for index in row):
        turn = trajectory.turns[index]
        count = len(turn.completion.token_ids)
        if not count:
            continue
        while used >= len(places[number]):
            used, number, digest, done = used - len(places[number]), number + 1, 0, 0
        at = int(places[number][used])
        used += count
        digest, done = zlib.crc32(rows[number].token_ids[done:at].astype("<i8", copy=False).tobytes(), digest), at
        if turn.prompt_digest not in (None, digest):
            return index
    return None


def check_chains(trajectories: Sequence[Trajectory], rows: Sequence[Sequence[Sample]]) -> None:
    """Does what `check_tokens` does for many chains, whose tokens may be of any version. All are compared at once."""
    if not _as_sampled(trajectories, rows):
        for trajectory, own in zip(trajectories, rows, strict=True):
            check_tokens(trajectory, own, versions=range(-sys.maxsize, sys.maxsize))
        raise InvariantError("the training rows of all chains together are not what was sampled, although those of each are")


def _as_sampled(trajectories: Sequence[Trajectory], rows: Sequence[Sequence[Sample]]) -> bool:
    if any(trajectory.trainable and not own for trajectory, own in zip(trajectories, rows, strict=True)):
        return False
    trained = [trajectory for trajectory, own in zip(trajectories, rows, strict=True) if own]
    if not trained:
        return True
    every = [row for own in rows for row in own]
    mask = np.concatenate([row.mask for row in every])
    # Tokens that moved to the chain before or after their own are seen by the counts alone.
    ends = np.cumsum([sum(len(row.mask) for row in own) for own in rows if own])
    counts = np.diff(np.cumsum(mask)[ends - 1], prepend=0)
    if counts.tolist() != [trajectory.num_sampled for trajectory in trained]:
        return False
    replies = [turn.completion for trajectory in trained for turn in turns_by_row(trajectory)]
    ids, versions = (np.concatenate([getattr(row, name) for row in every])[mask] for name in ("token_ids", "versions"))
    logprobs = np.concatenate([row.logprobs for row in every])[mask]
    return bool(
        (ids == _joined([reply.token_ids for reply in replies], np.int64)).all()
        and (versions == _joined([reply.versions for reply in replies], np.int64)).all()
        and (logprobs == _joined([reply.logprobs for reply in replies], np.float64)).all()
        and logprobs.max() <= 1e-6
        and logprobs.min() > -np.inf
        and all(_wrong_context(trajectory, own) is None for trajectory, own in zip(trajectories, rows, strict=True) if own)
    )
