"""The parts of a run, each made once and complete: what the loop works with.

config, agent, tasks -> open_parts -> RunParts -> open_rollout -> the plan with its environments -> Trainer
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from .. import plugins
from ..agents.base import BaseAgent
from ..build import adapt_model, build_hint, build_learner, build_plan
from ..config import Config
from ..config.sections import SELF
from ..protocols import Learner, ReplicatedEngine, SeededEngine, TrainableEngine
from ..rollout import Plan, check_prompts, open_task
from ..runs import Recorder, RunDirectory, RunStore, StoreWriter
from ..types import Task
from ..watch.observers import Observers, RunWarnings
from ..watch.trackers import Trackers
from .breakdown import Breakdown
from .cluster.env_servers import open_served_environments
from .demonstrations import self_made
from .draws import TaskDraws
from .evidence import FULL, EngineProbe, format_of
from .idle import without_effect
from .ledger import Ledger
from .ranks.roles import lead_ranks
from .saving import Saver
from .stopping import Spending, num_gpus
from .supervised import warm_start
from .workers.engine import WorkerEngine

if TYPE_CHECKING:
    from ..learn.ranks.group import RankGroup


@dataclass(frozen=True, slots=True)
class RunParts:
    """What a `Trainer` is made of. The caller closes it.

    `plan` has no environments yet. `opening` are the metrics of the warm start, if there was one. `exact`: the engine samples
    with the learner's own weights or kernels.
    """

    config: Config
    agent: BaseAgent
    directory: RunDirectory
    observe: Observers
    engine: TrainableEngine
    learner: Learner
    plan: Plan
    draws: TaskDraws
    validation_tasks: Sequence[Task]
    ledger: Ledger
    probe: EngineProbe
    breakdown: Breakdown
    writer: StoreWriter
    saver: Saver
    opening: dict[str, float]
    exact: bool
    spending: Spending

    @property
    def workers(self) -> ReplicatedEngine | None:
        """The engine, if chains are sampled in other processes."""
        return self.engine if isinstance(self.engine, ReplicatedEngine) else None

    def close(self) -> None:
        self.saver.close()
        self.observe.close()


def open_parts(
    config: Config, agent: BaseAgent, train: Sequence[Task], validation: Sequence[Task], draws: TaskDraws,
    directory: RunDirectory, observe: Observers, *, warm: bool, ranks: RankGroup | None = None,
) -> RunParts:  # fmt: skip
    """Open the model and make the parts of a run on these tasks. The recorder and the trackers join `observe`.

    `warm`: begin with the warm start. `ranks` is the group that this process leads.
    """
    from ..learn.model.storage import computes_in_full, seed_torch

    rollout, sampling, began = config.rollout, config.sampling, time.time()
    observe.phase(f"opening the model {config.agent.model}")
    engine = adapt_model(config, agent, observe.note)
    opening = _warm_start(config, agent, train, directory, observe) if warm else {}
    threads = seed_torch(config.seed, config.run.threads)
    if rollout.steps_ahead:
        engine.at_update = rollout.at_update
    exact = ranks is not None or engine.shares_weights or (isinstance(engine, ReplicatedEngine) and engine.exact)
    learner = (
        build_learner(config, engine.model, exact=exact, tokenizer=engine.tokenizer, hint=build_hint(config, agent))
        if ranks is None
        else lead_ranks(config, engine, ranks)
    )
    writer = StoreWriter(RunStore(directory.database), warn=observe.note)
    breakdown = Breakdown(engine.stats, writer, observe)
    plan = build_plan(config, agent, breakdown.activities)
    observe.note(f"learner: {learner.path}; seed {config.seed}, {threads} threads on {engine.model.device}")
    if config.train.optimizer not in plugins.BUILTIN["optimizers"]:
        observe.note("train.optimizer is your own: its steps are not computed again and not counted")
    for idle in without_effect(config, plan.limits.chain_timeout_s, exact, len(validation)):
        observe.note(f"warning: {idle}")
    if config.data.sources or draws.learns:
        for sentence in draws.describe():
            observe.note(sentence)
    observe.phase("checking the prompts", len(train) + len(validation), "tasks")
    if (alone := learner.critic_warmup_steps) and not learner.version:
        observe.note(f"the critic learns alone in the first {alone} steps (train.critic_warmup_steps)")
    engine.publish(learner.version)
    check_prompts(replace(plan, shown=agent.examples_steps != 0), train)
    check_prompts(plan, validation)
    prompt_ids = open_task(plan, train[0]).prompt_ids if train else [0]
    sharing = rollout.num_tasks * rollout.num_chains if engine.shares_weights else 1  # a copy has its own proof
    bounds = format_of(in_full=computes_in_full(engine.model), exact=engine.shares_weights)
    ledger = Ledger(
        max_logprob_gap=config.train.max_logprob_gap, max_failed_share=config.train.max_failed_share,
        bounds=bounds, copied=ranks is not None,
        truncates=not sampling.temperature or sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0,
        max_lag=rollout.max_lag if rollout.at_limit == "wait" else None,
    )  # fmt: skip
    # In half precision the cumulative distributions of engine and learner differ by rounding.
    exactly = bounds is FULL and not ledger.truncates
    uniforms = engine.uniforms if exactly and isinstance(engine, SeededEngine) else None
    probe = EngineProbe(prompt_ids, sampling, sharing, uniforms)
    name, names = directory.path.name, config.run.trackers
    observe.add(Recorder(writer))
    observe.add(RunWarnings(observe, ledger.max_logprob_gap))
    observe.add(Trackers.open(names, directory.path, config.to_dict(), name, warn=observe.note))
    snapshot = None if ranks is None else learner.snapshot
    saver = Saver(
        directory.checkpoints, config.train, learner.model, engine.tokenizer, observe.note, writer.flush, snapshot=snapshot
    )
    ranked = config if ranks is None else replace(config, learner=replace(config.learner, ranks=ranks.size))
    gpus = 0 if engine.model.device.type == "cpu" else num_gpus(ranked)
    return RunParts(
        config=config, agent=agent, directory=directory, observe=observe, engine=engine, learner=learner, plan=plan,
        draws=draws, validation_tasks=validation, ledger=ledger, probe=probe,
        breakdown=breakdown, writer=writer, saver=saver, opening=opening, exact=exact,
        spending=Spending(config, gpus, writer.store.meta(), began),
    )  # fmt: skip


def _warm_start(
    config: Config, agent: BaseAgent, train: Sequence[Task], directory: RunDirectory, observe: Observers
) -> dict[str, float]:
    """Runs the warm start, if the config has one, on demonstrations that the model may have to make first."""
    logs, note = directory.path / "workers", observe.note
    made = None
    if config.warm_start.demos == SELF:
        opened = partial(open_rollout, config, agent, logs=logs, note=note, trained=False)
        made = self_made(config, agent, train, observe, opened)
    return warm_start(config, agent, observe, made)


def open_rollout(
    config: Config, agent: BaseAgent, plan: Plan, logs: Path, note: Callable[[str], None], *, trained: bool = True
) -> AbstractAsyncContextManager[Plan]:
    """The plan with the environments of its chains; if the engine samples in worker processes, with these.

    `logs` gets what they print. `trained`: a learner changes the weights.
    """
    if config.sampler.in_processes:
        return cast(WorkerEngine, plan.engine).open(plan, logs, note, trained=trained)
    return open_served_environments(config, agent, plan, note)
