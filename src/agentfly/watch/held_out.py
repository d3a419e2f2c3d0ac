"""The figures of an evaluation: success, pass@k and pass^k, over how many chains they are, and how sure they are.

A chain that the world failed has no score. No figure hides it: `validation/scored` counts the others, and where more than 1 %
are missing, `_min` and `_max` bound the figure by taking them as failures and as successes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..runs.compare import bootstrap_interval, mean
from ..types import Trajectory
from .metrics import by_source, is_success, rollout_metrics

NEGLIGIBLE = 0.01
"""The share of chains without a score above which bounds are told."""
ROUNDS = 1000
"""Resampled means of an interval: a validation in a training must not take long."""
SHOWN = (
    "invalid_call_chains", "invalid_call_rate", "unknown_tool_rate", "bad_argument_rate", "written_observations",
    "unsupported_answers", "judged_answers",
)  # fmt: skip
"""The figures of `honesty` that an evaluation has."""
_OF_SOURCE = ("success", "reward", "pass_", "tasks")
_PARTS = ("_ci_low", "_ci_high", "_min", "_max")


def held_out_metrics(
    groups: Sequence[Sequence[Trajectory]], num_chains: int, seconds: float, success_at: float
) -> dict[str, float]:
    """All validation/* metrics of the chains of each task. Those of a source (`data.sources`) are validation/SOURCE/*."""
    metrics = _figures(groups, num_chains, seconds, success_at)
    for source, of_source in by_source(groups).items():
        for name, value in _figures(of_source, num_chains, seconds, success_at).items():
            last = name.removeprefix("validation/")
            if last.startswith(_OF_SOURCE) and math.isfinite(value):
                metrics[f"validation/{source}/{last}"] = value
    return metrics


def _figures(groups: Sequence[Sequence[Trajectory]], num_chains: int, seconds: float, success_at: float) -> dict[str, float]:
    chains = [trajectory for group in groups for trajectory in group]
    raw = rollout_metrics(chains, seconds, success_at)
    counts = [Counts.of(group, success_at) for group in groups]
    shares = [each.good / each.scored for each in counts if each.scored]
    low, high = success_interval(shares)
    scored = sum(each.scored for each in counts)
    missing = is_told(scored, len(chains))
    metrics = {
        "validation/success": raw["rollout/success"],
        "validation/success_ci_low": low,
        "validation/success_ci_high": high,
        **(dict(zip(("validation/success_min", "validation/success_max"), bounds(raw["rollout/success"], scored, len(chains)),
                    strict=True)) if missing else {}),
        "validation/reward": raw["reward/mean"],
        "validation/turns": raw["rollout/turns"],
        "validation/tool_calls": raw["rollout/tool_calls"],
        **{f"validation/{name}": raw[f"rollout/{name}"] for name in SHOWN if f"rollout/{name}" in raw},
        "validation/tasks": float(len(groups)),
        "validation/chains": float(len(chains)),
        "validation/scored": float(scored),
    }  # fmt: skip
    for k in sorted({1 << power for power in range(num_chains.bit_length())} | {num_chains}):
        for name, estimate in ((f"validation/pass_at_{k}", pass_at_k), (f"validation/pass_all_{k}", pass_all_k))[: 1 + (k > 1)]:
            metrics[name] = _mean([estimate(each.scored, each.good, k) for each in counts if each.scored])
            if missing:
                metrics[f"{name}_min"] = _mean([estimate(each.total, each.good, k) for each in counts])
                metrics[f"{name}_max"] = _mean([estimate(each.total, each.good + each.lost, k) for each in counts])
    return metrics


class Counts(NamedTuple):
    """The chains of one task: all, those with a score, and those that succeeded."""

    total: int
    scored: int
    good: int

    @property
    def lost(self) -> int:
        return self.total - self.scored

    @classmethod
    def of(cls, group: Sequence[Trajectory], success_at: float) -> Counts:
        scored = [trajectory for trajectory in group if trajectory.scored]
        return cls(len(group), len(scored), sum(is_success(trajectory, success_at) for trajectory in scored))


def pass_at_k(n: int, good: int, k: int) -> float:
    """Returns the unbiased estimate, from n chains of which `good` succeeded, that one of k succeeds; arXiv:2107.03374.

    With fewer than k chains it is that of one of n, which is never higher: the task is not left out, because slow and fragile
    tasks, which lose chains, are often hard ones.
    """
    k = min(n, k)
    return 1.0 - math.comb(n - good, k) / math.comb(n, k)


def pass_all_k(n: int, good: int, k: int) -> float:
    """Returns the unbiased estimate, from n chains of which `good` succeeded, that all of k succeed (pass^k); arXiv:2406.12045.

    With fewer than k chains it is that of all n, which is never lower: the bounds say what the missing ones could change.
    """
    k = min(n, k)
    return math.comb(good, k) / math.comb(n, k)


def success_interval(shares: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean over tasks, by resampling tasks. If all tasks have 0, or all have 1, the exact one."""
    if not shares:
        return math.nan, math.nan
    if min(shares) == max(shares) in (0.0, 1.0):
        margin = 1 - 0.025 ** (1 / len(shares))
        return (1 - margin, 1.0) if shares[0] else (0.0, margin)
    return bootstrap_interval(shares, rounds=ROUNDS)


def bounds(share: float, scored: float, total: float) -> tuple[float, float]:
    """A share of scored chains as one of all chains, if those without a score failed and if they succeeded."""
    good = share * scored if scored else 0.0
    return good / total, (good + total - scored) / total


def is_told(scored: float, total: float) -> bool:
    """Whether so many chains have no score that a figure must say it."""
    return total - scored > NEGLIGIBLE * total


def interval_text(metrics: Mapping[str, float], name: str) -> str:
    """The 95 % interval and the bounds of a metric, to be written behind it: ` (0.31-0.52; 0.25-0.75 of all)`; empty if it has
    none."""
    low, high, least, most = (metrics.get(f"{name}{part}", math.nan) for part in _PARTS)
    parts = [f"{low:.2f}-{high:.2f}"] if math.isfinite(low) else []
    parts += [f"{least:.2f}-{most:.2f} of all"] if math.isfinite(least) else []
    return f" ({'; '.join(parts)})" if parts else ""


def is_part(name: str) -> bool:
    """Whether a metric is an end of an interval or a bound, which is shown with the figure that it belongs to."""
    return name.startswith("validation/") and name.endswith(_PARTS)


def left_out(metrics: Mapping[str, float], what: str = "validation") -> str | None:
    """A sentence about chains without a score: None if there are so few that no figure changes by more than 1 %."""
    scored, total = metrics.get(f"{what}/scored"), metrics.get(f"{what}/chains")
    if scored is None or total is None or not is_told(scored, total):
        return None
    low, high = bounds(metrics.get(f"{what}/success", math.nan), scored, total)
    return (
        f"{total - scored:,.0f} of {total:,.0f} chains have no score (the world failed): success is {low:.3g} if they count as "
        f"failures, {high:.3g} if they count as successes"
    )


def _mean(values: Sequence[float]) -> float:
    return mean(values) if values else math.nan
