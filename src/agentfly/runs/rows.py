"""The rows of a store: what is written of a trajectory, what a `RunReader` returns, and the figures computed from both."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import StorageError
from ..types import Trajectory
from .bodies.texts import clean_text

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
BUCKET = 1.2
"""Bucket n of a tool's latencies holds the seconds from 1.2 ** n to below 1.2 ** (n + 1)."""
MAX_PREDICTION = 300
"""Characters of the prediction in a summary; the body has all of it."""
MAX_ERROR = 1000
UNKNOWN_TOOL = "(unknown tool)"
"""Stands for every name that a model made up."""


@dataclass(frozen=True, slots=True)
class ChainRow:
    """A summary of a stored chain. A value of None was not recorded, or does not exist for this chain.

    `score` is the total reward of a scored chain. `advantage` is the mean over its sampled tokens, and `num_trained` the number
    of tokens that were in the loss of an optimizer step; both are None until the learner has used the chain.
    """

    key: int
    id: str
    step: int
    split: str
    task_id: str
    draw: int
    chain: int
    outcome: str
    reward: float | None
    total_reward: float | None
    score: float | None
    components: dict[str, float]
    prediction: str
    num_turns: int
    num_tokens: int
    seconds: float
    num_context: int | None = None
    num_calls: int | None = None
    num_invalid: int | None = None
    version_first: int | None = None
    version_last: int | None = None
    generate_s: float | None = None
    tool_s: float | None = None
    wait_s: float | None = None
    started: float | None = None
    error: str | None = None
    advantage: float | None = None
    num_trained: int | None = None


@dataclass(frozen=True, slots=True)
class Count:
    """A number of chains. If `exact` is false there are at least so many: the count was capped, or took too long."""

    value: int
    exact: bool


@dataclass(frozen=True, slots=True)
class Histogram:
    """Rewards of scored chains: `counts[i]` lie from `edges[i]` to below `edges[i + 1]`, the last bin includes its end.

    `sampled` is the share of the chains that was read; the counts are then scaled up.
    """

    edges: list[float]
    counts: list[int]
    sampled: float = 1.0


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step of one split: how its chains ended, and the quantiles (`QUANTILES`) of their rewards.

    `phase` is what the step does now, or "done". `whole` says that all its records are stored.
    """

    step: int
    split: str
    chains: int
    scored: int
    outcomes: dict[str, int]
    mean: float | None
    quantiles: list[float]
    started: float | None = None
    ended: float | None = None
    phase: str | None = None
    whole: bool = True


@dataclass(frozen=True, slots=True)
class GroupRow:
    """The sibling chains of one draw of a task. `spread` is the standard deviation of their rewards.

    `teaches` says whether a token of the group was trained; in a run that did not record it, whether its rewards differ.
    """

    step: int
    task_id: str
    draw: int
    chains: int
    scored: int
    mean: float | None
    low: float | None
    high: float | None
    spread: float | None
    num_trained: int | None
    teaches: bool


@dataclass(frozen=True, slots=True)
class ToolRow:
    """The calls of one tool, in one step or in the whole run: how many, how many failed, and the quantiles of their seconds."""

    name: str
    calls: int
    errors: int
    p50_s: float | None
    p95_s: float | None
    max_s: float | None
    step: int | None = None
    split: str | None = None


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One invariant at one step. `value` must be at most `bound`; both are None for a check that has no number."""

    step: int
    name: str
    ok: bool
    value: float | None
    bound: float | None


@dataclass(frozen=True, slots=True)
class EventRow:
    """Something that happened: a phase of a step, a chain that started or ended, a failure, a warning."""

    key: int
    t: float
    step: int | None
    kind: str
    who: str | None
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TokenSeries:
    """Values per sampled token of one chain, row by row (`agentfly.rows`). None: not recorded.

    `trained` says for each token whether it was in the loss of an optimizer step. `advantage` is what the algorithm gave it,
    `trainer_logprob` its log-prob under the learner's weights before the update, `entropy` that of the learner's distribution
    (NaN for a token that the learner did not compute).
    """

    num_tokens: int
    trained: list[bool] | None = None
    advantage: list[float] | None = None
    trainer_logprob: list[float] | None = None
    entropy: list[float] | None = None
    others: dict[str, list[float]] = field(default_factory=dict)


def columns_of(step: int, split: str, trajectory: Trajectory) -> dict[str, Any]:
    """The columns of a summary (`schema.CHAIN_COLUMNS`), without those that the learner adds."""
    turns = trajectory.turns
    # Versions do not decrease within a reply, so its first and its last are the least and the greatest.
    drawn = [turn.completion.versions for turn in turns]
    versions = [int(version) for part in drawn for version in (*part[:1], *part[-1:])]
    total = trajectory.total_reward
    return {
        "id": clean_text(trajectory.id),
        "step": step,
        "split": split,
        "task_id": clean_text(trajectory.task.id),
        "draw": trajectory.draw,
        "chain": trajectory.chain,
        "outcome": trajectory.outcome.value,
        "reward": trajectory.reward,
        "total_reward": total,
        "score": None if trajectory.reward is None else total,
        "components": json.dumps(trajectory.components),
        "prediction": clean_text(trajectory.prediction[:MAX_PREDICTION]),
        "num_turns": len(turns),
        "num_tokens": trajectory.num_sampled,
        "seconds": trajectory.seconds,
        "num_context": sum(len(turn.context_ids) for turn in turns),
        "num_calls": sum(len(turn.calls) for turn in turns),
        "num_invalid": trajectory.num_invalid_calls,
        "version_first": min(versions, default=None),
        "version_last": max(versions, default=None),
        "generate_s": sum(turn.sampled_s for turn in turns),
        "tool_s": sum(turn.tools_s for turn in turns),
        "wait_s": trajectory.waited_s,
        "started": trajectory.started or None,
        "error": None if trajectory.error is None else clean_text(trajectory.error[:MAX_ERROR]),
    }


@dataclass(slots=True)
class ToolCounts:
    """The calls of one tool. `buckets` counts their seconds; a call without a time is in none."""

    calls: int = 0
    errors: int = 0
    max_s: float | None = None
    buckets: dict[int, int] = field(default_factory=dict)

    def add(self, seconds: float | None, failed: bool) -> None:
        self.calls += 1
        self.errors += failed
        if seconds:
            self.max_s = max(seconds, self.max_s or 0.0)
            bucket = math.floor(math.log(seconds, BUCKET))
            self.buckets[bucket] = self.buckets.get(bucket, 0) + 1

    def merge(self, other: ToolCounts, sign: int = 1) -> None:
        """Add the calls of another; with `sign` -1, take them away. The longest call stays."""
        self.calls += sign * other.calls
        self.errors += sign * other.errors
        for bucket, count in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + sign * count
        self.max_s = max((most for most in (self.max_s, other.max_s) if most is not None), default=None)

    def quantile(self, q: float) -> float | None:
        """The seconds of a quantile: the middle of its bucket, at most the longest call."""
        total, seen = sum(self.buckets.values()), 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen >= q * total:
                middle: float = BUCKET ** (bucket + 0.5)
                return middle if self.max_s is None else min(middle, self.max_s)
        return None


def tool_counts(trajectory: Trajectory) -> dict[str, ToolCounts]:
    """The calls of a chain by tool. A call without a result was interrupted, and counts as failed."""
    counts: dict[str, ToolCounts] = {}
    for turn in trajectory.turns:
        for index, call in enumerate(turn.calls):
            result = turn.results[index] if index < len(turn.results) else None
            unknown = result is not None and result.error == "unknown_tool"
            name = UNKNOWN_TOOL if unknown else clean_text(call.name[:200])
            seconds = turn.calls_s[index] if index < len(turn.calls_s) else None
            counts.setdefault(name, ToolCounts()).add(seconds, result is None or result.error is not None)
    return counts


def tool_values(counts: ToolCounts) -> tuple[Any, ...]:
    """The columns calls, errors, p50_s, p95_s, max_s and buckets of the table `tools`."""
    quantiles = (counts.quantile(0.5), counts.quantile(0.95))
    return (counts.calls, counts.errors, *quantiles, counts.max_s, json.dumps(counts.buckets))


def sum_tools(parts: Iterable[Mapping[str, ToolCounts]]) -> dict[str, ToolCounts]:
    """The calls of several chains by tool."""
    merged: dict[str, ToolCounts] = {}
    for part in parts:
        for name, counts in part.items():
            merged.setdefault(name, ToolCounts()).merge(counts)
    return merged


def step_stats(chains: Sequence[tuple[str, float | None]]) -> tuple[int, int, float | None, list[float], dict[str, int]]:
    """Of (outcome, score) pairs: chains, scored chains, mean and `QUANTILES` of the scores, chains by outcome."""
    outcomes: dict[str, int] = {}
    for outcome, _ in chains:
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    scores = sorted(score for _, score in chains if score is not None)
    if not scores:
        return len(chains), 0, None, [], outcomes
    last = len(scores) - 1
    return len(chains), len(scores), math.fsum(scores) / len(scores), [scores[round(q * last)] for q in QUANTILES], outcomes


def unpack_values(dtype: str, blob: bytes) -> list[float]:
    """The numbers of a stored series: float32 "f", float16 "e", bytes "B". Raises StorageError if it holds something else."""
    if dtype not in ("f", "e", "B"):
        raise StorageError(f"a series of tokens has the unknown type {dtype!r}")
    count, rest = divmod(len(blob), struct.calcsize(f"<{dtype}"))
    if rest:
        raise StorageError(f"a series of tokens is cut: {len(blob)} bytes of type {dtype!r}")
    return list(struct.unpack(f"<{count}{dtype}", blob))


def tool_row(row: Sequence[Any]) -> tuple[str, ToolCounts]:
    """Name and counts of a stored row (name, calls, errors, max_s, buckets)."""
    name, calls, errors, max_s, buckets = row
    return name, ToolCounts(calls, errors, max_s, {int(bucket): count for bucket, count in json.loads(buckets).items()})


def group_row(step: int, task: str, draw: int, chains: Sequence[tuple[float | None, int | None]]) -> GroupRow:
    scores = [score for score, _ in chains if score is not None]
    counted = [trained for _, trained in chains if trained is not None]
    mean = math.fsum(scores) / len(scores) if scores else None
    spread = None if mean is None else math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / len(scores))
    trained = sum(counted) if counted else None
    return GroupRow(
        step, task, draw, len(chains), len(scores), mean, min(scores, default=None), max(scores, default=None), spread, trained,
        teaches=trained > 0 if trained is not None else bool(spread),
    )  # fmt: skip


def chain_row(row: Sequence[Any]) -> ChainRow:
    values = list(row)
    values[11] = json.loads(values[11])
    return ChainRow(*values)
