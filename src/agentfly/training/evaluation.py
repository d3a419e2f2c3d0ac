"""Evaluation on held-out tasks: metrics and trajectories, without changing the weights.

`evaluate` measures an agent. `evaluate_run` measures what a config describes, and stores the trajectories in a run folder.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..agents.base import BaseAgent
from ..aio.threads import run_to_end
from ..build import build_agent, held_out_tasks
from ..config import Config
from ..data import load_tasks
from ..engines import short_name
from ..errors import ConfigError
from ..protocols import RemoteEngine
from ..rollout import Plan, check_prompts, make_plan, open_environments, run_chains
from ..rollout.setup import as_sampling, next_run_number
from ..runs import Recorder, RunDirectory, RunStore, StoreWriter
from ..types import Sampling, Task, Trajectory
from ..watch.held_out import held_out_metrics
from ..watch.results import Evaluation
from .cluster.join import joined_cluster
from .parts import open_rollout
from .workers.engine import use_workers

log = logging.getLogger(__name__)


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
        plan, tasks, num_chains=num_chains, max_concurrency=max_concurrency, prefix=prefix, on_trajectory=on_trajectory
    )
    groups = [trajectories[i : i + num_chains] for i in range(0, len(trajectories), num_chains)]
    metrics = held_out_metrics(groups, num_chains, time.perf_counter() - started, success_at)
    return Evaluation(metrics, trajectories, num_chains)


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
    on_start: Callable[[int], None] | None = None,
    on_trajectory: Callable[[Trajectory], None] | None = None,
    opened: Callable[[Plan], AbstractAsyncContextManager[Plan]] | None = None,
) -> Evaluation:
    """Evaluate an agent on a data set; `split` selects the split of a task set. Works with every engine, servers included.

    `on_start` receives the number of chains before the first begins. `opened` is what opens the environments of a plan, if that
    is not this process. Raises EngineError within seconds if the model's server
    does not answer.
    """
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
        if isinstance(plan.engine, RemoteEngine):
            await plan.engine.check_alive()
        if on_start is not None:
            on_start(len(tasks) * num_chains)
        async with open_environments(agent, plan, max_concurrency) if opened is None else opened(plan) as ready:
            return await validate(
                ready,
                tasks,
                num_chains=num_chains,
                max_concurrency=max_concurrency,
                prefix=f"eval{next_run_number()}-",
                success_at=success_at,
                on_trajectory=on_trajectory,
            )

    return run_to_end(work())


def evaluate_run(
    config: Config,
    *,
    split: str = "validation",
    num_chains: int = 1,
    on_start: Callable[[int], None] | None = None,
    on_trajectory: Callable[[Trajectory], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> Evaluation:
    """Evaluate what a config describes, and store trajectories and metrics in a new folder of `run.dir`.

    Each trajectory is handed to the store's thread as soon as its chain ends. `say` is told which rows are played.
    """
    agent, tasks = build_agent(config), held_out_tasks(config, split, say)
    model = short_name(config.agent.model).replace(":", "-")
    directory: RunDirectory | None = None
    writer: StoreWriter | None = None
    opened = ExitStack()

    def keep(trajectory: Trajectory) -> None:
        nonlocal directory, writer
        if directory is None or writer is None:  # a run that fails before its first chain leaves no folder
            directory = RunDirectory.fresh(f"eval-{config.run.name or model}", root=config.run.dir)
            directory.config.write_text(config.to_toml(), encoding="utf-8")
            writer = opened.enter_context(StoreWriter(opened.enter_context(RunStore(directory.database))))
            world = config.agent.env or config.data.validation or config.data.name
            described = {"kind": "eval", "model": config.agent.model, "world": world, "seed": config.seed}
            opened.enter_context(Recorder(writer).running(**described))
        writer.put_trajectories(0, "validation", [trajectory])
        if on_trajectory is not None:
            on_trajectory(trajectory)

    def start(plan: Plan) -> AbstractAsyncContextManager[Plan]:
        logs = Path(opened.enter_context(TemporaryDirectory(prefix="agentfly-logs-")))
        return open_rollout(config, agent, plan, logs, log.warning, trained=False)

    with opened:
        cluster = opened.enter_context(joined_cluster(config, log.warning))
        use_workers(config, agent, cluster=cluster)
        done = evaluate(
            agent,
            tasks,
            num_chains=num_chains,
            sampling=config.sampling,
            max_concurrency=config.rollout.max_concurrency,
            seed=config.seed,
            success_at=config.agent.success_at,
            on_start=on_start,
            on_trajectory=keep,
            opened=start,
        )
        if writer is not None:
            writer.add_metrics(0, done.metrics)
    return replace(done, directory=None if directory is None else directory.path)
