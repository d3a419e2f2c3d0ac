"""Self-made demonstrations: chains of the model under the agent's examples, of which those with success are trained.

tasks -> chains under the examples -> those with success, none twice -> `demo_samples`, without the examples -> supervised steps
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from ..agents.base import BaseAgent
from ..aio.threads import run_to_end
from ..build import build_plan
from ..config import Config
from ..errors import DataError
from ..rollout import Plan, check_prompts, run_chains
from ..types import Task, Trajectory
from ..watch.metrics import is_success
from ..watch.observers import Observer


def self_made(
    config: Config, agent: BaseAgent, tasks: Sequence[Task], observe: Observer,
    opened: Callable[[Plan], AbstractAsyncContextManager[Plan]],
) -> list[Trajectory]:  # fmt: skip
    """Plays about `warm_start.count` chains of training tasks. Returns those with success. Raises DataError without any.

    Each task gets `rollout.num_chains` chains. `opened` opens the environments of a plan.
    """
    num_chains = config.rollout.num_chains
    count = min(len(tasks), max(1, config.warm_start.count // num_chains))
    drawn = random.Random(f"self-made {config.seed}").sample(tasks, count)
    bare = build_plan(config, agent)
    seed = config.seed if config.sampling.seed is None else config.sampling.seed
    plan = replace(bare, shown=True, sampling=replace(bare.sampling, seed=seed * 1_000_003))
    check_prompts(plan, drawn)
    observe.phase("self-made demonstrations", count * num_chains)
    ended: list[Trajectory] = []

    def end(trajectory: Trajectory) -> None:
        ended.append(trajectory)
        observe.advance(len(ended))

    async def play() -> list[Trajectory]:
        async with opened(plan) as ready:
            return await run_chains(
                ready, drawn, num_chains=num_chains, max_concurrency=config.rollout.max_concurrency, prefix="w",
                on_trajectory=end,
            )  # fmt: skip

    chains = run_to_end(play())
    good: dict[tuple[str, tuple[int, ...]], Trajectory] = {}
    for chain in chains:
        if chain.trainable and is_success(chain, config.agent.success_at):
            sampled = tuple(token for turn in chain.turns for token in turn.completion.token_ids)
            good.setdefault((chain.task.id, sampled), chain)
    solved = len({chain.task.id for chain in good.values()})
    observe.note(f"self-made demonstrations: kept {len(good)} of {len(chains)} chains, which solve {solved} of {count} tasks")
    if solved < 2:
        raise DataError(
            f'warm_start.demos = "self" needs chains with success of two tasks, and {len(chains)} chains solved {solved}: give '
            "other agent.examples, easier tasks or a larger warm_start.count, or demonstrations in a file"
        )
    return list(good.values())
