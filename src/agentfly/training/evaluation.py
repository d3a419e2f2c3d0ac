"""Evaluation on held-out tasks: metrics and trajectories, without changing the weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..agents.base import BaseAgent
from ..aio.threads import run_to_end
from ..data import load_tasks
from ..errors import ConfigError
from ..rollout import Plan, check_prompts, make_plan, open_environments, run_chains
from ..rollout.setup import as_sampling, next_run_number
from ..types import Sampling, Task, Trajectory
from ..watch.metrics import is_success, rollout_metrics


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Metrics by name (validation/success, validation/pass_at_4, ...) and all trajectories."""

    metrics: dict[str, float]
    trajectories: list[Trajectory]
    num_chains: int


async def validate(
    plan: Plan,
    tasks: Sequence[Task],
    *,
    num_chains: int,
    max_concurrency: int | None,
    prefix: str,
    success_at: float,
    on_trajectory: Callable[[Trajectory], None] | None = None,
) -> Evaluation:
    """Play every task `num_chains` times and compute the metrics."""
    started = time.perf_counter()
    trajectories = await run_chains(
        plan,
        tasks,
        num_chains=num_chains,
        max_concurrency=max_concurrency,
        prefix=prefix,
        on_trajectory=on_trajectory,
    )
    raw = rollout_metrics(trajectories, time.perf_counter() - started, success_at)
    metrics = {
        "validation/success": raw["rollout/success"],
        "validation/reward": raw["reward/mean"],
        "validation/turns": raw["rollout/turns"],
        "validation/tool_calls": raw["rollout/tool_calls"],
    }
    groups = [trajectories[i : i + num_chains] for i in range(0, len(trajectories), num_chains)]
    for k in sorted({1 << power for power in range(num_chains.bit_length())} | {num_chains}):
        metrics[f"validation/pass_at_{k}"] = pass_at_k(groups, k, success_at)
    return Evaluation(metrics, trajectories, num_chains)


def pass_at_k(groups: Sequence[Sequence[Trajectory]], k: int, success_at: float = 1.0) -> float:
    """Returns the unbiased estimate, from n >= k chains, that one of k chains succeeds; arXiv:2107.03374."""
    scores = []
    for group in groups:
        n = sum(trajectory.scored for trajectory in group)
        good = sum(trajectory.scored and is_success(trajectory, success_at) for trajectory in group)
        if n >= k:
            scores.append(1.0 - math.comb(n - good, k) / math.comb(n, k))
    return sum(scores) / len(scores) if scores else math.nan


def evaluate(
    agent: BaseAgent,
    data: str | Path | Iterable[Any],
    *,
    num_chains: int = 1,
    max_turns: int | None = None,
    sampling: Sampling | Mapping[str, Any] | None = None,
    max_concurrency: int | None = None,
    split: str = "validation",
    count: int | None = None,
    seed: int = 0,
    success_at: float = 1.0,
    on_trajectory: Callable[[Trajectory], None] | None = None,
) -> Evaluation:
    """Evaluate an agent on a data set; `split` selects the split of a task set. Works with every engine, servers included."""
    if agent.reward is None:
        raise ConfigError("evaluation needs a reward: pass reward= to the agent")
    if num_chains < 1 or (max_concurrency is not None and max_concurrency < 1):
        raise ConfigError("num_chains and max_concurrency must be at least 1")
    tasks = load_tasks(data, split=split, count=count, seed=seed)
    agent.check(tasks)
    drawn = as_sampling(sampling) if sampling is not None else agent.sampling
    plan = make_plan(agent, max_turns=max_turns, sampling=replace(drawn, seed=seed if drawn.seed is None else drawn.seed))
    check_prompts(plan, tasks)

    async def work() -> Evaluation:
        async with open_environments(agent, plan, max_concurrency) as ready:
            return await validate(
                ready,
                tasks,
                num_chains=num_chains,
                max_concurrency=max_concurrency,
                prefix=f"eval{next_run_number()}-",
                success_at=success_at,
                on_trajectory=on_trajectory,
            )

    evaluation: Evaluation = run_to_end(work())
    return evaluation
