"""The training loop: sample, score, learn, publish.

`Trainer` takes an agent, tasks and a config, and writes a run folder with all trajectories, metrics and checkpoints. One step
is `Trainer._step`. The learner holds the algorithm, the agent the behaviour of a chain, the ledger the invariants. Ctrl-C lets
a running update finish, saves a checkpoint, and exits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..agents.base import BaseAgent
from ..config import Config
from ..errors import ConfigError
from ..learn.algorithms import find_algorithm
from ..rollout import Plan, check_prompts, make_plan, open_environments, run_chains
from ..runs import RunDirectory, RunStore
from ..types import Learner, Task, TrainableEngine, Trajectory
from ..watch.metrics import rollout_metrics
from ..watch.progress import Progress
from ..watch.trackers import Trackers
from .checkpoint import STATE, latest_checkpoint, save_checkpoint
from .cursor import TaskCursor
from .evaluation import Evaluation, validate
from .idle import IdleSteps
from .ledger import Ledger

LOOK_S = 0.5
"""Seconds between two updates of the displayed environments."""


@dataclass(slots=True)
class TrainResult:
    """The run's folder and results. `before` and `after` are validations; `history` has one row per step."""

    directory: Path
    steps: int
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)
    sample: Trajectory | None = None
    checkpoint: Path | None = None


class Trainer:
    """One training run on one machine."""

    def __init__(
        self,
        config: Config,
        agent: BaseAgent,
        train_tasks: Sequence[Task],
        validation_tasks: Sequence[Task],
        directory: RunDirectory,
        progress: Progress,
        opening: Mapping[str, float] | None = None,
    ) -> None:
        """`opening` are metrics from before the first step, such as those of a warm start; they are recorded at step 0."""
        from ..learn.learner import PolicyLearner
        from ..learn.model.storage import seed_torch

        seed_torch(config.seed, config.run.threads)
        self.config, self.agent, self.directory, self.progress = config, agent, directory, progress
        self.validation_tasks = validation_tasks
        self.engine = trainable_engine(agent)
        self.plan = make_plan(agent, sampling=config.sampling)
        learner = PolicyLearner(
            self.engine.model,
            find_algorithm(config.algorithm),
            loss=config.loss,
            optim=replace(config.train, total_steps=config.train.total_steps or config.train.steps),
            temperature=config.sampling.temperature or 1.0,
            seed=config.seed,
        )
        self.learner: Learner = learner
        if (alone := learner.critic_warmup_steps) and not self.learner.version:
            progress.note(f"the critic learns alone in the first {alone} steps (train.critic_warmup_steps)")
        self.engine.publish(self.learner.version)
        check_prompts(self.plan, train_tasks)
        check_prompts(self.plan, validation_tasks)
        self.cursor = TaskCursor(train_tasks, shuffle=config.data.shuffle, seed=config.seed)
        gap = config.train.max_logprob_gap
        if gap is None:
            gap = 0.05 if next(self.learner.model.parameters()).dtype.itemsize >= 4 else 0.15
        self.ledger = Ledger(max_logprob_gap=gap, max_failed_share=config.train.max_failed_share)
        self.store = RunStore(directory.database)
        self.trackers = Trackers.open(
            config.run.trackers, directory.path, config.to_dict(), directory.path.name, warn=progress.note
        )
        self.step = 0
        self.failed = False
        self.idle = IdleSteps()
        self.opening = dict(opening or {})
        self.result = TrainResult(directory.path, 0)

    # ---- the run ---------------------------------------------------------------------------------------------------------

    async def run(self) -> TrainResult:
        """Train to the last step, or until cancelled. A checkpoint is saved in both cases."""
        with self.progress:
            try:
                async with open_environments(self.agent, self.plan, self.config.rollout.max_concurrency) as plan:
                    if plan.admission is not None:
                        plan.admission.advance(self.step)
                    async with self._environments_shown(plan):
                        await self._steps(plan)
            finally:
                if (idle := self.idle.closing()) is not None:
                    self.progress.note(idle)
                if self._is_sound:
                    self._save()
                self.trackers.close()
                self.store.close()
        return self.result

    async def _steps(self, plan: Plan) -> None:
        settings = self.config.train
        if self.step == 0:
            if settings.validate_at_start:
                self.result.before = (await self._validate(plan)).metrics
            if first := self.opening | self.result.before:
                self._record(0, first)
        while self.step < settings.steps:
            metrics = await self._step(plan)
            self.result.history.append(metrics)
            self.result.steps = self.step
        if self.step % (settings.validate_every or settings.steps + 1) != 0 or not self.result.after:
            self.result.after = (await self._validate(plan)).metrics
            self._record(self.step, self.result.after)

    async def _step(self, plan: Plan) -> dict[str, float]:
        settings, rollout = self.config.train, self.config.rollout
        step = self.step + 1
        started, clock = time.perf_counter(), dict[str, float]()
        if plan.manager is not None:
            plan.manager.mark()
        cursor = self.cursor.state()
        tasks = self.cursor.take(rollout.num_tasks)
        try:
            with timed(clock, "time/rollout_s"):
                trajectories = await self._collect(plan, tasks, step)
            groups = [trajectories[i : i + rollout.num_chains] for i in range(0, len(trajectories), rollout.num_chains)]
            self.ledger.check_rollout(
                groups, num_tasks=rollout.num_tasks, num_chains=rollout.num_chains, version=self.learner.version
            )
            with timed(clock, "time/learn_s"):
                learned = await finish_in_thread(self._learn, groups, step)
        except BaseException:
            if self.step < step:
                # The update did not happen: a resumed run draws these tasks again.
                self.cursor.restore(cursor)
            raise
        try:
            with timed(clock, "time/handover_s"):
                await finish_in_thread(self.engine.publish, self.learner.version)
            self.ledger.check_published(self.engine, self.learner)
        except Exception:
            self.failed = True  # the weights of a failed step are not saved
            raise
        if plan.admission is not None:
            plan.admission.advance(self.step)
        resources = plan.manager.metrics() if plan.manager is not None else {}
        num_envs = int(sum(resources.get(f"resources/total/{state}", 0) for state in ("allocated", "idle")))
        if (idle := self.idle.add(learned, groups)) is not None:
            self.progress.note(idle)
        metrics = {
            **rollout_metrics(trajectories, clock["time/rollout_s"], self.config.agent.success_at, num_envs=num_envs),
            **resources,
            **learned,
            "train/idle_steps": float(self.idle.in_a_row),
        }
        if (proof := self.engine.proof) is not None:
            metrics |= {"handover/gap": proof.gap, "handover/moved": proof.moved}
        if settings.validate_every and step % settings.validate_every == 0:
            with timed(clock, "time/validate_s"):
                self.result.after = (await self._validate(plan)).metrics
            metrics |= self.result.after
        if settings.save_every and step % settings.save_every == 0:
            with timed(clock, "time/save_s"):
                self._save()
        metrics |= clock | {"time/step_s": time.perf_counter() - started}
        self._record(step, metrics)
        self.progress.step(step, metrics)
        return metrics

    @asynccontextmanager
    async def _environments_shown(self, plan: Plan) -> AsyncIterator[None]:
        """Update the displayed environments while the body runs, also while no chain ends."""
        manager = plan.manager
        if manager is None:
            yield
            return

        async def look() -> None:
            while True:
                self.progress.environments(manager.metrics())
                await asyncio.sleep(LOOK_S)

        looking = asyncio.create_task(look())
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.wait([looking])

    def _learn(self, groups: list[list[Trajectory]], step: int) -> dict[str, float]:
        self.engine.rest()
        learned = self.learner.update(groups, self.ledger.check_update)
        # Counted together with the weights: if Ctrl-C arrives during the update, a resumed run must not repeat the step.
        self.step = step
        return learned

    async def _collect(self, plan: Plan, tasks: Sequence[Task], step: int) -> list[Trajectory]:
        """Sample and score one step's chains. Finished chains are stored even if the step fails."""
        finished: list[Trajectory] = []
        total = len(tasks) * self.config.rollout.num_chains

        def keep(trajectory: Trajectory) -> None:
            finished.append(trajectory)
            self.progress.chains(len(finished), total)

        try:
            return await run_chains(
                self._seeded(plan, step),
                tasks,
                num_chains=self.config.rollout.num_chains,
                max_concurrency=self.config.rollout.max_concurrency,
                prefix=f"t{step}-",
                step=step - 1,  # admission counts from 0: the first chains need no finished step
                on_trajectory=keep,
            )
        finally:
            self.store.add_trajectories(step, "train", finished)

    async def _validate(self, plan: Plan) -> Evaluation:
        settings = self.config.train
        temperature = settings.validate_temperature
        sampling = self.config.sampling if temperature is None else replace(self.config.sampling, temperature=temperature)
        evaluation = await validate(
            replace(plan, sampling=replace(sampling, seed=self.config.seed)),
            self.validation_tasks,
            num_chains=settings.validate_chains,
            max_concurrency=self.config.rollout.max_concurrency,
            prefix=f"v{self.step}-",
            success_at=self.config.agent.success_at,
        )
        self.store.add_trajectories(self.step, "validation", evaluation.trajectories)
        self.result.sample = next((t for t in evaluation.trajectories if t.trainable), None)
        return evaluation

    def _seeded(self, plan: Plan, step: int) -> Plan:
        """Returns the plan with this step's seed: steps differ, and a resumed run repeats the seeds of its steps."""
        base = self.config.seed if self.config.sampling.seed is None else self.config.sampling.seed
        return replace(plan, sampling=replace(plan.sampling, seed=base * 1_000_003 + step))

    # ---- records ---------------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Load the newest intact checkpoint of this run's folder and drop the records of later steps."""
        from ..learn.model.storage import load_state, load_weights, restore_random_state

        checkpoint = latest_checkpoint(self.directory.path)
        state = load_state(checkpoint / STATE)
        load_weights(self.learner.model, checkpoint)
        self.learner.load_state_dict(state["learner"])
        self.cursor.restore(state["cursor"])
        self.step = int(state["step"])
        self.result.before = dict(state["before"])
        self.result.steps = self.step
        self.store.truncate_after(self.step)
        self.trackers.truncate_after(self.step)
        self.engine.publish(self.learner.version)
        restore_random_state(state["random"])
        self.progress.note(f"resumed at step {self.step} from {checkpoint}")

    @property
    def _is_sound(self) -> bool:
        """Whether the weights are those of a step that passed its checks. Otherwise the newest checkpoint stays the newest."""
        return not (self.failed or self.learner.half_updated)

    def _save(self) -> None:
        from ..learn.model.storage import random_state

        state = {
            "step": self.step,
            "learner": self.learner.state_dict(),
            "cursor": self.cursor.state(),
            "before": self.result.before,
            "random": random_state(),
        }
        self.result.checkpoint = save_checkpoint(
            self.directory.checkpoints,
            self.step,
            model=self.learner.model,
            tokenizer=self.engine.tokenizer,
            state=state,
            keep=self.config.train.keep_checkpoints,
        )

    def _record(self, step: int, metrics: dict[str, float]) -> None:
        self.store.add_metrics(step, metrics)
        self.trackers.log(metrics, step)


def trainable_engine(agent: BaseAgent) -> TrainableEngine:
    """Returns the agent's engine. Raises ConfigError if a learner cannot train its weights."""
    engine = agent.engine
    if engine.reads != "ids" or not isinstance(engine, TrainableEngine):
        raise ConfigError(
            f"{type(engine).__name__} cannot be trained from: its weights are not here (it lacks members of "
            f"agentfly.types.TrainableEngine). Use a model directory or 'pocket'"
        )
    return engine


def adapt_model(config: Config, agent: BaseAgent) -> None:
    """Add the adapters of `[lora]` to the agent's model if `lora.rank` is set."""
    from ..learn.model.lora import adapt

    if config.lora.rank:
        adapt(trainable_engine(agent).model, config.lora, config.seed)


async def finish_in_thread(work: Callable[..., Any], *args: Any) -> Any:
    """Run blocking work in a thread. A cancellation waits for its end, so that no update is left half applied."""
    task = asyncio.get_running_loop().run_in_executor(None, work, *args)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])  # no deadline: a second Ctrl-C exits at once
        raise


@contextmanager
def timed(clock: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        clock[name] = clock.get(name, 0.0) + time.perf_counter() - started
