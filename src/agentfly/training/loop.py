"""The training loop: sample, score, learn, publish.

`run` takes the parts of a run (`parts`) and where it begins (`start`), and writes trajectories, metrics and checkpoints. One
step is `Trainer._step`. The learner holds the algorithm, the agent the behaviour of a chain, the ledger the invariants, and the
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
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from ..errors import AgentFlyError
from ..protocols import GroupResult, PreparedEngine, RecordingLearner
from ..rollout import Group, GroupStream, Pace, Plan, as_groups, most_in_flight, watchdog
from ..rollout.shaping import left_at, shows_examples
from ..runs.checkpoints import best_checkpoint
from ..types import Completion, TokenRecord, Trajectory
from ..watch.metrics import is_success, rollout_metrics, source_metrics
from ..watch.results import Evaluation, TrainResult
from .cluster.status import cluster_metrics, publish_status
from .draws import fingerprint
from .evaluation import validate
from .idle import IdleSteps, Plateau, task_values
from .parts import RunParts, open_rollout
from .saving import finish, finish_in_thread
from .start import Start, describe_run, go_back
from .stopping import StopSignals

LOOK_S = 0.5
"""Seconds between two updates of the displayed environments."""


class Trainer:
    """One training run on one machine: `parts`, with the environments of `plan` open, from `start` on."""

    def __init__(self, parts: RunParts, plan: Plan, start: Start) -> None:
        self.parts, self.plan, self.config = parts, plan, parts.config
        self.engine, self.learner, self.workers = parts.engine, parts.learner, parts.workers
        self.observe, self.breakdown, self.ledger = parts.observe, parts.breakdown, parts.ledger
        self.probe, self.writer, self.saver = parts.probe, parts.writer, parts.saver
        self.step, self.opening = start.step, start.opening
        self.result = TrainResult(
            parts.directory.path, start.step, dict(start.before), dict(start.after), checkpoint=start.checkpoint
        )
        self.sound = True  # False while the weights are changed and not yet checked
        self.idle = IdleSteps()
        self.plateau = Plateau(self.config.train.stop_after, start.plateau, self.config.train.restart_from_best)
        assert plan.admission is not None
        plan.admission.advance(start.step)
        self.stream = self._open_stream(start.draws)
        self._recorded = bool(start.recorded)  # whether the store holds metrics of the step that the run begins after
        self._stored: set[str] = set()  # chains of the running step that the writer has
        self._batch_at = time.perf_counter()  # when the last batch was complete

    # ---- the run ---------------------------------------------------------------------------------------------------------

    async def run(self) -> TrainResult:
        """Train to the last step, or until cancelled. A checkpoint is saved in both cases."""
        try:
            # Saved before the environments are closed, which may take longer than a scheduler waits after SIGTERM.
            async with self._saved_at_the_end(), self._environments_shown(), self.stream:
                try:
                    await self._steps()
                finally:
                    await self.probe.close()
        finally:
            if (idle := self.idle.closing()) is not None:
                self.observe.note(idle)
        return self.result

    async def _steps(self) -> None:
        settings, rollout, every = self.config.train, self.config.rollout, self.config.train.validate_every
        if isinstance(self.engine, PreparedEngine):
            self.observe.phase("preparing the engine")
            chains = rollout.num_tasks * rollout.num_chains * (rollout.steps_ahead + 1)
            await finish_in_thread(self.engine.prepare, min(chains, most_in_flight(self.engine, rollout.max_concurrency)))
        if self.step == 0:
            if self.opening and self.saver.saved_step is None:
                await self.saver.save(0, self._state())  # a warm start is worth keeping
            if settings.validate_at_start and self.parts.validation_tasks and not self.result.before:
                self.result.before = (await self._validate()).metrics
                self.observe.validated(self.result.before)
            if (first := self.opening | self.result.before) and not self._recorded:
                self.observe.log(first, 0)
        elif every and self.step % every == 0 and self.step < settings.steps and not self.result.after:  # stopped in it
            self.observe.log(metrics := await self._validated(), self.step)
            if "train/restarted_from" in metrics:
                await self.saver.save(self.step, self._state())
        await self._ask_probe()
        self.breakdown.begin()
        reason: str | None = None
        while self.step < settings.steps and (reason := self.plateau.reason or self.parts.spending.reason) is None:
            metrics = await self._step()
            self.result.history.append(metrics)
            self.result.steps = self.step
        await self._validate_once()
        self.result.cost = self.parts.spending.metrics(self.result.before, self.result.after)
        if self.step < settings.steps and reason is not None:
            self.result.stopped = f"the run ends after step {self.step} of {settings.steps}: {reason}"
            self.observe.note(self.result.stopped)

    async def _validate_once(self) -> None:
        if not self.result.after:
            self.result.after = (await self._validate()).metrics
            self.observe.log(self.result.after | self.parts.spending.metrics(self.result.before, self.result.after), self.step)

    async def _step(self) -> dict[str, float]:
        settings, rollout = self.config.train, self.config.rollout
        step = self.step + 1
        self.observe.begin(step)
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
            num_tasks = rollout.num_tasks
            if rollout.refill:
                metrics["rollout/refilled"] = float(len(groups) - num_tasks)
                num_tasks = max(num_tasks, len(groups))
            with timed(metrics, "time/ledger_s"):
                version = self.learner.version
                self.ledger.check_rollout(groups, num_tasks=num_tasks, num_chains=rollout.num_chains, version=version)
            await finish(asyncio.ensure_future(self._update(groups, step, metrics)))
            if settings.validate_every and step % settings.validate_every == 0:
                with self.breakdown.span("validate"):
                    metrics |= await self._validated()
        finally:
            self.observe.checks(step, self.ledger.take_checked())
            if self.step == step:
                metrics |= self.breakdown.end_step(metrics["rollout/tokens"])
                metrics |= self.parts.spending.metrics(self.result.before, metrics)
                self.observe.log(metrics, step)
        self.observe.step(step, metrics)
        if self.saver.due(step) or "train/restarted_from" in metrics:  # a resumed run must not go back again
            with self.breakdown.span("save"):
                await self.saver.save(step, self._state())
        return metrics

    async def _validated(self) -> dict[str, float]:
        """Validate within the run, and go back to the best checkpoint where that is due. Returns metrics."""
        self.result.after = (await self._validate()).metrics
        if self.plateau.restart is None:
            return self.result.after
        self.sound = False
        went: dict[str, float] = await finish(asyncio.ensure_future(go_back(self.parts, self.plateau, self.step)))
        self.sound = True
        await self._ask_probe()
        return self.result.after | went

    async def _update(self, groups: list[list[Trajectory]], step: int, metrics: dict[str, float]) -> None:
        """Learn from one step's chains and publish the weights. The step counts once every check has passed.

        Adds to `metrics`, which holds those of the environments.
        """
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
            self.observe.note(idle)
        num_envs = int(metrics.get("resources/total/most_allocated", 0))
        chains = [trajectory for group in groups for trajectory in group]
        metrics |= rollout_metrics(chains, sampling_s, self.config.agent.success_at, num_envs=num_envs)
        metrics |= source_metrics(groups, self.config.agent.success_at)
        metrics |= learned | {"train/idle_steps": float(self.idle.in_a_row)}
        if (proof := self.engine.proof) is not None:
            metrics |= {"handover/gap": proof.gap, "handover/moved": proof.moved}
        if self.workers is not None:
            metrics |= self.workers.handover_metrics()
        self.step, self.sound = step, True
        if tokens:
            self.writer.add_tokens(step, tokens)

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
                try:
                    with timed(metrics, "time/ledger_s"):
                        metrics |= self.ledger.check_probe(self.probe, replies, self.learner, groups)
                    hold = (lambda: held.enter_context(self.engine.hold())) if self.overlaps else None
                    learned = self.learner.update(groups, self.ledger.check_update, hold, self.config.rollout.max_lag)
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
                self.observe.note(f"{error}.")
            raise
        except BaseException:  # stopped
            await self._save_last()
            raise
        else:
            await self._save_last()

    async def _save_last(self) -> None:
        if self.sound:  # a signal that arrives in the meantime ends the run after the checkpoint
            await finish(asyncio.ensure_future(self.saver.save_last(self.step, self._state())))
        else:
            await self.saver.wait()
            newest = f"the newest checkpoint is {self.saver.newest}" if self.saver.newest else "there is no checkpoint"
            self.observe.note(f"step {self.step + 1} failed after its update had begun, so it is not saved; {newest}.")
        self.result.checkpoint, self.result.best = self.saver.newest, best_checkpoint(self.saver.folder)

    @asynccontextmanager
    async def _environments_shown(self) -> AsyncIterator[None]:
        """Update the displayed and the recorded environments while the body runs, also while no chain ends."""
        manager, activities, measured = self.plan.manager, self.breakdown.activities, self._figures()

        async def look() -> None:
            while True:
                figures = {} if measured is None else measured.metrics()
                self.observe.look(figures, activities, None if manager is None else manager.holders())
                await publish_status(self.parts.directory.path, self.step, self.plan.runner, figures)
                await asyncio.sleep(LOOK_S)

        looking = asyncio.create_task(look())
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.wait([looking])

    def _figures(self) -> Any:
        """What measures the environments: the resource manager, or the workers; None if there is neither."""
        return self.plan.manager if self.workers is None else self.plan.runner

    @property
    def overlaps(self) -> bool:
        """Whether chains are sampled while the learner learns."""
        return self.config.rollout.steps_ahead > 0

    def _open_stream(self, draws: dict[str, Any] | None) -> GroupStream:
        """The stream of groups, which goes on with the draws of the checkpoint if there are any."""
        rollout = self.config.rollout
        pace = Pace(
            num_tasks=rollout.num_tasks, num_chains=rollout.num_chains, num_steps=self.config.train.steps,
            max_lag=rollout.max_lag, depth=rollout.steps_ahead, at_limit=rollout.at_limit, refill=rollout.refill,
        )  # fmt: skip
        total = rollout.num_tasks * rollout.num_chains

        def show(group: Group, trajectory: Trajectory) -> None:
            self.observe.chains(min(stream.finished_chains, total), total)
            if not self.overlaps:  # else the step that trains it is not known yet
                self.writer.put_trajectories(group.step, "train", [trajectory])
                self._stored.add(trajectory.id)

        stream = GroupStream(
            self.plan, pace, draw=self.parts.draws.draw, seeded=self._seeded, on_chain=show,
            teaches=lambda group: self._result(group).teaches, learn=lambda group: self.parts.draws.learn(self._result(group)),
        )  # fmt: skip
        if draws is None:
            stream.start_at(self.step + 1)
        else:
            stream.restore(draws, self.parts.draws.task_at)
        stream.drawn += self.ledger.groups.total()  # of the run before it was resumed
        return stream

    def _result(self, group: Group) -> GroupResult:
        chains, success_at = [chain for chain in group.trajectories if chain.trainable], self.config.agent.success_at
        return GroupResult(
            group.row, tuple(chain.total_reward for chain in chains), tuple(is_success(chain, success_at) for chain in chains)
        )

    async def _collect(self, step: int) -> list[list[Trajectory]]:
        """Wait for one step's chains. Each is stored as it ends if its step is known, and even if the step fails."""
        finished: list[list[Trajectory]] = []
        try:
            async with watchdog(f"step {step}", self.breakdown.activities, self.observe.note):
                finished = as_groups(await self.stream.next_batch(self.learner.version))
            self.observe.log_chains([each for group in finished for each in group], "train", step)
            return finished
        finally:
            finished = finished or as_groups(self.stream.in_flight)
            left = [each for group in finished for each in group if each.id not in self._stored]
            await self.writer.add_trajectories(step, "train", left, replace=not self._stored)
            self._stored.clear()

    async def _validate(self) -> Evaluation:
        settings, tasks, count = self.config.train, self.parts.validation_tasks, itertools.count(1)
        temperature = settings.validate_temperature
        sampling = self.config.sampling if temperature is None else replace(self.config.sampling, temperature=temperature)
        if not tasks:
            return Evaluation({}, [], settings.validate_chains)
        self.observe.phase("validation", len(tasks) * settings.validate_chains)
        evaluation = await validate(
            replace(self.plan, sampling=replace(sampling, seed=self.config.seed)), tasks, num_chains=settings.validate_chains,
            max_concurrency=self.config.rollout.max_concurrency, prefix=f"v{self.step}-",
            success_at=self.config.agent.success_at, on_trajectory=lambda _: self.observe.advance(next(count)),
        )  # fmt: skip
        if settings.stop_after:
            values = task_values(evaluation.trajectories, settings.validate_chains, self.config.agent.success_at)
            self.plateau.add(self.step, values)
        if self.step:
            self.saver.validated(self.step, evaluation.metrics)
        self.observe.log_chains(evaluation.trajectories, "validation", self.step)
        await self.writer.add_trajectories(self.step, "validation", evaluation.trajectories, replace=True)
        self.result.sample = next((t for t in evaluation.trajectories if t.trainable), None)
        return evaluation

    def _seeded(self, group: Group) -> Plan:
        """Returns the plan with the seed of the group's step: steps differ, and a resumed run repeats those of its steps.

        The step also decides about the examples and the bonus.
        """
        base = self.config.seed if self.config.sampling.seed is None else self.config.sampling.seed
        rollout, fading = self.config.rollout, self.parts.agent.examples_steps or 0
        return replace(
            self.plan, sampling=replace(self.plan.sampling, seed=base * 1_000_003 + group.step),
            shown=shows_examples(fading, self.config.seed, group.step, group.position),
            call_bonus=rollout.call_bonus * left_at(group.step, rollout.call_bonus_steps),
        )  # fmt: skip

    def _state(self) -> dict[str, Any]:
        from ..learn.model.storage import random_state

        return {
            "step": self.step, "learner": self.learner.state_dict(), "cursor": self.parts.draws.state(),
            "stream": self.stream.state(), "tasks": dict(self.ledger.groups), "before": self.result.before,
            "opening": self.opening, "validation": fingerprint(self.parts.validation_tasks), "random": random_state(),
            "plateau": self.plateau.state,
        }  # fmt: skip


async def run(parts: RunParts, start: Start, signals: StopSignals | None = None) -> TrainResult:
    """Open the environments, train from `start` on, and close the parts, also if the run is cancelled."""
    with signals.cancelling() if signals else nullcontext():
        try:
            # Written to the end also if the run stops; a failed write does not hide why.
            with parts.writer, parts.observe.running(**describe_run(parts, start.step)):
                if parts.agent.env is not None:
                    parts.observe.phase("opening the environments")
                workers, note = parts.directory.path / "workers", parts.observe.note
                async with open_rollout(parts.config, parts.agent, parts.plan, workers, note) as plan:
                    return await Trainer(parts, plan, start).run()
        finally:
            parts.close()


@contextmanager
def timed(clock: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        clock[name] = clock.get(name, 0.0) + time.perf_counter() - started
