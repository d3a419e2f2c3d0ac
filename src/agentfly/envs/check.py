"""`check_env`: examines an environment and returns a `Report` of what passed, what failed and what could not be checked.

It works on any class with `reset(task)` and `close()`. Without `actions` no episode is played, and without `solver` the full
score is unknown: such checks are reported as "not checked", never as passed. Only instances made here are touched and closed.

    report = check_env(GuessEnv, tasks=[{"secret": 3}, {"secret": 8}],
                       actions=lambda rng, seen: ("guess", {"n": rng.randint(1, 10)}),
                       solver=lambda env, task: env.guess(task.fields["secret"]), score=lambda env, task: float(env.solved))
    print(report); assert report.ok
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..errors import ConfigError
from ..resources.spec import Spec, spec_of
from ..types import Task
from . import check_conduct, check_effects
from .check_growth import grows
from .check_report import CheckResult, Failed, Report, Skipped, Status
from .check_subject import EnvCall, Play, Subject, cancel_after, episode, refused, steps_of, text
from .worlds import as_tasks

__all__ = ["CheckResult", "Report", "check_env"]

SEEDS = 6
"""Random episodes per task that are compared with each other: what is rare shows in one of them."""


def check_env(
    make: object,
    tasks: Sequence[Task | Mapping[str, Any]] | None = None,
    *,
    solver: Callable[[Any, Task], Any] | None = None,
    do_nothing: Callable[[Any, Task], Any] | None = None,
    actions: Sequence[Any] | Callable[[random.Random, Any], Any] | None = None,
    score: Callable[[Any, Task], Any] | None = None,
    full: float = 1.0,
    seed: int = 0,
    timeout_s: float = 10.0,
) -> Report:
    """Examine an environment: a class, a name, or a function that builds one.

    `tasks`: two or more different ones check more. `actions`: calls to choose from, or a function (rng, observation) or (rng,
    observation, env) that returns the next call; a call is (method, {arguments}), anything else is an action for `step`.
    `solver(env, task)` plays a task to its full score, `do_nothing(env, task)` plays without trying; each may return the
    score. `score(env, task)` reads the score; the default is the environment's `score`, or the sum of rewards. All functions
    may be async.
    """
    spec = spec_of(make)
    play, report = Play(actions, score), Report(spec.name)
    return asyncio.run(_Examination(spec, _tasks(tasks, seed), solver, do_nothing, play, full, seed, timeout_s, report).run())


def _tasks(rows: Sequence[Task | Mapping[str, Any]] | None, seed: int) -> list[Task]:
    if rows is None:
        return [Task("check", (), {"seed": seed})]
    if not rows:
        raise ConfigError("check_env needs at least one task, or leave tasks out")
    return as_tasks(rows)


@dataclass(slots=True)
class _Examination:
    spec: Spec
    tasks: list[Task]
    solver: Callable[[Any, Task], Any] | None
    do_nothing: Callable[[Any, Task], Any] | None
    play: Play
    full: float
    seed: int
    timeout_s: float
    report: Report
    count: int = 0
    pays: bool | None = None
    """Whether the solver's calls return rewards; None until it is known."""
    checking: str = ""
    hung: str = ""
    """The call that hung; the examination gives up after the first."""
    resets: list[float] = field(default_factory=list)
    before: dict[str, Any] = field(default_factory=dict)
    rows: list[str] = field(default_factory=list)
    """The fields of each task at the beginning."""

    async def run(self) -> Report:
        self.before = check_effects.settings()
        self.rows = check_conduct.fields_of(self.tasks)
        rows: list[tuple[str, Callable[[], Awaitable[str | None]]]] = [
            ("starts and resets", self.starts),
            ("observations and scores can be read", partial(check_conduct.readable, self)),
            ("same seed, same first observation", self.same_first),
            ("same seed, same episode", self.same_episode),
            ("the solver plays the same episode again", partial(check_conduct.same_solution, self)),
            ("two tasks are two games", partial(check_conduct.tasks_differ, self)),
            ("reset leaves no trace", self.no_trace),
            ("instances do not influence each other", self.side_by_side),
            ("a cancelled call leaves it usable or closed", self.cancelled),
            ("closing twice is fine", self.close_twice),
            ("calls after the end are refused", self.after_done),
            ("the solver's last move ends the episode", partial(check_conduct.tells_end, self)),
            ("the solver's score is full", self.solver_full),
            ("scores are finite and at most full", partial(check_conduct.bounded, self)),
            ("doing nothing is not enough", self.nothing_less),
            ("acting at random is not enough", self.random_less),
            ("no reward without acting", self.no_free_reward),
            ("the event loop is not held up", partial(check_conduct.responsive, self)),
            ("the process stays as it was", partial(check_conduct.leaves_no_mark, self)),
            ("states have names", partial(check_conduct.names_states, self)),
            ("memory and handles do not grow", self.no_growth),
            ("plays alike in a worker process", self.in_worker),
        ]
        for name, check in rows:
            status: Status = "passed"
            self.checking = name
            try:
                detail = await check()
            except Skipped as reason:
                status, detail = "not checked", str(reason)
            except Failed as finding:
                status, detail = "failed", str(finding)
            except ConfigError as error:
                if check != self.starts:
                    raise  # the arguments of check_env are wrong
                status, detail = "failed", str(error)
            except Exception as error:  # noqa: BLE001 - any way an environment can fail is a finding
                status, detail = "failed", f"{type(error).__name__}: {error}"
            self.report.checks.append(CheckResult(name, status, detail or ""))
            if status == "failed" and (self.hung or name in (rows[0][0], rows[1][0])):
                # Every further call would wait for the same hang, or carry the same long text.
                why = f"{self.hung} hangs: see {name!r}" if self.hung else f"see {name!r}"
                self.report.checks += [CheckResult(other, "not checked", why) for other, _ in rows[len(self.report.checks) :]]
                break
        check_effects.restore(self.before)
        if self.report.ok:
            await self.measure()
        return self.report

    @asynccontextmanager
    async def subject(self, watch: check_effects.Stopwatch | None = None) -> AsyncIterator[Subject]:
        self.count += 1
        spec = replace(self.spec, name=f"{self.spec.name} (in the check {self.checking!r})")  # for what is logged
        subject = Subject(spec, self.timeout_s, self.count, watch)
        try:
            yield await subject.start()
        finally:
            called = subject.hung
            await subject.discard()
            self.resets += subject.resets
            self.hung = self.hung or subject.hung
            if subject.hung and not called:
                raise Failed(f"close did not return within {self.timeout_s:g} s")

    async def in_worker(self) -> str | None:
        if not self.report.ok:
            raise Skipped("other checks failed")  # a worker process costs more than they do
        return await check_conduct.in_worker(self)

    def need_actions(self) -> None:
        if self.play.actions is None:
            raise Skipped("give `actions`")

    async def fresh_episode(self, task: Task, seed: int) -> list[str]:
        async with self.subject() as subject:
            return await episode(subject, task, self.play, seed)

    # ---- the checks

    async def starts(self) -> None:
        started = time.perf_counter()
        async with self.subject() as subject:
            self.report.figures["start_s"] = time.perf_counter() - started
            for task in self.tasks:
                try:
                    await subject.reset(task)
                except KeyError as error:
                    raise Failed(
                        f"reset reads {error}, which task {task.id} does not have: give `tasks` with that field"
                    ) from error

    async def same_first(self) -> None:
        for task in self.tasks:
            seen = []
            for _ in range(2):
                async with self.subject() as subject:
                    seen.append(text(await subject.reset(task)))
            _same(seen[0], seen[1], f"task {task.id}: two instances")

    async def same_episode(self) -> None:
        self.need_actions()
        for task in self.tasks:
            started, seeds = time.perf_counter(), SEEDS
            first = [await self.fresh_episode(task, self.seed)]
            if time.perf_counter() - started < check_conduct.SLOW_S:
                first += [await self.fresh_episode(task, self.seed + number) for number in range(1, seeds)]
            for number, lines in enumerate(first):
                _same(lines, await self.fresh_episode(task, self.seed + number), f"task {task.id}: two instances")

    async def no_trace(self) -> str | None:
        last = self.tasks[-1]
        wanted = await self.fresh_episode(last, self.seed + 1)
        async with self.subject() as subject:
            for number, task in enumerate([*self.tasks, *self.tasks]):
                await episode(subject, task, self.play, self.seed + 2 + number)
                if self.solver is not None:
                    await subject.reset(task)
                    await subject.play(self.solver, task)
            _same(wanted, await episode(subject, last, self.play, self.seed + 1), "a fresh instance and a used one after reset")
        return None if self.play.actions is not None else "of the first observation alone; give `actions`"

    async def side_by_side(self) -> str | None:
        first, second = self.tasks[0], self.tasks[-1]
        wanted = [await self.fresh_episode(first, self.seed), await self.fresh_episode(second, self.seed + 1)]
        async with self.subject() as one, self.subject() as two:
            lanes = [steps_of(one, first, self.play, self.seed), steps_of(two, second, self.play, self.seed + 1)]
            seen: list[list[str]] = [[], []]
            open_lanes = [0, 1]
            while open_lanes:
                for lane in list(open_lanes):
                    try:
                        seen[lane].append(await anext(lanes[lane]))
                    except StopAsyncIteration:
                        open_lanes.remove(lane)
            for lane in (0, 1):
                _same(wanted[lane], seen[lane], "an instance alone and one beside another")
        return None if self.play.actions is not None else "by the first observation alone; give `actions`"

    async def cancelled(self) -> str | None:
        """A cancelled call. In the event loop the instance must be usable afterwards or refuse calls; in a thread the call
        must end and the instance is closed. Other instances must not be affected.
        """
        task = self.tasks[0]
        wanted = await self.fresh_episode(task, self.seed)
        for turns in (0, 1, 2, 5):
            async with self.subject() as subject:
                observation = await subject.reset(task)
                calls: list[EnvCall] = [("reset", {"task": task})]
                if self.play.actions is not None:
                    calls.append(await subject.choose(self.play, random.Random(self.seed), observation))
                if not subject.in_loop:
                    await subject.give_up(calls[-1] if turns else calls[0])
                    if subject.lives:
                        raise Failed("a call that was given up does not end: its thread is still running")
                    continue
                for method, arguments in calls:
                    await cancel_after(subject.instance.call(method, (), arguments), turns, self.timeout_s)
                    try:
                        seen = await episode(subject, task, self.play, self.seed)
                    except ConfigError:
                        raise
                    except Exception as error:
                        if type(error).__name__ == "DeadlineError":
                            raise Failed("after a cancelled call it hangs") from error
                        break
                    _same(wanted, seen, "a fresh instance and one whose call was cancelled")
        _same(wanted, await self.fresh_episode(task, self.seed), "a fresh instance and one made after a call was given up")
        return None if self.play.actions is not None else "of reset alone; give `actions`"

    async def close_twice(self) -> None:
        for used in (False, True):
            async with self.subject() as subject:
                if used:
                    await subject.reset(self.tasks[0])
                await subject.close()
                try:
                    await subject.close()
                except Exception as error:
                    raise Failed(f"the second close raised {type(error).__name__}: {error}") from error

    async def after_done(self) -> None:
        if self.solver is None and self.play.actions is None:
            raise Skipped("give `solver` or `actions`")
        for task in self.tasks:
            async with self.subject() as subject:
                recorded = await self.solve_recorded(subject, task)
                if not subject.done or recorded is None:
                    continue
                try:
                    value = await subject.call(*recorded)
                except Exception as error:
                    if type(error).__name__ == "DeadlineError":
                        raise
                    return
                if not refused(value):
                    raise Failed(f"task {task.id}: after the end {recorded[0]} still answered {text(value)[:80]}")
                return
        raise Skipped("no episode said that it was done (a ToolResult or dict with done, a step tuple, or an attribute `done`)")

    async def solve_recorded(self, subject: Subject, task: Task) -> Any:
        """Play until done, with the solver if there is one. Returns the last call."""
        if self.solver is None:
            for attempt in range(10):
                await episode(subject, task, self.play, self.seed + attempt)
                if subject.done:
                    return subject.last
            return None
        await subject.reset(task)
        await subject.play(self.solver, task)
        return subject.last

    async def scored(self, subject: Subject, task: Task, player: Callable[[Any, Task], Any] | None) -> float:
        value = None if player is None else await subject.play(player, task)
        if type(value) not in (int, float):
            value = await self.read_score(subject, task)
        if value is None:
            raise Skipped("give `score`, or let the players return the score")
        return float(value)

    async def read_score(self, subject: Subject, task: Task) -> float | None:
        """The current score. If calls return rewards, their sum is the score, and 0 before the first reward."""
        value = await subject.score(self.play, task)
        if value is None and self.solver is not None and self.pays is None:
            self.pays = False
            async with self.subject() as other:
                await other.reset(task)
                await other.play(self.solver, task)
                self.pays = other.rewards > 0
        return 0.0 if value is None and self.pays else value

    async def solver_full(self) -> None:
        if self.solver is None:
            raise Skipped("give `solver`")
        for task in self.tasks:
            async with self.subject() as subject:
                await subject.reset(task)
                value = await self.scored(subject, task, self.solver)
                if not value >= self.full - 1e-9:  # NaN is not full either
                    raise Failed(f"task {task.id}: the solver scores {value:g}, full is {self.full:g}")

    async def nothing_less(self) -> None:
        """Scores the do-nothing policy, or a reset without any call."""
        values = []
        for task in self.tasks:
            async with self.subject() as subject:
                await subject.reset(task)
                if self.do_nothing is None and await self.read_score(subject, task) is None:
                    raise Skipped("give `do_nothing` or `score`")
                values.append(await self.scored(subject, task, self.do_nothing))
        if max(values) >= self.full:
            raise Failed(f"doing nothing scores {max(values):g}, which is full")

    async def random_less(self) -> None:
        """Compares the mean: a single lucky episode may have the full score."""
        self.need_actions()
        values = []
        for task in self.tasks:
            for attempt in range(8):
                async with self.subject() as subject:
                    await episode(subject, task, self.play, self.seed + attempt)
                    values.append(await self.read_score(subject, task) or 0.0)
        mean = sum(values) / len(values)
        if mean >= self.full:
            raise Failed(f"random actions score {mean:g} on average, which is full")

    async def no_free_reward(self) -> str | None:
        """Probes: straight after reset, after many resets, after another episode was solved, and after empty actions."""
        for task in self.tasks:
            async with self.subject() as subject:
                observation = await subject.reset(task)
                if await self.read_score(subject, task) is None:
                    raise Skipped("give `score`")
                await self.unpaid(subject, task, "straight after reset", above=0.0)
                for _ in range(10):
                    await subject.reset(task)
                await self.unpaid(subject, task, "after ten resets", above=0.0)
                if self.solver is not None:
                    await subject.play(self.solver, task)
                    observation = await subject.reset(task)
                    await self.unpaid(subject, task, "after a solved episode and a reset", above=0.0)
                if self.play.actions is not None:
                    await self.blanks(subject, task, observation)
        return None if self.play.actions is not None else "without empty actions; give `actions`"

    async def blanks(self, subject: Subject, task: Task, observation: object) -> None:
        """Calls of a random player with their texts left empty."""
        rng, tried = random.Random(self.seed), set[str]()
        for _ in range(20):
            method, arguments = await subject.choose(self.play, rng, observation)
            blank = {name: "" if isinstance(value, str) else value for name, value in arguments.items()}
            if blank == arguments or method in tried:
                continue  # no argument can be left empty
            tried.add(method)
            await subject.attempt((method, blank))
            await self.unpaid(subject, task, f"after an empty {method}")
            await subject.reset(task)

    async def unpaid(self, subject: Subject, task: Task, when: str, above: float | None = None) -> None:
        """Raises Failed if the score is full or, with `above`, above it."""
        value = await self.read_score(subject, task)
        if value is not None and (value >= self.full or (above is not None and value > above + 1e-9)):
            raise Failed(f"task {task.id}: {when} the score is {value:g} without any action")

    async def no_growth(self) -> None:
        tracing = tracemalloc.is_tracing()
        if not tracing:
            tracemalloc.start()
        try:

            async def fresh(number: int) -> None:
                async with self.subject() as subject:
                    await self.one(subject, number)

            with check_effects.created() as left:
                await grows("instances that are made and closed", fresh, left)
                async with self.subject() as subject:
                    await grows("an instance that is reset", partial(self.one, subject), left)
        finally:
            if not tracing:
                tracemalloc.stop()

    async def one(self, subject: Subject, number: int) -> None:
        await episode(subject, self.tasks[number % len(self.tasks)], self.play, self.seed + number % 4)

    async def measure(self) -> None:
        """Measure speed and memory; they are reported, not judged."""
        self.report.figures["reset_s"] = statistics.median(self.resets)
        task, steps, started = self.tasks[0], 0, time.perf_counter()
        async with self.subject() as subject:
            while time.perf_counter() - started < 0.2:
                steps += len(await episode(subject, task, self.play, self.seed))
            seconds = time.perf_counter() - started
        self.report.figures["steps_per_s"] = steps / seconds
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        async with self.subject() as subject:
            await episode(subject, task, self.play, self.seed)
            self.report.figures["memory_kb"] = (tracemalloc.get_traced_memory()[0] - before) / 1024
        tracemalloc.stop()


def _same(wanted: str | list[str], seen: str | list[str], who: str) -> None:
    if wanted == seen:
        return
    if isinstance(wanted, str) or isinstance(seen, str):
        raise Failed(f"{who} differ: {wanted[:80]!s} and {seen[:80]!s}")
    for number, (one, other) in enumerate(zip(wanted, seen, strict=False)):
        if one != other:
            raise Failed(f"{who} differ at step {number}: {one[:80]} and {other[:80]}")
    raise Failed(f"{who} differ in length: {len(wanted)} and {len(seen)} steps")
