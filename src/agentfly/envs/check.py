"""`check_env`: is this a good environment? A class in, a `Report` out: what was checked, what failed, what could not be
checked.

Works on any class with `reset(task)` and `close()`. What it is told, it can check: without `actions` no episode is played,
without `solver` nobody knows the full score; such checks are reported as "not checked", never as passed. It changes nothing
outside the instances it makes, and closes them.

    report = check_env(GuessEnv, tasks=[{"secret": 3}, {"secret": 8}],
                       actions=lambda rng, seen: ("guess", {"n": rng.randint(1, 10)}),
                       solver=lambda env, task: env.guess(task.fields["secret"]), score=lambda env, task: float(env.solved))
    print(report); assert report.ok
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import random
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal

from ..errors import ConfigError
from ..resources.env import Spec, spec_of
from ..types import Task, ToolResult
from .check_subject import Play, Subject, episode, steps_of, text

Status = Literal["passed", "failed", "not checked"]
NUM_EPISODES = 40
LEAK_BYTES = 1024
"""More than this per episode, all the time, is growth."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    status: Status
    detail: str = ""


@dataclass(slots=True)
class Report:
    """`ok`: nothing failed. `complete`: nothing was left unchecked either. `figures`: start_s; and of one that is ok,
    steps_per_s and memory_kb
    """

    name: str
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return bool(self.checks) and not self.failed

    @property
    def complete(self) -> bool:
        return self.ok and all(check.status == "passed" for check in self.checks)

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.status == "failed"]

    def __getitem__(self, name: str) -> Check:
        return next(check for check in self.checks if check.name == name)

    def __str__(self) -> str:
        marks = {"passed": "ok", "failed": "FAILED", "not checked": "not checked"}
        lines = [
            f"{marks[check.status]:>12}  {check.name}{': ' if check.detail else ''}{check.detail}" for check in self.checks
        ]
        figures = ", ".join(f"{name} {value:,.6g}" for name, value in self.figures.items())
        return "\n".join([self.name, *lines, *([f"{'':>12}  {figures}"] if figures else [])])


class _Failed(Exception):
    """A check found something."""


class _Skipped(Exception):
    """A check lacks what it needs."""


def check_env(
    make: Any,
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

    `tasks`: at least two different ones show more (one row or none: some checks are left out). `actions`: calls to choose
    from, or a function (rng, observation) -> (method, {arguments}). `solver(env, task)` plays a task to its full score,
    `do_nothing(env, task)` plays without trying; each may return the score. `score(env, task)` reads it; left out, the
    environment's own `score`, or the rewards of the calls. All of them may be async.
    """
    spec = spec_of(make)
    return asyncio.run(
        _Examination(spec, _tasks(tasks, seed), solver, do_nothing, Play(actions, score), full, seed, timeout_s).run()
    )


def _tasks(rows: Sequence[Task | Mapping[str, Any]] | None, seed: int) -> list[Task]:
    if rows is None:
        return [Task("check", (), {"seed": seed})]
    if not rows:
        raise ConfigError("check_env needs at least one task, or leave tasks out")
    return [row if isinstance(row, Task) else Task(str(number), (), dict(row)) for number, row in enumerate(rows)]


class _Examination:
    def __init__(
        self,
        spec: Spec,
        tasks: list[Task],
        solver: Callable[[Any, Task], Any] | None,
        do_nothing: Callable[[Any, Task], Any] | None,
        play: Play,
        full: float,
        seed: int,
        timeout_s: float,
    ) -> None:
        self.spec, self.tasks, self.solver, self.do_nothing = spec, tasks, solver, do_nothing
        self.play, self.full, self.seed, self.timeout_s = play, full, seed, timeout_s
        self.count = 0
        self.report = Report(spec.name)

    async def run(self) -> Report:
        rows: list[tuple[str, Callable[[], Awaitable[str | None]]]] = [
            ("starts and resets", self.starts),
            ("same seed, same first observation", self.same_first),
            ("same seed, same episode", self.same_episode),
            ("reset leaves no trace", self.no_trace),
            ("instances do not influence each other", self.side_by_side),
            ("a cancelled call leaves it usable or closed", self.cancelled),
            ("closing twice is fine", self.close_twice),
            ("calls after the end are refused", self.after_done),
            ("the solver's score is full", self.solver_full),
            ("doing nothing is not enough", self.nothing_less),
            ("acting at random is not enough", self.random_less),
            ("no reward without acting", self.no_free_reward),
            ("memory and handles do not grow", self.no_growth),
        ]
        for name, check in rows:
            status: Status = "passed"
            try:
                detail = await check()
            except _Skipped as reason:
                status, detail = "not checked", str(reason)
            except _Failed as finding:
                status, detail = "failed", str(finding)
            except ConfigError as error:
                if check != self.starts:
                    raise  # the call of check_env itself is wrong
                status, detail = "failed", str(error)
            except Exception as error:  # noqa: BLE001 - any way an environment can fail is a finding
                status, detail = "failed", f"{type(error).__name__}: {error}"
            self.report.checks.append(Check(name, status, detail or ""))
            if name == rows[0][0] and status == "failed":
                self.report.checks += [Check(other, "not checked", "it does not start") for other, _ in rows[1:]]
                break
        if self.report.ok:
            await self.measure()
        return self.report

    @asynccontextmanager
    async def subject(self) -> AsyncIterator[Subject]:
        self.count += 1
        subject = Subject(self.spec, self.timeout_s, self.count)
        try:
            yield await subject.start()
        finally:
            await subject.discard()

    def need_actions(self) -> None:
        if self.play.actions is None:
            raise _Skipped("give `actions`")

    async def fresh_episode(self, task: Task, seed: int) -> list[str]:
        async with self.subject() as subject:
            return await episode(subject, task, self.play, seed)

    # ---- the checks

    async def starts(self) -> None:
        started = time.perf_counter()
        async with self.subject() as subject:
            self.report.figures["start_s"] = time.perf_counter() - started
            for task in self.tasks:
                await subject.reset(task)

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
            first, second = [await self.fresh_episode(task, self.seed) for _ in range(2)]
            _same(first, second, f"task {task.id}: two instances")

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
        task = self.tasks[0]
        async_calls = inspect.iscoroutinefunction(getattr(self.spec.cls, "reset", None))
        if self.play.actions is not None:
            async with self.subject() as subject:
                call = self.play.next(random.Random(self.seed), await subject.reset(task))
                async_calls |= inspect.iscoroutinefunction(getattr(subject.env, call[0], None))
        if not async_calls:
            raise _Skipped("its methods are sync: a call that is given up ends with its thread or process, and closes it")
        wanted = await self.fresh_episode(task, self.seed)
        for turns in (0, 1, 2, 5):
            async with self.subject() as subject:
                observation = await subject.reset(task)
                calls = [partial(subject.placed.reset, task)]
                if self.play.actions is not None:
                    method, arguments = self.play.next(random.Random(self.seed), observation)
                    calls.append(partial(subject.placed.call, method, (), arguments))
                for make_call in calls:
                    await _cancel_after(make_call(), turns, self.timeout_s)
                    try:
                        seen = await episode(subject, task, self.play, self.seed)
                    except ConfigError:
                        raise
                    except Exception as error:
                        if type(error).__name__ == "DeadlineError":
                            raise _Failed("after a cancelled call it hangs") from error
                        break
                    _same(wanted, seen, "a fresh instance and one whose call was cancelled")
        return None

    async def close_twice(self) -> None:
        for used in (False, True):
            async with self.subject() as subject:
                if used:
                    await subject.reset(self.tasks[0])
                await subject.close()
                try:
                    await subject.close()
                except Exception as error:
                    raise _Failed(f"the second close raised {type(error).__name__}: {error}") from error

    async def after_done(self) -> None:
        if self.solver is None and self.play.actions is None:
            raise _Skipped("give `solver` or `actions`")
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
                if not (isinstance(value, ToolResult) and value.error is not None):
                    raise _Failed(f"task {task.id}: after the end {recorded[0]} still answered {text(value)[:80]}")
                return
        raise _Skipped("no episode said that it was done (a ToolResult with done, a step tuple, or an attribute `done`)")

    async def solve_recorded(self, subject: Subject, task: Task) -> Any:
        """Play until done, by the solver if there is one; the last call that was made."""
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
            value = await subject.score(self.play, task)
        if value is None:
            raise _Skipped("give `score`, or let the players return the score")
        return float(value)

    async def solver_full(self) -> None:
        if self.solver is None:
            raise _Skipped("give `solver`")
        for task in self.tasks:
            async with self.subject() as subject:
                await subject.reset(task)
                value = await self.scored(subject, task, self.solver)
                if value < self.full - 1e-9:
                    raise _Failed(f"task {task.id}: the solver scores {value:g}, full is {self.full:g}")

    async def nothing_less(self) -> None:
        """The do-nothing policy, or no call at all."""
        values = []
        for task in self.tasks:
            async with self.subject() as subject:
                await subject.reset(task)
                if self.do_nothing is None and self.play.score is None and not hasattr(subject.env, "score"):
                    raise _Skipped("give `do_nothing` or `score`")
                values.append(await self.scored(subject, task, self.do_nothing))
        if max(values) >= self.full:
            raise _Failed(f"doing nothing scores {max(values):g}, which is full")

    async def random_less(self) -> None:
        """On average: a lucky episode may well be full."""
        self.need_actions()
        values = []
        for task in self.tasks:
            for attempt in range(8):
                async with self.subject() as subject:
                    await episode(subject, task, Play(self.play.actions, self.play.score, num_steps=3), self.seed + attempt)
                    score = await subject.score(self.play, task)
                    values.append(0.0 if score is None and self.play.score is None else float(score or 0.0))
        mean = sum(values) / len(values)
        if mean >= self.full:
            raise _Failed(f"three random actions score {mean:g} on average, which is full")

    async def no_free_reward(self) -> None:
        """Probes: straight after reset, after many resets, and after another episode was solved."""
        for task in self.tasks:
            async with self.subject() as subject:
                await subject.reset(task)
                if await subject.score(self.play, task) is None:
                    raise _Skipped("give `score`")
                for probe in ("straight after reset", "after ten resets", "after a solved episode and a reset"):
                    if probe.startswith("after ten"):
                        for _ in range(10):
                            await subject.reset(task)
                    elif probe.startswith("after a"):
                        if self.solver is None:
                            continue
                        await subject.play(self.solver, task)
                        await subject.reset(task)
                    value = await subject.score(self.play, task)
                    if value is not None and value >= self.full:
                        raise _Failed(f"task {task.id}: {probe} the score is {value:g} without any action")

    async def no_growth(self) -> None:
        tracing = tracemalloc.is_tracing()
        if not tracing:
            tracemalloc.start()
        try:
            await self._grow("instances that are made and closed", reuse=False)
            await self._grow("an instance that is reset", reuse=True)
        finally:
            if not tracing:
                tracemalloc.stop()

    async def _grow(self, what: str, reuse: bool) -> None:
        marks: list[tuple[int, int, int]] = []

        async def one(subject: Subject, number: int) -> None:
            await episode(subject, self.tasks[number % len(self.tasks)], self.play, self.seed + number % 4)

        async def rounds(subject: Subject | None) -> None:
            for quarter in range(4):
                for number in range(NUM_EPISODES // 4):
                    if subject is not None:
                        await one(subject, number)
                    else:
                        async with self.subject() as fresh:
                            await one(fresh, number)
                gc.collect()
                if quarter:  # the first is for what is loaded once
                    marks.append((tracemalloc.get_traced_memory()[0], _num_handles(), threading.active_count()))

        if reuse:
            async with self.subject() as subject:
                await rounds(subject)
        else:
            await rounds(None)
        steps = [(later[0] - sooner[0]) / (NUM_EPISODES // 4) for sooner, later in pairwise(marks)]
        if min(steps) > LEAK_BYTES:
            raise _Failed(f"{what} grow by {min(steps) / 1024:.1f} KiB per episode")
        for column, name in ((1, "open files"), (2, "threads")):
            if marks[0][column] < marks[1][column] < marks[2][column]:
                raise _Failed(f"{what}: {name} grow from {marks[0][column]} to {marks[2][column]}")

    async def measure(self) -> None:
        """Figures, not judged."""
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
        raise _Failed(f"{who} differ: {wanted[:80]!s} and {seen[:80]!s}")
    for number, (one, other) in enumerate(zip(wanted, seen, strict=False)):
        if one != other:
            raise _Failed(f"{who} differ at step {number}: {one[:80]} and {other[:80]}")
    raise _Failed(f"{who} differ in length: {len(wanted)} and {len(seen)} steps")


async def _cancel_after(coroutine: Any, turns: int, timeout_s: float) -> None:
    """Start a call, let the loop turn so often, cancel it; it may take its time to clean up, within the deadline."""
    task = asyncio.ensure_future(coroutine)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=timeout_s)
    if not done:
        raise _Failed(f"a cancelled call did not end within {timeout_s:g} s")
    if not task.cancelled():
        task.exception()  # it ended before, or refused: both are fine


def _num_handles() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0
