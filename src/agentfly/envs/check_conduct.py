"""Checks of whole episodes: the goal of an environment, its scores, its end, and its effects on the process."""

from __future__ import annotations

import asyncio
import inspect
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, chdir
from dataclasses import replace
from itertools import pairwise
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from ..codec import NotEncodable
from ..errors import ConfigError
from ..resources.manager import ResourceManager
from ..resources.rpc.frames import FrameReader, pack_value
from ..resources.spec import Spec, importable
from ..types import Task
from . import check_effects
from .check_report import Failed, Skipped
from .check_subject import EnvCall, Play, Subject, episode, refused, steps_of, tells_done, text

STALL_S = 0.1
"""A call that holds up the event loop for longer is a fault: all other chains wait meanwhile."""
REPEATS = 4
SLOW_S = 1.0
"""Episodes that take longer are repeated less often."""
LONG, GROWN = 100_000, 2_000
"""Characters of an observation that no context takes, and from which one that grows with every step is a fault."""
THINK_S = 1.1
"""A model's reply takes time; an environment must not depend on it, nor on the second of the clock."""


class Examination(Protocol):
    """What the checks use of the examination."""

    spec: Spec
    tasks: list[Task]
    play: Play
    full: float
    seed: int
    before: dict[str, Any]
    rows: list[str]
    solver: Callable[[Any, Task], Any] | None

    def subject(self, watch: check_effects.Stopwatch | None = None) -> AbstractAsyncContextManager[Subject]: ...

    async def read_score(self, subject: Subject, task: Task) -> float | None: ...

    async def scored(self, subject: Subject, task: Task, player: Callable[[Any, Task], Any] | None) -> float: ...


def fields_of(tasks: Sequence[Task]) -> list[str]:
    """The fields of each task, as text."""
    return [text(dict(task.fields)) for task in tasks]


async def readable(exam: Examination) -> None:
    """Each observation stays in the chain's context."""
    for task in exam.tasks:
        async with exam.subject() as subject:
            lengths = [len(line) for line in await episode(subject, task, exam.play, exam.seed)][:-1]
        if max(lengths) > LONG:
            raise Failed(f"task {task.id}: an observation has {max(lengths):,} characters")
        grows = len(lengths) >= 8 and all(one < other for one, other in pairwise(lengths[1:]))
        if grows and lengths[-1] > max(GROWN, 4 * lengths[1]):
            raise Failed(
                f"task {task.id}: observations grow with every step, from {lengths[1]:,} to {lengths[-1]:,} characters: the "
                "context keeps them all, so return what is new"
            )


async def solve(exam: Examination, subject: Subject, task: Task) -> list[str]:
    """The solver's calls with their results, and its score, as text."""
    assert exam.solver is not None
    await subject.reset(task)
    await subject.play(exam.solver, task)
    lines = [text([*each.call, text(each.value)]) for each in subject.calls]
    return [*lines, text(["score", await exam.read_score(subject, task)])]


async def same_solution(exam: Examination) -> None:
    """A goal that is drawn anew shows in what the solver has to do, even if a random player hardly ever meets it."""
    if exam.solver is None:
        raise Skipped("give `solver`")
    for task in exam.tasks:
        started = time.monotonic()
        seen: list[list[str]] = []
        for _ in range(2):
            async with exam.subject() as subject:
                for _ in range(REPEATS):
                    seen.append(await solve(exam, subject, task))
                    if len(seen) > 1 and time.monotonic() - started > SLOW_S:
                        break
        for lines in seen[1:]:
            for one, other in zip([*seen[0], "the end"], [*lines, "the end"], strict=False):
                if one != other:
                    raise Failed(f"task {task.id}: two plays of the solver differ: {one[:80]} and {other[:80]}")


async def tasks_differ(exam: Examination) -> str | None:
    """Two tasks must not be the same game: neither to a random player nor to the solver."""
    if len(exam.tasks) < 2:
        raise Skipped("give two or more `tasks`")
    rows = {repr((task.messages, dict(task.fields))) for task in exam.tasks}
    if len(rows) == 1:
        raise Failed("all tasks have the same fields")
    played, after = set(), set()
    for task in exam.tasks:
        async with exam.subject() as subject:
            plays = [await episode(subject, task, exam.play, exam.seed + number) for number in range(3)]
            plays.append(await solve(exam, subject, task) if exam.solver is not None else [])
        played.add(text(plays))
        after.add(text([*(lines[1:] for lines in plays[:3]), plays[3]]))
    if len(played) > 1:
        return "only the first observation differs" if len(after) == 1 and exam.play.actions is not None else None
    if exam.play.actions is None or exam.solver is None:
        raise Skipped("tasks look alike; give `actions` and `solver`")
    raise Failed("all tasks look and play alike, also for the solver: `reset` does not use the task")


async def bounded(exam: Examination) -> None:
    """Reads the scores of all kinds of players."""
    has_score = False
    for task in exam.tasks:
        values: list[tuple[str, float]] = []
        async with exam.subject() as subject:
            for number in range(REPEATS):
                await episode(subject, task, exam.play, exam.seed + number)
                once, again = await exam.read_score(subject, task), await exam.read_score(subject, task)
                if text(once) != text(again):
                    raise Failed(f"task {task.id}: the score is {once:g} and then {again:g}, without a call between")
                values.append(("random actions", once or 0.0))
                values.append(("the rewards of random actions", subject.rewards))
            if exam.solver is not None:
                await subject.reset(task)
                has_score = True
                values.append(("the solver", await exam.scored(subject, task, exam.solver)))
                values.append(("the rewards of the solver", subject.rewards))
            has_score = has_score or await exam.read_score(subject, task) is not None
        for who, value in values:
            if not math.isfinite(value):
                raise Failed(f"task {task.id}: the score of {who} is {value}")
            if "rewards" not in who and value > exam.full + 1e-9:
                raise Failed(f"task {task.id}: the score of {who} is {value:g}, more than full ({exam.full:g})")
    if not has_score:
        raise Skipped("give `score`")


async def tells_end(exam: Examination) -> str | None:
    """The solver's last move, and no other, ends the episode."""
    if exam.solver is None:
        raise Skipped("give `solver`")
    ends = False
    for task in exam.tasks:
        async with exam.subject() as subject:
            moves = {call[0] for call in await _random_calls(exam, subject, task)}
            await subject.reset(task)
            await subject.play(exam.solver, task)
            calls = [each for each in subject.calls if not moves or each.call[0] in moves]
            score, rewards = await exam.read_score(subject, task), subject.rewards
            env = subject.env
            is_over = getattr(env, "done", None) is True
            keeps = isinstance(getattr(env, "done", None), bool) or hasattr(env, "score") or bool(rewards)
        first = next((number for number, each in enumerate(calls) if each.done), None)
        if first is not None and any(not refused(each.value) for each in calls[first + 1 :]):
            raise Failed(f"task {task.id}: call {first + 1} of the solver's {len(calls)} says that the episode is over")
        if first is None and calls and score is not None and score >= exam.full - 1e-9:
            last = calls[-1]
            if is_over and tells_done(last.value):
                raise Failed(f"task {task.id}: the attribute `done` is True, and the result of {last.call[0]} says done=False")
            if keeps and not is_over:
                raise Failed(f"task {task.id}: the score is full, and no call says that the episode is over")
        ends = ends or first is not None or is_over
    return None if ends else "no call of the solver ends it: the chain's answer does"


async def _random_calls(exam: Examination, subject: Subject, task: Task) -> list[EnvCall]:
    calls: list[EnvCall] = []
    for number in range(3):
        await episode(subject, task, exam.play, exam.seed + number)
        calls += [each.call for each in subject.calls] + ([subject.last] if subject.last is not None else [])
    return calls


async def responsive(exam: Examination) -> str | None:
    """Measures how long calls hold up their thread, and takes the best of several plays: the first one loads what it needs."""
    if exam.spec.placement != "loop":
        return f"its placement is {exam.spec.placement!r}"
    best: dict[str, float] = {}
    for number in range(REPEATS):
        watch = check_effects.Stopwatch()
        async with exam.subject(watch) as subject:
            for task in exam.tasks:
                await episode(subject, task, exam.play, exam.seed)
        for name, seconds in watch.longest.items():
            best[name] = seconds if not number else min(best.get(name, math.inf), seconds)
    slow = {name: seconds for name, seconds in best.items() if seconds > STALL_S}
    if slow:
        name = max(slow, key=lambda each: slow[each])
        raise Failed(
            f"{name} holds up the event loop for {slow[name]:.2f} s, in which no other chain goes on: await, do not block, "
            "or declare placement = 'thread' or 'process'"
        )
    return None


async def leaves_no_mark(exam: Examination) -> None:
    """Plays from the settings with which the examination began, as the first call may have changed them already."""
    rng = check_effects.GlobalRandom()
    states: list[dict[str, str]] = []
    output = ""
    try:
        with check_effects.printed() as said, check_effects.forgotten() as coroutines:
            for seed in (1, 2):
                check_effects.restore(exam.before)
                rng.seed(seed)
                async with exam.subject() as subject:
                    for task in exam.tasks:
                        await episode(subject, task, exam.play, exam.seed)
                states.append(rng.states())
                changes = check_effects.changed(exam.before, check_effects.settings())
                if changes:
                    raise Failed(f"an episode changes {', '.join(changes)} of the whole process")
            output = said()
    finally:
        rng.restore()
        check_effects.restore(exam.before)
    for task, was, now in zip(exam.tasks, exam.rows, fields_of(exam.tasks), strict=True):
        if was != now:
            raise Failed(f"it changes the fields of task {task.id}, which the chains of a group and the reward share")
    if coroutines:
        raise Failed(f"it calls {coroutines[0]} without `await`, so that it never runs")
    if output:
        raise Failed(f"it prints to stdout: {output[:80]!r}")
    if seeded := [name for name, state in states[0].items() if state == states[1].get(name)]:
        raise Failed(f"it seeds the global generator of {seeded[0]}: give the instance a random.Random(seed)")


async def names_states(exam: Examination) -> str | None:
    """The names of states are texts, the same in every instance, and reading one changes nothing."""
    for task in exam.tasks:
        plain: list[list[str]] = []
        named: list[list[str]] = []
        for _ in range(2):
            async with exam.subject() as subject:
                if not callable(getattr(subject.env, "state_key", None)):
                    return "it has no `state_key`"
                plain.append(await episode(subject, task, exam.play, exam.seed))
            async with exam.subject() as subject:
                lines, keys = [], list[str]()
                async for line in steps_of(subject, task, exam.play, exam.seed):
                    lines.append(line)
                    keys.append(await _state_key(subject, task))
            named.append(keys)
            if lines != plain[-1]:
                raise Failed(f"task {task.id}: calls return something else after `state_key` was read")
        if named[0] != named[1]:
            one, other = next(pair for pair in zip(*named, strict=True) if pair[0] != pair[1])
            raise Failed(f"task {task.id}: two instances call one state {one!r:.60} and {other!r:.60}")
    return None if exam.play.actions is not None else "of the first observation alone; give `actions`"


async def _state_key(subject: Subject, task: Task) -> str:
    once, again = await subject.call("state_key", {}), await subject.call("state_key", {})
    if not isinstance(once, str):
        raise Failed(f"task {task.id}: state_key returns {type(once).__name__}: return a text, such as a digest of the state")
    if once != again:
        raise Failed(f"task {task.id}: state_key is {once!r:.60} and then {again!r:.60}, without a call between")
    return once


async def in_worker(exam: Examination) -> str | None:
    """Plays random episodes, and the solver's calls, in a fresh worker process."""
    episodes = []
    for task in exam.tasks[:2]:
        async with exam.subject() as subject:
            plans: list[Sequence[EnvCall]] = []
            await episode(subject, task, exam.play, exam.seed)
            plans.append([each.call for each in subject.calls])
            if exam.solver is not None:
                await subject.reset(task)
                await subject.play(exam.solver, task)
                plans.append([each.call for each in subject.calls if each.call[0] != "reset"])
            episodes += [await recorded(subject, task, plan) for plan in plans]
    why = await replay(exam.spec, episodes)
    return why if why is not None or exam.play.actions is not None else "by the first observation alone; give `actions`"


Episode = tuple[Task, list[tuple[EnvCall, Any]]]
"""A task, and its calls with what each has returned, or with an exception."""


def travels(value: object, what: str) -> str:
    """The value as text, as it arrives at the other end. An exception is one word: its text may name another place."""
    if isinstance(value, BaseException):
        return "raised"
    try:
        return text(FrameReader().replies(pack_value(1, value))[0].value)
    except NotEncodable as error:
        raise Failed(f"{what} cannot travel to or from a worker process: {error}") from None


async def replay(spec: Spec, episodes: Sequence[Episode]) -> str | None:
    """Play episodes again in a worker process. Returns why that was not possible, if it was not."""
    wanted = [[travels(value, f"the result of {call[0]}") for call, value in calls] for _, calls in episodes]
    for _, calls in episodes:
        for (method, arguments), _ in calls:
            travels(arguments, f"an argument of {method}")
    if getattr(inspect.getmodule(spec.make), "__name__", "__main__") == "__main__":
        return "by the encoding of calls and results; put it into a module to try a worker process"
    elsewhere = replace(spec, placement="process", place={}, per_process=1, max=1, max_growth_mb=None)
    try:
        importable(elsewhere)
    except ConfigError as error:
        return f"by the encoding of calls and results: {error}"
    async with AsyncExitStack() as stack:
        if "" not in sys.path:  # in which imports would follow the folder
            stack.enter_context(chdir(stack.enter_context(TemporaryDirectory())))
        manager = await stack.enter_async_context(ResourceManager(None, elsewhere))
        for (task, calls), texts in zip(episodes, wanted, strict=True):
            async with manager.lease([elsewhere.name], task) as lease:
                for number, ((call, _), expected) in enumerate(zip(calls, texts, strict=True)):
                    if number == 1 and task is episodes[0][0]:
                        await asyncio.sleep(THINK_S)
                    seen = lease.observation(elsewhere.name) if call[0] == "reset" else await _call(lease, elsewhere.name, call)
                    if travels(seen, f"the result of {call[0]}") != expected:
                        raise Failed(
                            f"task {task.id}: {call[0]} (call {number}) returns {text(seen)[:80]} in a fresh worker process "
                            f"and {expected[:80]} here, so it depends on the process, its folder or the clock"
                        )
    return None


async def _call(lease: Any, name: str, call: EnvCall) -> Any:
    try:
        return await lease.call(name, call[0], **call[1])
    except TypeError as error:
        if "cannot travel" in str(error):
            raise Failed(str(error)) from None
        return error
    except Exception as error:  # noqa: BLE001 - what an environment raises is compared
        return error


async def recorded(subject: Subject, task: Task, calls: Sequence[EnvCall]) -> Episode:
    """Reset and make these calls."""
    made: list[tuple[EnvCall, Any]] = [(("reset", {}), await subject.reset(task))]
    for call in calls:
        try:
            made.append((call, await subject.act(call)))
        except Exception as error:  # noqa: BLE001 - what an environment raises is compared
            made.append((call, error))
    return task, made
