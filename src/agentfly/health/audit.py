"""What can be wrong with one stored chain, seen from the store alone. `health` asks it of every chain of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from ..errors import StorageError
from ..rows import digest_of, rows_of
from ..runs.rows import unpack_values
from ..runs.store import LearnedRow, TrajectoryRow, summary_of
from ..types import Outcome, Trajectory

ROUNDING = 1e-3
"""A log-prob may exceed 0 by this much: in half precision, a token of probability 1 does."""


def examine_chain(row: TrajectoryRow, trajectory: Trajectory) -> Iterator[tuple[str, str]]:
    """Yields (check, problem): the check is "rows", "tokens", "versions" or "rewards"."""
    name = f"chain {row.id} of step {row.step}"
    for checked, problems in (
        ("rows", _columns(row, trajectory)),
        ("tokens", _tokens(trajectory)),
        ("versions", _versions(trajectory)),
        ("rewards", _rewards(row, trajectory)),
    ):
        for problem in problems:
            yield checked, f"{name}: {problem}"


def examine_learned(row: LearnedRow) -> Iterator[str]:
    """Yields what is wrong with the learner's records of a chain."""
    name, count = f"chain {row.id} of step {row.step}", row.num_trained
    if count is None:
        if row.series:
            yield f"{name} has values of the learner, but not how many of its tokens were trained"
        return
    if not 0 <= count <= row.num_tokens:
        yield f"{name}: {count} of {row.num_tokens} tokens were trained"
    if count and not (row.scored and Outcome(row.outcome).trainable):
        yield f"{name} ended in {row.outcome} and has tokens that were trained"
    for kind, (dtype, blob) in row.series.items():
        try:
            values = unpack_values(dtype, blob)
        except StorageError as error:
            yield f"{name}: {kind}: {error}"
            continue
        if len(values) != row.num_tokens:
            yield f"{name} has {len(values)} values of {kind} for {row.num_tokens} tokens"
        elif kind == "trained" and sum(values) != count:
            yield f"{name}: {sum(values):g} tokens are marked as trained, but {count} are counted"


def _columns(row: TrajectoryRow, trajectory: Trajectory) -> Iterator[str]:
    made = summary_of(row.step, row.split, trajectory)
    for field in TrajectoryRow.__slots__:
        stored, own = getattr(row, field), getattr(made, field)
        if stored != own and repr(stored) != repr(own):  # NaN is not equal to itself
            yield f"the column {field} is {stored!r}, but the chain's is {own!r}"


def _tokens(trajectory: Trajectory) -> Iterator[str]:
    for number, turn in enumerate(trajectory.turns, 1):
        reply = turn.completion
        lengths = (len(reply.token_ids), len(reply.logprobs), len(reply.versions))
        if len(set(lengths)) > 1:
            yield f"turn {number} has {lengths[0]} ids, {lengths[1]} log-probs and {lengths[2]} versions"
        if (low := min((*turn.context_ids, *reply.token_ids), default=0)) < 0:
            yield f"turn {number} has the token id {low}"
        wrong = [value for value in reply.logprobs if not -math.inf < value <= ROUNDING]
        if wrong:
            yield f"turn {number} has the log-prob {wrong[0]}, which is not a finite number of at most 0"
        if reply.token_ids and not turn.context_ids and (turn.restarts or number == 1):
            yield f"turn {number} begins with a sampled token, which nothing predicts"
    for row in rows_of(trajectory):
        digest, before = 0, list[int]()
        for number in row:
            turn = trajectory.turns[number]
            if turn.restarts and number != row[0]:
                yield f"turn {number + 1} begins a row that has turns before it"
            if number == row[0] and not turn.restarts:
                yield f"turn {number + 1} continues a prompt that is not stored"
            digest = digest_of([*before, *turn.context_ids], digest)
            before = turn.completion.token_ids
            if turn.prompt_digest not in (None, digest):
                yield f"turn {number + 1} follows other token ids than those that the engine read before it"


def _versions(trajectory: Trajectory) -> Iterator[str]:
    for row in rows_of(trajectory):
        versions = [version for number in row for version in trajectory.turns[number].completion.versions]
        if versions and min(versions) < 0:
            yield f"a token has the version {min(versions)}"
        for earlier, later in pairwise(versions):
            if later < earlier:
                yield f"a token of version {later} follows one of version {earlier}"
                return


def _rewards(row: TrajectoryRow, trajectory: Trajectory) -> Iterator[str]:
    parts = {f"turn {number}": turn.reward for number, turn in enumerate(trajectory.turns, 1)} | trajectory.components
    if trajectory.reward is not None:
        parts["final"] = trajectory.reward
        if trajectory.outcome in (Outcome.WORLD_FAILURE, Outcome.CANCELLED):
            yield f"it ended in {trajectory.outcome.value}, but has the reward {trajectory.reward}"
    for name, value in parts.items():
        if not math.isfinite(value):
            yield f"the reward {name!r} is {value}"
    total = (trajectory.reward or 0.0) + sum(turn.reward for turn in trajectory.turns)
    if not math.isclose(row.total_reward, total, rel_tol=1e-9, abs_tol=1e-12):
        yield f"its total reward is stored as {row.total_reward}, but its parts add up to {total}"
