"""The table of all metrics with meaning and unit, and the metrics that are computed from the trajectories of a step.

docs/metrics.md is generated from the table. A chain whose world failed has no reward: reward and success leave it out instead
of counting it as 0, and rollout/outcome counts it. The learner computes its own metrics, under names of this table.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import UnknownName
from ..learn.metrics import METRICS as LEARNED
from ..types import Outcome, Trajectory


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the table. A part of `name` in angle brackets matches any text."""

    name: str
    description: str
    unit: str


_UNITS = {
    "train/kl": "nats",
    "train/reference_kl": "nats",
    "train/entropy": "nats",
    "train/logprob_gap": "nats",
    "train/clip_fraction": "share",
    "train/padding_waste": "share",
    "train/samples": "rows",
    "train/splits": "rows",
    "train/tokens": "tokens",
    "train/untrainable_chains": "count",
    "train/zero_advantage_groups": "count",
    "train/optimizer_steps": "count",
}

METRICS: dict[str, Metric] = {
    name: Metric(name, description, unit)
    for name, unit, description in [
        ("reward/mean", "reward", "Mean total reward (final score plus turn rewards) of the chains that have a score."),
        ("reward/std", "reward", "Standard deviation of the total reward over the chains of the step that have a score."),
        ("reward/component/<name>", "score", "Mean of one named component of the reward, before its weight is applied."),
        (
            "rollout/success",
            "share",
            "Share of scored chains that succeeded: the reward's component `success` is at least 0.5, or, for a reward without "
            "this component, the reward is at least `agent.success_at`.",
        ),
        ("rollout/turns", "turns", "Mean number of replies per chain."),
        ("rollout/tool_calls", "calls", "Mean number of calls per chain that reached a tool."),
        ("rollout/tool_calls/<tool>", "calls", "Mean number of calls per chain that reached this tool."),
        (
            "rollout/invalid_calls",
            "calls",
            "Mean number of calls per chain with an unknown tool or bad arguments.",
        ),
        ("rollout/invalid_call_rate", "share", "Invalid calls as a share of all calls; absent if there were no calls."),
        ("rollout/outcome/<outcome>", "share", "Share of all chains that ended with this outcome."),
        ("rollout/envs", "count", "Environments allocated for the step."),
        ("rollout/chains", "count", "Chains of the step."),
        (
            "rollout/trainable",
            "count",
            "Chains that can be trained on: no world failure, a reward, and token ids.",
        ),
        ("rollout/tokens", "tokens", "Tokens sampled in the step."),
        (
            "rollout/tokens_per_s",
            "tokens/s",
            "Sampled tokens per second of rollout, which includes tools and environments.",
        ),
        ("rollout/reply_tokens", "tokens", "Mean number of tokens per reply."),
        (
            "resources/<kind>/allocated",
            "count",
            "Environments of this kind that are leased; `total` is the sum of all kinds.",
        ),
        ("resources/<kind>/idle", "count", "Environments that are ready and not leased."),
        ("resources/<kind>/warming", "count", "Environments that are being started."),
        ("resources/<kind>/closing", "count", "Environments that are being closed."),
        ("resources/<kind>/started", "count", "Environments started since the run began."),
        ("resources/<kind>/reaped", "count", "Leases revoked because they were held too long or the chain stopped responding."),
        ("resources/<kind>/waiting", "count", "Chains that wait for an environment of this kind."),
        ("resources/<kind>/most_allocated", "count", "Largest number leased at the same time during the step."),
        ("resources/<kind>/most_waiting", "count", "Largest number of chains that waited at the same time during the step."),
        (
            "resources/<kind>/recycled",
            "count",
            "Environments replaced after many uses, for their age or for their memory.",
        ),
        ("resources/<kind>/failed", "count", "Environments that crashed, hung or could not be reset."),
        ("resources/<kind>/acquire_s", "s", "Mean time from the request to the lease."),
        (
            "resources/<kind>/acquire_p95_s",
            "s",
            "95th percentile of the time from the request to the lease.",
        ),
        ("resources/<kind>/lease_s", "s", "Mean duration of a lease."),
        *((name, _UNITS.get(name, ""), text) for name, text in LEARNED.items()),
        (
            "handover/gap",
            "nats",
            "Mean difference of engine and learner log-probs on a probe, after new weights.",
        ),
        ("handover/moved", "nats", "Mean change of the learner's log-probs on that probe since the previous hand-over."),
        ("time/rollout_s", "s", "Time to sample and score the chains of the step."),
        ("time/learn_s", "s", "Time to update the weights."),
        (
            "time/handover_s",
            "s",
            "Time until the engine samples from the new weights, checks included.",
        ),
        ("time/validate_s", "s", "Time to validate."),
        ("time/save_s", "s", "Time to write a checkpoint."),
        ("time/step_s", "s", "Time of the whole step."),
        ("validation/success", "share", "Share of held-out chains that succeeded."),
        ("validation/reward", "reward", "Mean total reward on held-out tasks."),
        ("validation/turns", "turns", "Mean number of replies per held-out chain."),
        ("validation/tool_calls", "calls", "Mean number of calls per held-out chain that reached a tool."),
        ("validation/pass_at_<k>", "share", "Estimated probability that at least one of k chains of a held-out task succeeds."),
        ("warm_start/loss_before", "nats", "Loss per reply token on held-out demonstrations before the warm start."),
        ("warm_start/loss_after", "nats", "Loss per reply token on held-out demonstrations after the warm start."),
        ("validation/nll", "nats", "Loss per token on held-out demonstrations (supervised)."),
    ]
}

# <name> also matches slashes: the components of a mixed reward are called "part/component".
_PATTERNS = [(re.compile(re.sub(r"<\w+>", ".+", re.escape(name))), metric) for name, metric in METRICS.items() if "<" in name]


def describe(name: str) -> Metric:
    """The row of a metric, or of the pattern that matches its name. Raises UnknownName."""
    found = _find(name)
    if found is None:
        near = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.5)
        raise UnknownName(f"no metric is called {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    return found


def unknown(names: Iterable[str]) -> list[str]:
    """The names that the table does not have."""
    return [name for name in names if _find(name) is None]


def _find(name: str) -> Metric | None:
    if name in METRICS:
        return METRICS[name]
    return next((metric for pattern, metric in _PATTERNS if pattern.fullmatch(name)), None)


def is_success(trajectory: Trajectory, success_at: float = 1.0) -> bool:
    """Whether the component `success` is at least 0.5 (in a mix, the only "part/success"); without it, whether the reward is at
    least `success_at`."""
    if trajectory.reward is None:
        return False
    own = trajectory.components.get("success")
    if own is None:
        parts = [value for name, value in trajectory.components.items() if name.endswith("/success")]
        own = parts[0] if len(parts) == 1 else None
    if own is not None:
        return own >= 0.5
    return trajectory.reward >= success_at - 1e-9


def rollout_metrics(
    trajectories: Sequence[Trajectory], seconds: float, success_at: float = 1.0, *, num_envs: int = 0
) -> dict[str, float]:
    """All reward/* and rollout/* metrics of a step. The mean of no values is NaN."""
    scored = [trajectory for trajectory in trajectories if trajectory.scored]
    rewards = [trajectory.total_reward for trajectory in scored]
    num_chains, num_turns = len(trajectories), sum(len(trajectory.turns) for trajectory in trajectories)
    tokens = sum(trajectory.num_sampled for trajectory in trajectories)
    calls: Counter[str] = sum((trajectory.tool_counts for trajectory in trajectories), Counter())
    invalid = sum(trajectory.num_invalid_calls for trajectory in trajectories)
    tried = sum(calls.values()) + invalid
    outcomes = Counter(trajectory.outcome for trajectory in trajectories)
    return {
        "reward/mean": _mean(rewards),
        "reward/std": _std(rewards),
        **_components(scored),
        "rollout/success": _mean([float(is_success(trajectory, success_at)) for trajectory in scored]),
        "rollout/turns": _share(num_turns, num_chains),
        "rollout/tool_calls": _share(sum(calls.values()), num_chains),
        **{f"rollout/tool_calls/{name}": _share(count, num_chains) for name, count in sorted(calls.items())},
        "rollout/invalid_calls": _share(invalid, num_chains),
        **({"rollout/invalid_call_rate": invalid / tried} if tried else {}),
        # Outcomes that did not occur are logged as 0, so that the curve of a failure has a beginning.
        **{f"rollout/outcome/{outcome.value}": _share(outcomes[outcome], num_chains) for outcome in Outcome},
        "rollout/envs": float(num_envs),
        "rollout/chains": float(num_chains),
        "rollout/trainable": float(sum(trajectory.trainable for trajectory in trajectories)),
        "rollout/tokens": float(tokens),
        "rollout/tokens_per_s": tokens / seconds if seconds > 0 else 0.0,
        "rollout/reply_tokens": _share(tokens, num_turns),
    }


def _components(scored: Sequence[Trajectory]) -> dict[str, float]:
    """Mean of each component over the chains that have it: a reward may omit a component for some chains."""
    values: dict[str, list[float]] = {}
    for trajectory in scored:
        for name, value in trajectory.components.items():
            values.setdefault(name, []).append(value)
    return {f"reward/component/{name}": _mean(found) for name, found in sorted(values.items())}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _std(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(_mean([(value - mean) ** 2 for value in values])) if values else math.nan


def _share(count: float, total: int) -> float:
    return count / total if total else math.nan
