"""The training loop: sample, score, learn, publish.

`Trainer` takes an agent, tasks and a config, and writes a run folder with all trajectories, metrics and checkpoints. One step
is `Trainer._step`. The learner holds the algorithm, the agent the behaviour of a chain, the ledger the invariants, and the
stream (`rollout.stream`) the chains.

    next batch -> checks -> [ update -> publish -> checks ] -> validate -> record -> save

With `rollout.max_lag` = 0 no chain runs from the moment that a batch is complete until the next one is asked for. Above 0 the
stream samples all the time, and the engine is held only from the first change of the weights until they are published.

A stop (see `stopping`) cancels the rollout and the validation. The bracket is finished first: a step counts as a whole, with
its record, or not at all. A checkpoint is written after the record of its step, and never of weights that failed a check.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..agents.base import BaseAgent
from ..build import build_learner, build_plan
from ..config import Config
from ..display import Displayed, data_frame, run_html
from ..errors import AgentFlyError, ConfigError
from ..learn.algorithms import find_algorithm, reference_of
from ..protocols import Learner, PreparedEngine, RecordingLearner, ReplicatedEngine, TrainableEngine
from ..rollout import (
    Group,
    GroupStream,
    Pace,
    Plan,
    as_groups,
    check_prompts,
    most_in_flight,
    open_environments,
    open_task,
    watchdog,
)
from ..runs import Recorder, RunDirectory, RunStore, StoreWriter
from ..runs.checkpoints import STATE
from ..types import Completion, Task, TokenRecord, Trajectory
from ..watch.held_out import interval_text, left_out
from ..watch.metrics import rollout_metrics
from ..watch.progress import Progress
from ..watch.trackers import Trackers
from .breakdown import Breakdown, Span
from .cluster.status import cluster_metrics, publish_status
from .cursor import TaskCursor, fingerprint
from .evaluation import Evaluation, validate
from .evidence import HALF, Probe, format_of
from .idle import IdleSteps, without_effect
from .ledger import Ledger
from .ranks.roles import lead_ranks
from .saving import Saver, finish, finish_in_thread
from .stopping import StopSignals

LOOK_S = 0.5
"""Seconds between two updates of the displayed environments."""


@dataclass(slots=True, repr=False)
class TrainResult(Displayed):
    """The run's folder and results. `before` and `after` are validations; `history` has one row per step."""

    directory: Path
    steps: int
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list, repr=False)
    sample: Trajectory | None = None
    checkpoint: Path | None = None

    def to_pandas(self) -> Any:
        """The history as a pandas.DataFrame: a row per step, a column per metric. Raises MissingExtra."""
        first = self.steps - len(self.history) + 1
        return data_frame({"step": first + number, **row} for number, row in enumerate(self.history))

    def __repr__(self) -> str:
        ends = [row["validation/success"] for row in (self.before, self.after) if "validation/success" in row]
        about = interval_text(self.after, "validation/success")
        held = f", held-out success {' -> '.join(f'{value:.3g}' for value in ends)}{about}" if ends else ""
        missing = "" if (note := left_out(self.after)) is None else f"; {note}"
        return f"<TrainResult {self.directory}: {self.steps} steps{held}{missing}>"

    def _repr_html_(self) -> str:
        names = list(dict.fromkeys([*self.before, *self.after]))
        held = [(name, self.before.get(name), self.after.get(name)) for name in names]
        return run_html(
            repr(self).strip("<>"),
            {"steps": self.steps, "folder": self.directory, "checkpoint": self.checkpoint},
            {"reward/mean": [row.get("reward/mean", math.nan) for row in self.history]},
            {"held-out tasks": (("metric", "before", "after"), held)},
            self.sample,
        )


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
        ranks: Any = None,
    ) -> None:
        """`opening` are metrics from before the first step, such as those of a warm start; they are recorded at step 0.

        `ranks` is the `RankGroup` that this process leads, if the learner is sharded.
        """
        from ..learn.model.storage import computes_in_full, seed_torch

        threads = seed_torch(config.seed, config.run.threads)
        self.config, self.agent, self.directory, self.progress = config, agent, directory, progress
        self.validation_tasks = validation_tasks
        self.engine = trainable_engine(agent)
        if self.overlaps:
            self.engine.at_update = config.rollout.at_update
        self.plan = build_plan(config, agent)
        workers = self.engine if isinstance(self.engine, ReplicatedEngine) else None
        self.workers = workers
        bounds = format_of(in_full=computes_in_full(self.engine.model), exact=self.engine.shares_weights)
        self.exact = ranks is not None or self.engine.shares_weights or (workers is not None and workers.exact)
        if ranks is None:
            learner = build_learner(config, self.engine.model, exact=self.exact)
        else:
            learner = lead_ranks(config, self.engine, ranks)
        self.learner: Learner = learner
        progress.note(f"learner: {learner.path}; seed {config.seed}, {threads} threads on {self.engine.model.device}")
        for idle in without_effect(config, self.plan.limits.chain_timeout_s, self.exact):
            progress.note(f"warning: {idle}")
        progress.phase("checking the prompts", len(train_tasks) + len(validation_tasks), "tasks")
        if (alone := learner.critic_warmup_steps) and not self.learner.version:
            progress.note(f"the critic learns alone in the first {alone} steps (train.critic_warmup_steps)")
        self.engine.publish(self.learner.version)
        check_prompts(self.plan, train_tasks)
        check_prompts(self.plan, validation_tasks)
        self.cursor = TaskCursor(train_tasks, shuffle=config.data.shuffle, seed=config.seed)
        rollout = config.rollout
        sharing = rollout.num_tasks * rollout.num_chains if self.engine.shares_weights else 1  # a copy has its own proof
        self.probe = Probe(opening_ids(self.plan, train_tasks), self.plan.sampling, sharing)
        sampling = self.plan.sampling
        self.ledger = Ledger(
            max_logprob_gap=config.train.max_logprob_gap,
            bounds=bounds,
            truncates=not sampling.temperature or sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0,
            max_failed_share=config.train.max_failed_share,
            max_lag=rollout.max_lag if rollout.at_limit == "wait" else None,
            copied=ranks is not None,
        )
        progress.max_logprob_gap = self.ledger.max_logprob_gap
        self.store = RunStore(directory.database)
        self.writer = StoreWriter(self.store, warn=progress.note)
        self.breakdown = Breakdown(self.engine.stats, self.writer)
        self.plan = replace(self.plan, activities=self.breakdown.activities)
        self.recorder = Recorder(self.writer)
        self.breakdown.on_span = self._enter_span
        self.breakdown.activities.listen = lambda chain, ended: self.recorder.chain(chain, ended=ended)
        progress.on_note = self.recorder.warn
        self.trackers = Trackers.open(
            config.run.trackers, directory.path, config.to_dict(), directory.path.name, warn=progress.note
        )
        self.saver = Saver(
            directory.checkpoints,
            config.train,
            self.learner.model,
            self.engine.tokenizer,
            progress.note,
            self.writer.flush,
            snapshot=None if ranks is None else learner.snapshot,
        )
        self.step = 0
        self.sound = True  # False while the weights are changed and not yet checked
        self.idle = IdleSteps()
        self.opening = dict(opening or {})
        self.result = TrainResult(directory.path, 0)
        self.stream: GroupStream | None = None  # from the start of `run`
        self._drawn: dict[str, Any] | None = None  # the draws that a resumed run goes on with
        self._recorded: dict[str, float] = {}  # what the store holds of the step that the run was resumed at
        self._stored: set[str] = set()  # chains of the running step that the writer has
        self._batch_at = time.perf_counter()  # when the last batch was complete

    # ---- the run ---------------------------------------------------------------------------------------------------------

    async def run(self, signals: StopSignals | None = None) -> TrainResult:
        """Train to the last step, or until cancelled. A checkpoint is saved in both cases."""
        with self.progress, signals.cancelling() if signals else nullcontext():
            try:
                # Written to the end also if the run stops; a failed write does not hide why.
                with self.writer, self.recorder.running(**self._description()):
                    if self.agent.env is not None:
                        self.progress.phase("opening the environments")
                    async with self._open_rollout() as self.plan:
                        assert self.plan.admission is not None
                        self.plan.admission.advance(self.step)
                        # Saved before the environments are closed, which may take longer than a scheduler waits after SIGTERM.
                        async with self._saved_at_the_end(), self._environments_shown(), self._open_stream() as self.stream:
                            try:
                                await self._steps()
                            finally:
                                await self.probe.close()
            finally:
                if (idle := self.idle.closing()) is not None:
                    self.progress.note(idle)
                self.saver.close()
                self.trackers.close()
                self.store.close()
        return self.result

    async def _steps(self) -> None:
        settings = self.config.train
        rollout = self.config.rollout
        if isinstance(self.engine, PreparedEngine):
            self.progress.phase("preparing the engine")
            chains = rollout.num_tasks * rollout.num_chains * (rollout.steps_ahead + 1)
            await finish_in_thread(self.engine.prepare, min(chains, most_in_flight(self.engine, rollout.max_concurrency)))
        if self.step == 0:
            if self.opening and self.saver.saved_step is None:
                await self.saver.save(0, self._state())  # a warm start is worth keeping
            if settings.validate_at_start and not self.result.before:
                self.result.before = (await self._validate()).metrics
                self.progress.validated(self.result.before)
            if (first := self.opening | self.result.before) and not self._recorded:
                self._record(0, first)
        elif settings.validate_every and self.step % settings.validate_every == 0 and self.step < settings.steps:
            await self._validate_once()  # it may have been stopped in this validation
        await self._ask_probe()
        self.breakdown.begin()
        while self.step < settings.steps:
            metrics = await self._step()
            self.result.history.append(metrics)
            self.result.steps = self.step
        await self._validate_once()

    async def _validate_once(self) -> None:
        if not self.result.after:
            self.result.after = (await self._validate()).metrics
            self._record(self.step, self.result.after)

    async def _step(self) -> dict[str, float]:
        settings, rollout = self.config.train, self.config.rollout
        step = self.recorder.step = self.step + 1
        self.result.after = {}
        if (figures := self._figures()) is not None:
            figures.mark()
        metrics: dict[str, float] = {"train/version": float(self.learner.version)}
        try:
            # If sampling and learning take turns, the store writes while the learner computes.
            with self.breakdown.span("rollout"), nullcontext() if self.overlaps else self.writer.deferring():
                groups = await self._collect(step)
            if figures is not None:
                measured = figures.step_metrics()
                metrics |= await measured if isinstance(measured, Awaitable) else measured
            metrics |= cluster_metrics()
            with timed(metrics, "time/ledger_s"):
                self.ledger.check_rollout(
                    groups, num_tasks=rollout.num_tasks, num_chains=rollout.num_chains, version=self.learner.version
                )
            await finish(asyncio.ensure_future(self._update(groups, step, metrics)))
            if settings.validate_every and step % settings.validate_every == 0:
                with self.breakdown.span("validate"):
                    self.result.after = (await self._validate()).metrics
                metrics |= self.result.after
        finally:
            self.recorder.checks(step, self.ledger.take_checked())
            if self.step == step:
                metrics |= self.breakdown.end_step(metrics["rollout/tokens"])
                self._record(step, metrics)
                self.recorder.end_step(step)
        self.progress.step(step, metrics)
        if self.saver.due(step):
            with self.breakdown.span("save"):
                await self.saver.save(step, self._state())
        return metrics

    async def _update(self, groups: list[list[Trajectory]], step: int, metrics: dict[str, float]) -> None:
        """Learn from one step's chains and publish the weights. The step counts once every check has passed.

        Adds to `metrics`, which holds those of the environments.
        """
        assert self.stream is not None
        now = time.perf_counter()
        # Chains that run ahead are sampled in all of the time between two batches, not only while the loop waits for them.
        sampling_s = now - self._batch_at if self.overlaps else self.breakdown.seconds("rollout")
        self._batch_at = now
        replies = await self.probe.replies()
        self.sound = False
        learned, tokens = await finish_in_thread(self._learn, groups, replies, metrics)
        with timed(metrics, "time/ledger_s"):
            self.ledger.check_published(self.engine, self.learner)
            self.ledger.check_learned(learned)
        await self._ask_probe()
        self.stream.advance(step)
        metrics |= self.ledger.check_books(groups, learned, drawn=self.stream.drawn, in_flight=len(self.stream.in_flight))
        if (idle := self.idle.add(learned, groups)) is not None:
            self.progress.note(idle)
        num_envs = int(metrics.get("resources/total/most_allocated", 0))
        chains = [trajectory for group in groups for trajectory in group]
        metrics |= rollout_metrics(chains, sampling_s, self.config.agent.success_at, num_envs=num_envs)
        metrics |= learned | {"train/idle_steps": float(self.idle.in_a_row)}
        if (proof := self.engine.proof) is not None:
            metrics |= {"handover/gap": proof.gap, "handover/moved": proof.moved}
        if self.workers is not None:
            metrics |= self.workers.handover_metrics()
        self.step, self.sound = step, True
        if tokens:
            self.recorder.tokens(step, tokens)

    async def _ask_probe(self) -> None:
        self.probe.ask(self.engine, self.learner.version)
        if not self.overlaps:
            await self.probe.settle()

    def _learn(
        self, groups: list[list[Trajectory]], replies: Sequence[Completion], metrics: dict[str, float]
    ) -> tuple[dict[str, float], list[TokenRecord]]:
        """Update the weights and publish them. Runs in a thread while the event loop goes on.

        `replies` are those of a probe: the weights that they are compared with are still there.
        """
        with ExitStack() as held:
            if self.workers is not None and self.overlaps:
                held.enter_context(self.workers.updating())
            with self.breakdown.span("learn"):
                if not self.overlaps:
                    self.engine.rest()

                def hold() -> None:
                    held.enter_context(self.engine.hold())

                try:
                    with timed(metrics, "time/ledger_s"):
                        metrics |= self.ledger.check_probe(self.probe, replies, self.learner, groups)
                    learned = self.learner.update(
                        groups, self.ledger.check_update, hold if self.overlaps else None, self.config.rollout.max_lag
                    )
                except Exception:
                    self.sound = not self.learner.half_updated  # a failed check comes before the first change of the weights
                    raise
            with self.breakdown.span("publish"):
                # Publishing drops the caches of all chains, so a version that the engine has is not published again.
                if not self.overlaps or self.engine.version != self.learner.version:
                    self.engine.publish(self.learner.version)
        return learned, self.learner.token_records() if isinstance(self.learner, RecordingLearner) else []

    @asynccontextmanager
    async def _saved_at_the_end(self) -> AsyncIterator[None]:
        """Save when the body ends, however it ends. If it failed and saving fails too, its own error is raised."""
        try:
            yield
        except Exception:
            try:
                await self._save_last()
            except AgentFlyError as error:
                self.progress.note(f"{error}.")
            raise
        except BaseException:  # stopped
            await self._save_last()
            raise
        else:
            await self._save_last()

    async def _save_last(self) -> None:
        if self.sound:
            await self.saver.save_last(self.step, self._state())
        else:
            await self.saver.wait()
            kept = f"the newest checkpoint is {self.saver.newest}" if self.saver.newest else "there is no checkpoint"
            self.progress.note(f"step {self.step + 1} failed after its update had begun, so it is not saved; {kept}.")
        self.result.checkpoint = self.saver.newest

    @asynccontextmanager
    async def _environments_shown(self) -> AsyncIterator[None]:
        """Update the displayed and the recorded environments while the body runs, also while no chain ends."""
        manager, activities, measured = self.plan.manager, self.breakdown.activities, self._figures()

        async def look() -> None:
            while True:
                figures = {} if measured is None else measured.metrics()
                self.progress.environments(figures)
                self.recorder.look(figures, activities, None if manager is None else manager.holders())
                await publish_status(self.directory.path, self.step, self.plan.runner, figures)
                await asyncio.sleep(LOOK_S)

        looking = asyncio.create_task(look())
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.wait([looking])

    def _open_rollout(self) -> AbstractAsyncContextManager[Plan]:
        """The environments of the chains; if chains run in worker processes, those."""
        if self.workers is not None:
            opened: AbstractAsyncContextManager[Plan]
            opened = self.workers.open(self.plan, self.directory.path / "workers", self.progress.note)
            return opened
        if self.config.cluster.env_hosts:
            from .cluster.env_hosts import open_hosted_environments

            return open_hosted_environments(self.config, self.agent, self.plan, self.progress.note)
        return open_environments(self.agent, self.plan, self.config.rollout.max_concurrency)

    def _figures(self) -> Any:
        """What measures the environments: the resource manager, or the workers; None if there is neither."""
        return self.plan.manager if self.workers is None else self.plan.runner

    @property
    def overlaps(self) -> bool:
        """Whether chains are sampled while the learner learns."""
        return self.config.rollout.steps_ahead > 0

    def _open_stream(self) -> GroupStream:
        rollout = self.config.rollout
        pace = Pace(
            num_tasks=rollout.num_tasks,
            num_chains=rollout.num_chains,
            num_steps=self.config.train.steps,
            max_lag=rollout.max_lag,
            depth=rollout.steps_ahead,
            at_limit=rollout.at_limit,
        )
        total = rollout.num_tasks * rollout.num_chains

        def show(group: Group, trajectory: Trajectory) -> None:
            self.progress.chains(min(stream.finished_chains, total), total)
            if not self.overlaps:  # else the step that trains it is not known yet
                self.writer.put_trajectories(group.step, "train", [trajectory])
                self._stored.add(trajectory.id)

        stream = GroupStream(self.plan, pace, draw=self.cursor.draw, seeded=self._seeded, on_chain=show)
        if self._drawn is None:
            stream.start_at(self.step + 1)
        else:
            stream.restore(self._drawn, self.cursor.task_at)
        stream.drawn += self.ledger.groups.total()  # of the run before it was resumed
        return stream

    async def _collect(self, step: int) -> list[list[Trajectory]]:
        """Wait for one step's chains. Each is stored as it ends if its step is known, and even if the step fails."""
        assert self.stream is not None
        finished: list[list[Trajectory]] = []
        try:
            async with watchdog(f"step {step}", self.breakdown.activities, self.progress.note):
                finished = as_groups(await self.stream.next_batch(self.learner.version))
            self.trackers.log_chains([each for group in finished for each in group], "train", step)
            return finished
        finally:
            finished = finished or as_groups(self.stream.in_flight)
            left = [each for group in finished for each in group if each.id not in self._stored]
            await self.writer.add_trajectories(step, "train", left, replace=not self._stored)
            self._stored.clear()

    async def _validate(self) -> Evaluation:
        settings = self.config.train
        temperature = settings.validate_temperature
        sampling = self.config.sampling if temperature is None else replace(self.config.sampling, temperature=temperature)
        count = itertools.count(1)
        self.progress.phase("validation", len(self.validation_tasks) * settings.validate_chains)
        evaluation = await validate(
            replace(self.plan, sampling=replace(sampling, seed=self.config.seed)),
            self.validation_tasks,
            num_chains=settings.validate_chains,
            max_concurrency=self.config.rollout.max_concurrency,
            prefix=f"v{self.step}-",
            success_at=self.config.agent.success_at,
            on_trajectory=lambda _: self.progress.advance(next(count)),
        )
        self.trackers.log_chains(evaluation.trajectories, "validation", self.step)
        await self.writer.add_trajectories(self.step, "validation", evaluation.trajectories, replace=True)
        self.result.sample = next((t for t in evaluation.trajectories if t.trainable), None)
        return evaluation

    def _enter_span(self, name: Span) -> None:
        self.recorder.span(name)
        self.progress.span(name)

    def _seeded(self, step: int) -> Plan:
        """Returns the plan with this step's seed: steps differ, and a resumed run repeats the seeds of its steps."""
        base = self.config.seed if self.config.sampling.seed is None else self.config.sampling.seed
        return replace(self.plan, sampling=replace(self.plan.sampling, seed=base * 1_000_003 + step))

    # ---- records ---------------------------------------------------------------------------------------------------------

    def start_over(self) -> None:
        """Drop what a run without a finished step left in the folder."""
        self.store.truncate_after(-1)
        self.trackers.truncate_after(-1)

    def resume(self, checkpoint: Path) -> None:
        """Load a checkpoint and drop the records of later steps. Raises ConfigError if it does not fit this run."""
        from ..learn.model.storage import load_state, restore_random_state

        state = load_state(checkpoint / STATE)
        if "learner" not in state:
            raise ConfigError(
                f"{checkpoint} holds a model but no state of a training run (agentfly sft saves none): "
                f"start a new run with agent.model={checkpoint}"
            )
        try:
            self.learner.restore(checkpoint, state["learner"])
            same_order = self.cursor.restore(state["cursor"])
            self._drawn = state.get("stream") if same_order else None
            self.ledger.groups.update(state.get("tasks", {}))
            self.step = int(state["step"])
            self.opening, before = dict(state.get("opening", {})), dict(state["before"])
            restore_random_state(state["random"])
        except (KeyError, ValueError, TypeError, IndexError, AttributeError, RuntimeError) as error:
            told = (str(error).splitlines() or [type(error).__name__])[-1].strip()
            raise ConfigError(
                f"{checkpoint} does not fit this run ({told}): resume with the model and config it was saved with"
            ) from error
        same_validation = state.get("validation") in (None, fingerprint(self.validation_tasks))
        self._restore_records(before, same_validation)
        self.saver.loaded(self.step, checkpoint)
        self.result.steps, self.result.checkpoint = self.step, checkpoint
        self.engine.publish(self.learner.version)
        self.progress.note(f"resumed at step {self.step} from {checkpoint}")
        if not same_order:
            self.progress.note(
                "the training rows, data.shuffle or the seed are not those of the saved run: the rows are drawn from the start"
            )
        if not same_validation:
            self.progress.note("the validation rows are not those of the saved run: their figures cannot be compared")

    def _restore_records(self, before: dict[str, float], same_validation: bool) -> None:
        self.store.truncate_after(self.step)
        self.trackers.truncate_after(self.step)
        rows = self.store.metrics()
        self._recorded = {row.name: row.value for row in rows if row.step == self.step}
        self.ledger.first_gap = next((row.value for row in rows if row.name == "train/logprob_gap"), None)
        if self.step:
            self.ledger.adam_steps = self._recorded.get("train/adam_steps")
        first = {row.name: row.value for row in rows if row.step == 0 and row.name.startswith("validation/")}
        self.result.before = before or first
        if same_validation and self.step:
            self.result.after = {name: value for name, value in self._recorded.items() if name.startswith("validation/")}

    def _state(self) -> dict[str, Any]:
        from ..learn.model.storage import random_state

        return {
            "step": self.step,
            "learner": self.learner.state_dict(),
            "cursor": self.cursor.state(),
            "stream": None if self.stream is None else self.stream.state(),
            "tasks": dict(self.ledger.groups),
            "before": self.result.before,
            "opening": self.opening,
            "validation": fingerprint(self.validation_tasks),
            "random": random_state(),
        }

    def _description(self) -> dict[str, Any]:
        config = self.config
        return {
            "kind": "train",
            "model": config.agent.model,
            "world": config.agent.env or config.data.train or None,
            "algorithm": find_algorithm(config.algorithm).name,
            "seed": config.seed,
            "total_steps": config.train.steps,
            "rules": [*self._earlier_rules(), self._rules()],
        }

    def _earlier_rules(self) -> list[dict[str, Any]]:
        return [rules for rules in self.store.meta().get("rules", ()) if rules["from"] <= self.step]

    def _rules(self) -> dict[str, Any]:
        """The settings of the steps from now on, from which `agentfly replay` computes them again."""
        config, algorithm = self.config, find_algorithm(self.config.algorithm)
        lr = config.train.lr_of(sum(each.numel() for each in self.learner.model.parameters()), config.lora.rank > 0)
        return {
            "from": self.step + 1,
            "algorithm": reference_of(config.algorithm),
            "loss": asdict(algorithm.complete(config.loss)),
            "optim": asdict(replace(config.train, lr=lr, total_steps=config.train.total_steps or config.train.steps)),
            "seed": config.seed,
            "window": config.rollout.max_lag,
            "exact": self.exact,
            "recomputes": config.rollout.at_update != "keep",
            "full": self.ledger.bounds is not HALF,
            "shares": self.engine.shares_weights,
            "truncates": self.ledger.truncates,
            "reward": repr(self.agent.reward),
        }

    def _record(self, step: int, metrics: dict[str, float]) -> None:
        self.writer.add_metrics(step, metrics)
        self.trackers.log(metrics, step)


def opening_ids(plan: Plan, tasks: Sequence[Task]) -> list[int]:
    """Returns the prompt of the first task; a single token if there is no task."""
    return open_task(plan, tasks[0]).prompt_ids if tasks else [0]


def trainable_engine(agent: BaseAgent) -> TrainableEngine:
    """Returns the agent's engine. Raises ConfigError if a learner cannot train its weights."""
    engine = agent.engine
    if engine.reads != "ids" or not isinstance(engine, TrainableEngine):
        raise ConfigError(
            f"{type(engine).__name__} cannot be trained from: its weights are not here (it lacks members of "
            f"agentfly.protocols.TrainableEngine). Use a model directory or 'pocket'"
        )
    return engine


def adapt_model(config: Config, agent: BaseAgent, note: Callable[[str], object]) -> None:
    """Add the adapters of `[lora]` to the agent's model if `lora.rank` is set, and say what share of it is adapted."""
    from ..learn.model.lora import adapt, coverage

    if config.lora.rank:
        model = trainable_engine(agent).model
        adapt(model, config.lora, config.seed)
        note(f"lora: {coverage(model)}")


@contextmanager
def timed(clock: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        clock[name] = clock.get(name, 0.0) + time.perf_counter() - started
