"""The table of all metrics with meaning and unit, and the metrics that are computed from the trajectories of a step.

The rows are in `metrics.toml`; docs/metrics.md is generated from them. A chain whose world failed has no reward: reward and
success leave it out instead of counting it as 0, and rollout/outcome counts it. The learner computes its own metrics, under
names of this table.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files

from ..errors import UnknownName
from ..learn.metrics import METRICS as LEARNED
from ..types import Outcome, Trajectory
from .honesty import honesty_metrics


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the table. A part of `name` in angle brackets matches any text."""

    name: str
    description: str
    unit: str


_TABLES = tomllib.loads((files(__package__) / "metrics.toml").read_text(encoding="utf-8"))
_LEARNED = {name: (_TABLES["learner_units"].get(name, ""), text) for name, text in LEARNED.items()}
METRICS: dict[str, Metric] = {
    name: Metric(name, description, unit)
    for table in (_TABLES["before_learning"], _LEARNED, _TABLES["after_learning"])
    for name, (unit, description) in table.items()
}

# <name> also matches slashes: the components of a mixed reward are called "part/component".
_PATTERNS = [(re.compile(re.sub(r"<\w+>", ".+", re.escape(name))), metric) for name, metric in METRICS.items() if "<" in name]


def describe(name: str) -> Metric:
    """The row of a metric, or of the pattern that matches its name. Raises UnknownName."""
    metric = _find(name)
    if metric is None:
        near = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.5)
        raise UnknownName(f"no metric is called {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    return metric


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
    """All reward/* and rollout/* metrics of a step, and the mean times of its turns. The mean of no values is NaN."""
    scored = [trajectory for trajectory in trajectories if trajectory.scored]
    rewards = [trajectory.total_reward for trajectory in scored]
    num_chains, num_turns = len(trajectories), sum(len(trajectory.turns) for trajectory in trajectories)
    tokens = sum(trajectory.num_sampled for trajectory in trajectories)
    read = sum(turn.completion.prompt_tokens for trajectory in trajectories for turn in trajectory.turns)
    calls: Counter[str] = sum((trajectory.tool_counts for trajectory in trajectories), Counter())
    outcomes = Counter(trajectory.outcome for trajectory in trajectories)
    return {
        "reward/mean": _mean(rewards),
        "reward/std": _std(rewards),
        **_components(scored),
        "rollout/success": _mean([float(is_success(trajectory, success_at)) for trajectory in scored]),
        "rollout/turns": _share(num_turns, num_chains),
        "rollout/tool_calls": _share(sum(calls.values()), num_chains),
        **{f"rollout/tool_calls/{name}": _share(count, num_chains) for name, count in sorted(calls.items())},
        **{f"rollout/{name}": value for name, value in honesty_metrics(trajectories).items()},
        # Outcomes that did not occur are logged as 0, so that the curve of a failure has a beginning.
        **{f"rollout/outcome/{outcome.value}": _share(outcomes[outcome], num_chains) for outcome in Outcome},
        "rollout/envs": float(num_envs),
        "rollout/chains": float(num_chains),
        "rollout/scored": float(len(scored)),
        "rollout/trainable": float(sum(trajectory.trainable for trajectory in trajectories)),
        "rollout/tokens": float(tokens),
        "rollout/tokens_per_s": tokens / seconds if seconds > 0 else 0.0,
        "rollout/reply_tokens": _share(tokens, num_turns),
        **({"rollout/prompt_tokens": float(read)} if read else {}),
        **_chain_tokens(trajectories),
        **_turn_times(trajectories),
    }


def by_source(groups: Sequence[Sequence[Trajectory]]) -> dict[str, list[Sequence[Trajectory]]]:
    """The groups of each source of `data.sources`, by its name."""
    sources: dict[str, list[Sequence[Trajectory]]] = {}
    for group in groups:
        if group and (name := group[0].task.source) is not None:
            sources.setdefault(name, []).append(group)
    return dict(sorted(sources.items()))


def source_metrics(groups: Sequence[Sequence[Trajectory]], success_at: float = 1.0) -> dict[str, float]:
    """All source/* metrics of a step. Without a chain that has a score, a source has no reward and no success."""
    metrics: dict[str, float] = {}
    for name, of_source in by_source(groups).items():
        metrics[f"source/{name}/tasks"] = float(len(of_source))
        if scored := [trajectory for group in of_source for trajectory in group if trajectory.scored]:
            metrics[f"source/{name}/reward"] = _mean([trajectory.total_reward for trajectory in scored])
            metrics[f"source/{name}/success"] = _mean([float(is_success(trajectory, success_at)) for trajectory in scored])
    return metrics


def _chain_tokens(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean tokens of the chains by how they ended: shows whether a time limit takes the longest chains out of a step."""
    tokens: dict[str, list[float]] = {}
    for trajectory in trajectories:
        outcome = trajectory.outcome
        end = "lost" if not outcome.trainable else "max_time" if outcome is Outcome.MAX_TIME else "ended"
        tokens.setdefault(end, []).append(float(trajectory.num_sampled))
    return {f"rollout/chain_tokens/{end}": _mean(counts) for end, counts in tokens.items()}


def _turn_times(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean times of replies and of tools. Calls of one turn run together, so each of its tools gets the time of the turn."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    tools: dict[str, list[float]] = {}
    for turn in turns:
        for name in set(turn.reached):
            tools.setdefault(name, []).append(turn.tools_s)
    replies = {"time/reply_s": _mean([turn.sampled_s for turn in turns])} if turns else {}
    return replies | {f"time/tool_s/{name}": _mean(seconds) for name, seconds in sorted(tools.items())}


def _components(scored: Sequence[Trajectory]) -> dict[str, float]:
    """Mean of each component over the chains that have it: a reward may omit a component for some chains."""
    values: dict[str, list[float]] = {}
    for trajectory in scored:
        for name, value in trajectory.components.items():
            values.setdefault(name, []).append(value)
    return {f"reward/component/{name}": _mean(component) for name, component in sorted(values.items())}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _std(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(_mean([(value - mean) ** 2 for value in values])) if values else math.nan


def _share(count: float, total: int) -> float:
    return count / total if total else math.nan
