"""Every metric by name, with its meaning and unit; and those that can be read off a step's trajectories.

Comes in: names, or trajectories. Goes out: descriptions (docs/metrics.md is made from them), or a flat dict of floats. A chain
that the world failed has no reward: it is left out of reward and success, never counted as 0, and seen in rollout/outcome.
Nothing is measured here; what a learner measures it returns itself, under names of this table.
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
    """`name` may have a part in angle brackets, which stands for anything."""

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
        ("reward/mean", "reward", "Mean total reward (final score and turn rewards) of the chains that were scored."),
        ("reward/std", "reward", "Standard deviation of that reward over the chains of the step."),
        ("reward/component/<name>", "score", "Mean of one named component of the reward, unweighted."),
        (
            "rollout/success",
            "share",
            "Share of scored chains that succeeded: component `success`, else a reward of success_at.",
        ),
        ("rollout/turns", "turns", "Replies per chain."),
        ("rollout/tool_calls", "calls", "Calls per chain that reached a tool."),
        ("rollout/tool_calls/<tool>", "calls", "Calls per chain that reached this tool."),
        ("rollout/invalid_calls", "calls", "Calls per chain that could not be made: unknown tool, bad arguments."),
        ("rollout/invalid_call_rate", "share", "The same as a share of all calls; left out where there were none."),
        ("rollout/outcome/<outcome>", "share", "Share of all chains that ended this way."),
        ("rollout/envs", "count", "Environments allocated for the step."),
        ("rollout/chains", "count", "Chains that were played."),
        ("rollout/trainable", "count", "Chains that can be trained on: the world held, there is a reward and there are ids."),
        ("rollout/tokens", "tokens", "Tokens sampled in the step."),
        ("rollout/tokens_per_s", "tokens/s", "Tokens sampled per second of rollout, tools and environments included."),
        ("rollout/reply_tokens", "tokens", "Tokens per reply."),
        ("resources/<kind>/allocated", "count", "Environments of a kind that are lent; `total` is all kinds."),
        ("resources/<kind>/idle", "count", "Environments that wait to be lent."),
        ("resources/<kind>/warming", "count", "Environments that are being started."),
        ("resources/<kind>/closing", "count", "Environments that are being closed."),
        ("resources/<kind>/started", "count", "Environments started since the run began."),
        ("resources/<kind>/reaped", "count", "Leases taken back: held too long, or no sign of life."),
        ("resources/<kind>/waiting", "count", "Chains that wait for one."),
        ("resources/<kind>/most_allocated", "count", "The most that were lent at the same time in the step."),
        ("resources/<kind>/most_waiting", "count", "The most chains that waited for one at the same time in the step."),
        ("resources/<kind>/recycled", "count", "Environments closed and replaced: used up, too old, grown too large."),
        ("resources/<kind>/failed", "count", "Environments that died, hung or could not be reset."),
        ("resources/<kind>/acquire_s", "s", "Mean time from asking to having one."),
        ("resources/<kind>/acquire_p95_s", "s", "The same, 95th percentile."),
        ("resources/<kind>/lease_s", "s", "Mean time that one is held."),
        *((name, _UNITS.get(name, ""), text) for name, text in LEARNED.items()),
        ("handover/gap", "nats", "Mean difference of the engine's and the learner's log-probs on a probe, after a hand-over."),
        ("handover/moved", "nats", "Mean change of the learner's log-probs on that probe since the hand-over before."),
        ("time/rollout_s", "s", "Time to sample and score."),
        ("time/learn_s", "s", "Time to update the weights."),
        ("time/handover_s", "s", "Time until the engine samples from the new weights, with its proof where it holds its own."),
        ("time/validate_s", "s", "Time to validate."),
        ("time/save_s", "s", "Time to write a checkpoint."),
        ("time/step_s", "s", "Time of the whole step."),
        ("validation/success", "share", "Share of held-out chains that succeeded."),
        ("validation/reward", "reward", "Mean total reward on held-out tasks."),
        ("validation/turns", "turns", "Replies per held-out chain."),
        ("validation/tool_calls", "calls", "Calls per held-out chain that reached a tool."),
        ("validation/pass_at_<k>", "share", "Chance that at least one of k chains of a held-out task succeeds."),
        ("warm_start/loss_before", "nats", "Loss per reply token on held-out demonstrations before the warm start."),
        ("warm_start/loss_after", "nats", "The same after it."),
        ("validation/nll", "nats", "Loss per token on held-out demonstrations (supervised)."),
    ]
}

# "reward/component/<name>" matches any rest, slashes included: a mixed reward's components are called "part/component".
_PATTERNS = [(re.compile(re.sub(r"<\w+>", ".+", re.escape(name))), metric) for name, metric in METRICS.items() if "<" in name]


def describe(name: str) -> Metric:
    """What a metric is, by its name or by a name that a pattern stands for."""
    found = _find(name)
    if found is None:
        near = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.5)
        raise UnknownName(f"no metric is called {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    return found


def unknown(names: Iterable[str]) -> list[str]:
    """The names that are not in the table."""
    return [name for name in names if _find(name) is None]


def _find(name: str) -> Metric | None:
    if name in METRICS:
        return METRICS[name]
    return next((metric for pattern, metric in _PATTERNS if pattern.fullmatch(name)), None)


def is_success(trajectory: Trajectory, success_at: float = 1.0) -> bool:
    """By the reward's own component `success` where there is one (in a mix, "part/success"), else by the reward itself."""
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
    """Every reward/* and rollout/* metric of a step. What has nothing to be a mean of is NaN."""
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
        # Every outcome, also those that did not happen: a curve that begins at its first failure hides when it was 0.
        **{f"rollout/outcome/{outcome.value}": _share(outcomes[outcome], num_chains) for outcome in Outcome},
        "rollout/envs": float(num_envs),
        "rollout/chains": float(num_chains),
        "rollout/trainable": float(sum(trajectory.trainable for trajectory in trajectories)),
        "rollout/tokens": float(tokens),
        "rollout/tokens_per_s": tokens / seconds if seconds > 0 else 0.0,
        "rollout/reply_tokens": _share(tokens, num_turns),
    }


def _components(scored: Sequence[Trajectory]) -> dict[str, float]:
    """Over the chains that have the component: a reward may leave one out where it means nothing."""
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
