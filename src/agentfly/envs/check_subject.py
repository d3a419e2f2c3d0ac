"""An environment under examination: calls with deadlines, and results as comparable text.

Only `check` uses it. An environment whose `reset` is async runs in the event loop; any other runs in a separate thread, so that
a call that hangs is detected. `Play` says how to act and how to read the score.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..aio.deadline import Expired, within
from ..errors import ConfigError, DeadlineError, ForeignExit
from ..resources.backends.thread import LoopInstance, ThreadInstance
from ..resources.instance import Instance
from ..resources.spec import Spec
from ..types import Task, ToolResult
from .check_effects import Stopwatch, TimedCoroutine
from .check_report import Failed

EnvCall = tuple[str, dict[str, Any]]
"""A method's name and its arguments."""


SHORT_S = 0.05


@dataclass(slots=True)
class Play:
    """How to act and score. `actions` is a list of calls, or a function of (rng, observation) or (rng, observation, env) that
    returns the next call; a call is (method, {arguments}), and anything else is an action for `step`."""

    actions: Sequence[Any] | Callable[..., Any] | None
    score: Callable[[Any, Task], Any] | None
    num_steps: int = 12

    @property
    def asks_env(self) -> bool:
        return callable(self.actions) and len(inspect.signature(self.actions).parameters) > 2


@dataclass(frozen=True, slots=True)
class Told:
    """A call, its result, and whether the result says that the episode is over."""

    call: EnvCall
    value: Any
    done: bool


class Subject:
    """One instance, called within deadlines."""

    def __init__(self, spec: Spec, timeout_s: float, number: int, watch: Stopwatch | None = None) -> None:
        self.in_loop = inspect.iscoroutinefunction(getattr(spec.cls, "reset", None))
        self.instance: Instance = LoopInstance(spec, number) if self.in_loop else ThreadInstance(spec, number)
        self.watch = watch
        self.before = set(threading.enumerate())
        self.timeout_s = timeout_s
        self.hung = ""
        """The call that did not return in time."""
        self.resets: list[float] = []
        """Seconds of each reset."""
        self.calls: list[Told] = []
        """The calls since the reset, for `play`."""
        self.done = False
        self.rewards = 0.0
        self.last: EnvCall | None = None

    async def start(self) -> Subject:
        await self._within(self.instance.start(), "starting")
        return self

    @property
    def env(self) -> Any:
        return self.instance.env

    @property
    def lives(self) -> bool:
        """Whether the thread of the instance is still running."""
        return any(thread.name.endswith(f"-{self.instance.number}") for thread in set(threading.enumerate()) - self.before)

    async def choose(self, play: Play, rng: random.Random, observation: object) -> EnvCall:
        """The next call of a random player."""
        actions = play.actions
        assert actions is not None
        if not callable(actions):
            chosen = rng.choice(actions)
        elif play.asks_env:
            chosen = await self.run(lambda env: actions(rng, observation, env), self.env)
        else:
            chosen = actions(rng, observation)
        if isinstance(chosen, tuple) and len(chosen) == 2 and isinstance(chosen[0], str) and isinstance(chosen[1], dict):
            return chosen
        return "step", {"action": chosen}

    async def attempt(self, call: EnvCall) -> Any:
        """The result of a call, or the text of its exception. A missed deadline and an exit of the program are raised."""
        try:
            return await self.act(call)
        except (DeadlineError, ConfigError):
            raise
        except ForeignExit as error:
            raise Failed(f"{call[0]} ends with {error}: raise ToolError for what the model did wrong") from error
        except Exception as error:  # noqa: BLE001 - what an environment raises is what a chain would see
            return f"{type(error).__name__}: {error}"

    async def reset(self, task: Task) -> Any:
        self.done, self.rewards, self.last = False, 0.0, None
        self.calls.clear()
        started = time.perf_counter()
        observation = await self._within(self._called("reset", (task,), {}), "reset")
        self.resets.append(time.perf_counter() - started)
        return observation

    async def act(self, call: EnvCall) -> Any:
        """The result of a call, whose rewards and end are noted."""
        self.last = call
        value = await self.call(*call)
        self.note(value, call)
        return value

    async def call(self, method: str, arguments: dict[str, Any]) -> Any:
        function = getattr(self.env, method, None)
        if not callable(function):
            raise ConfigError(f"the environment has no method {method!r}: see `actions`")
        return await self._within(self._called(method, (), arguments), method)

    def _called(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        watch = self.watch
        if watch is None:
            return self.instance.call(method, args, kwargs)

        def timed() -> Any:
            value = watch.timed(method, partial(getattr(self.env, method), *args, **kwargs))
            return _await(TimedCoroutine(watch, method, value)) if inspect.iscoroutine(value) else value

        return self.instance.run(timed)

    async def run(self, function: Callable[..., Any], env: object, *args: object) -> Any:
        """Run a user's function on the environment, in its loop or thread, with ten times the deadline."""
        return await self._within(
            self.instance.run(partial(function, env, *args)), getattr(function, "__name__", "function"), 10
        )

    async def play(self, player: Callable[[Any, Task], Any], task: Task) -> Any:
        """Let a player act. Its calls are noted like those of `act`."""
        value = await self.run(player, _Recorder(self), task)
        self.done |= _plain(getattr(self.env, "done", False)) is True
        return value

    def note(self, value: object, call: EnvCall) -> None:
        """Note the reward in a result, and whether the episode is over."""
        reward, done = told(value)
        self.calls.append(Told(call, value, done))
        self.done |= done or _plain(getattr(self.env, "done", False)) is True
        self.rewards += reward

    async def score(self, play: Play, task: Task) -> float | None:
        """The current score, or None if there is no way to read one."""
        if play.score is not None:
            value = await self.run(play.score, self.env, task)
        else:
            value = getattr(self.env, "score", None)
            if callable(value):
                value = await self.call("score", {})
        if value is None:
            return self.rewards if self.rewards else None
        if isinstance(value, str | bytes):
            raise Failed(f"the score is text, {value!r:.40}: return a number")
        return float(value)

    async def give_up(self, call: EnvCall) -> None:
        """Start a call in the thread of the instance, cancel it once it runs, and end the instance."""
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()

        def work() -> Any:
            loop.call_soon_threadsafe(begun.set)
            return getattr(self.env, call[0])(**call[1])

        calling, beginning = asyncio.ensure_future(self.instance.run(work)), asyncio.ensure_future(begun.wait())
        await asyncio.wait([calling, beginning], timeout=self.timeout_s, return_when=asyncio.FIRST_COMPLETED)
        beginning.cancel()
        calling.cancel()
        await asyncio.wait([calling, beginning])
        if not calling.cancelled():
            calling.exception()  # the call ended first; its exception is retrieved so that asyncio does not log it
        self.instance.abandon()
        await self.discard()

    async def close(self) -> None:
        await self._within(self.instance.call("close", (), {}), "close")

    async def discard(self) -> None:
        """End the instance in any state. After a call that hangs it is given no more time."""
        started = time.monotonic()
        await self.instance.close(SHORT_S if self.hung else self.timeout_s)
        if not self.hung and time.monotonic() - started >= self.timeout_s:
            self.hung = "close"

    async def _within(self, coroutine: Coroutine[Any, Any, Any], what: str, times: float = 1) -> Any:
        try:
            return await within(coroutine, self.timeout_s * times)
        except Expired:
            self.instance.abandon()
            self.hung = self.hung or what
            raise DeadlineError(f"{what} did not return within {self.timeout_s * times:g} s") from None


class _Recorder:
    """The environment as a player sees it; the subject notes every call."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._subject.env, name)
        if not callable(value):
            return value

        def call(*args: object, **kwargs: object) -> Any:
            names = list(inspect.signature(value).parameters)
            made = (name, {**dict(zip(names, args, strict=False)), **kwargs})
            self._subject.last = made
            result = value(*args, **kwargs)
            if inspect.isawaitable(result):
                return self._wait(result, made)
            self._subject.note(result, made)
            return result

        return call

    async def _wait(self, result: Any, made: EnvCall) -> Any:
        value = await result
        self._subject.note(value, made)
        return value


async def _await(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def told(value: object) -> tuple[float, bool]:
    """The reward in a result, and whether it ends the episode. Reads a ToolResult, a tuple as Gymnasium's `step` returns it
    (observation, reward, done or terminated, truncated), a dict, or an object with these attributes.
    """
    if isinstance(value, tuple):
        _, reward, *ends = map(_plain, value[:4]) if len(value) > 2 else (None, None)
        if not isinstance(reward, int | float):
            return 0.0, False
        return float(reward), any(end is True for end in ends)
    fields = value if isinstance(value, dict) else {name: getattr(value, name, None) for name in _TOLD}
    reward, *ends = (_plain(fields.get(name)) for name in _TOLD)
    paid = float(reward) if isinstance(reward, int | float) and not isinstance(reward, bool) else 0.0
    return paid, any(end is True for end in ends)


def _plain(value: Any) -> Any:
    """A number or truth value of NumPy as Python's."""
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () else value


def refused(value: object) -> bool:
    """Whether a result says that the call was refused."""
    error = value.get("error") if isinstance(value, dict) else getattr(value, "error", None)
    return error is not None and error is not False


_TOLD = ("reward", "done", "terminated", "truncated")


def tells_done(value: object) -> bool:
    """Whether results of this form say if the episode is over."""
    if isinstance(value, dict):
        return any(name in value for name in _TOLD[1:])
    return isinstance(value, ToolResult) or (
        isinstance(value, tuple) and len(value) >= 3 and isinstance(_plain(value[2]), bool)
    )


def text(value: object) -> str:
    """A value as comparable text, without addresses of objects."""
    if isinstance(value, ToolResult):
        value = [value.observation, value.reward, value.done, value.error]
    try:
        return json.dumps(value, sort_keys=True, default=_simple)
    except (TypeError, ValueError, RecursionError):
        return f"a {type(value).__name__}"


def _simple(value: object) -> Any:
    fields = getattr(value, "__dict__", None)
    return [type(value).__name__, fields] if fields else type(value).__name__


async def episode(subject: Subject, task: Task, play: Play, seed: int) -> list[str]:
    """Reset and act at random. Returns all observations as text; only the first if there are no actions."""
    steps = steps_of(subject, task, play, seed)
    return [line async for line in steps]


async def steps_of(subject: Subject, task: Task, play: Play, seed: int) -> Any:
    rng = random.Random(seed)
    observation = await subject.reset(task)
    yield text(observation)
    for _ in range(play.num_steps if play.actions is not None else 0):
        call = await subject.choose(play, rng, observation)
        observation = await subject.attempt(call)
        yield text([call, text(observation)])
        if subject.done:
            break
    score = await subject.score(play, task)
    yield text(["score", score])


async def cancel_after(coroutine: Coroutine[Any, Any, Any], turns: int, timeout_s: float) -> None:
    """Start a call, let the event loop run `turns` times, then cancel it. The call may clean up within the deadline."""
    task = asyncio.ensure_future(coroutine)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=timeout_s)
    if not done:
        raise Failed(f"a cancelled call did not end within {timeout_s:g} s")
    if not task.cancelled():
        task.exception()  # retrieved, so that asyncio does not log it
