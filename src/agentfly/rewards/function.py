"""`@reward` makes a reward from a function.

The function asks by parameter name for `prediction` (the final response), `trajectory`, `task`, `env` and the fields of the
data set. A default makes a field optional; `**fields` receives all others. One that asks for `trajectories` is called once per
group, with its scored chains, and returns one reward per chain. Parameters that cannot be filled (`*args`, positional-only
ones, misspelt names) raise ConfigError at decoration. Sync functions run on the event loop, because most take microseconds;
one that blocks needs `@reward(thread=True)` or a `timeout_s`, which runs it in a thread, too.
"""

from __future__ import annotations

import asyncio
import copy
import difflib
import functools
import inspect
import math
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, overload

from .. import plugins
from ..aio.deadline import Expired, within
from ..aio.stalls import stalls
from ..aio.threads import run_in_thread
from ..errors import AgentFlyError, ConfigError, DeadlineError, RewardError, ToolError, WorldError, contained, environment_call
from ..tools.signature import env_parameters
from ..types import Trajectory
from .base import RESERVED, Lend, Reward, Score
from .values import read, read_group

MAX_THREADS = 32
"""Limit of threaded rewards that run at the same time, per event loop."""
DEFAULT_S: Final = float(60)
"""The deadline of async and threaded rewards that name none. It is compared by identity: a given 60.0 is not this default."""
_KIND = inspect.Parameter
_slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


class _RewardFailure(Exception):
    """Internal: an error whose text is completed with the name of the reward and the task."""

    def __init__(self, kind: type[AgentFlyError], text: str) -> None:
        super().__init__(text)
        self.kind = kind


class FunctionReward(Reward):
    """A reward made from a function. Calling it calls the function."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        weight: float = 1.0,
        thread: bool = False,
        timeout_s: float | None = DEFAULT_S,
        needs: Iterable[str] = (),
    ) -> None:
        if not callable(function):
            raise ConfigError(f"a reward is a function, not {type(function).__name__}")
        self.name = name or getattr(function, "__name__", "") or type(function).__name__
        if not isinstance(self.name, str):
            raise ConfigError(f"a reward's name is a string, not {self.name!r}")
        if thread and _is_async(function):
            raise ConfigError(f"reward {self.name!r} is async: thread=True is for functions that block")
        if timeout_s is not None and not timeout_s > 0:
            raise ConfigError(f"reward {self.name!r}: timeout_s must be above 0, not {timeout_s}")
        self.function = function
        self.weight = _weight(weight, self.name)
        self.thread = thread
        self.timeout_s = timeout_s
        self.description = next(iter((inspect.getdoc(function) or "").strip().splitlines()), "")
        self._reserved, self._required, self._optional, self._rest = _parameters(function, self.name)
        self._envs = env_parameters(function)
        self._required = [parameter for parameter in self._required if parameter not in self._envs]
        # A sync function would block the event loop while it waits for an environment in another thread or process.
        # A deadline needs a thread, too: a function on the loop cannot be stopped.
        limited = timeout_s is not None and timeout_s is not DEFAULT_S
        self.thread = thread or ((bool(self._envs) or limited) and not _is_async(function))
        self._extra = frozenset(needs)
        alone = sorted({"prediction", "trajectory", "env"} & set(self._reserved)) + list(self._envs)
        if self.grouped and alone:
            raise ConfigError(
                f"reward {self.name!r} asks for 'trajectories', the chains of a group, and cannot have {alone[0]!r}"
            )
        functools.update_wrapper(self, function, updated=())

    @property
    def needs(self) -> frozenset[str]:
        return frozenset(self._required) | self._extra

    @property
    def envs(self) -> frozenset[type]:
        return frozenset(self._envs.values())

    @property
    def parts(self) -> tuple[Reward, ...]:
        return (self,)

    @property
    def waits(self) -> bool:
        return self.thread or _is_async(self.function)

    @property
    def grouped(self) -> bool:
        return "trajectories" in self._reserved

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def scaled(self, factor: float) -> FunctionReward:
        other = copy.copy(self)
        other.weight = _weight(self.weight * factor, self.name)
        return other

    def named(self, name: str) -> FunctionReward:
        """A copy with another name, so that a mix can contain the reward twice."""
        other = copy.copy(self)
        other.name = name
        return other

    async def score(self, trajectory: Trajectory, env: Any = None, lend: Lend | None = None) -> Score:
        """The weighted score. Its components are those of the function, and the unweighted score under the reward's name."""
        return await self._scored("", trajectory, env, lend)

    async def part_score(self, trajectory: Trajectory, env: Any = None, lend: Lend | None = None) -> Score:
        return await self._scored(f"{self.name}/", trajectory, env, lend)

    async def score_group(self, trajectories: Sequence[Trajectory], *, part: bool = False) -> list[Score]:
        if not self.grouped:
            return await super().score_group(trajectories)
        first = trajectories[0]
        value = await self._value(first, None, None, trajectories)
        raw = read_group(value, self._who(first), [len(trajectory.turns) for trajectory in trajectories])
        return [self._weighted(each, f"{self.name}/" if part else "") for each in raw]

    async def _scored(self, prefix: str, trajectory: Trajectory, env: Any, lend: Lend | None) -> Score:
        if self.grouped:
            return Score(0.0)
        value = await self._value(trajectory, env, lend)
        if type(value) is float and math.isfinite(value):  # fast path: most rewards return a float
            return self._weighted(Score(value), prefix)
        return self._weighted(read(value, self._who(trajectory), len(trajectory.turns)), prefix)

    def _weighted(self, raw: Score, prefix: str) -> Score:
        components = {self.name: raw.reward, **{f"{prefix}{name}": value for name, value in raw.components.items()}}
        turns = None if raw.turn_rewards is None else tuple(self.weight * value for value in raw.turn_rewards)
        return Score(self.weight * raw.reward, components, turns)

    async def _value(self, trajectory: Trajectory, env: Any, lend: Lend | None, trajectories: Sequence[Trajectory] = ()) -> Any:
        """What the function returns. Its task is that of `trajectory`."""
        try:
            arguments = self._arguments(trajectory, env, trajectories)
            for name, kind in self._envs.items():
                if arguments.get(name) is not None:  # the parameter `env` is filled already, by the environment of the agent
                    continue
                if lend is None:
                    raise _RewardFailure(RewardError, f"asks for a {kind.__name__}, but this chain has no environments.")
                arguments[name] = await lend(kind)
            value = self._start(arguments, trajectory)
            if not inspect.isawaitable(value):
                return value
            return await self._finish(value if self.thread else stalls.steps(self._who, trajectory, value))
        except ToolError as error:
            raise RewardError(f"{self._who(trajectory)} raised ToolError: {error}") from error
        except _RewardFailure as error:
            raise error.kind(f"{self._who(trajectory)} {error}") from error.__cause__
        except AgentFlyError:
            raise
        except Exception as error:
            if (call := environment_call(error)) is not None:  # the world failed, not the reward
                raise WorldError(f"{self._who(trajectory)}: {call} raised {type(error).__name__}: {error}") from error
            raise RewardError(f"{self._who(trajectory)} raised {type(error).__name__}: {error}") from error

    def _who(self, trajectory: Trajectory) -> str:
        return f"reward {self.name!r} on task {trajectory.task.id!r}"

    def _arguments(self, trajectory: Trajectory, env: Any, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        task = trajectory.task
        sources = {"prediction": trajectory.prediction, "trajectory": trajectory, "task": task, "env": env}
        if trajectories:
            sources["trajectories"] = list(trajectories)
        arguments = {name: sources[name] for name in self._reserved}
        for name in self._required:
            if name not in task.fields:
                raise _RewardFailure(RewardError, f"needs the field {name!r}, which this row of the data does not have.")
            arguments[name] = task.fields[name]
        for name in self._optional:
            if name in task.fields:
                arguments[name] = task.fields[name]
        if self._rest:
            arguments |= {name: value for name, value in task.fields.items() if name not in arguments}
        return arguments

    def _start(self, arguments: dict[str, Any], trajectory: Trajectory) -> Any:
        if self.thread:
            return _in_thread(self.function, arguments, self.timeout_s)
        try:
            with stalls.watch(self._who, trajectory):
                return self.function(**arguments)
        except BaseException as error:
            raise contained(error) from error

    async def _finish(self, value: Awaitable[Any]) -> Any:
        try:  # the deadline of a thread begins when the thread does
            return await within(value, math.inf if self.timeout_s is None or self.thread else self.timeout_s)
        except Expired as error:
            late = f"took longer than {self.timeout_s:g} s; raise its timeout_s if that is normal."
            raise _RewardFailure(DeadlineError, late) from error

    def __repr__(self) -> str:
        return f"{self.name} * {self.weight:g}" if self.weight != 1 else self.name


@overload
def reward(function: Callable[..., Any], /) -> FunctionReward: ...
@overload
def reward(
    *, name: str | None = None, weight: float = 1.0, thread: bool = False, timeout_s: float | None = DEFAULT_S
) -> Callable[[Callable[..., Any]], FunctionReward]: ...


def reward(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    weight: float = 1.0,
    thread: bool = False,
    timeout_s: float | None = DEFAULT_S,
) -> FunctionReward | Callable[[Callable[..., Any]], FunctionReward]:
    """Makes a reward from a function and registers its name.

    The function may be sync or async and returns a number, a bool, or a dict with `reward`, any named components and, where
    it has them, `turn_rewards` (one per turn); one that asks for `trajectories` returns a list of these. `weight` scales what
    is trained on, not the component that is logged. `thread` runs a blocking function off the event loop. `timeout_s`
    (default: 60) limits async and threaded rewards; given for a sync function it runs that in a thread, too. None is no limit.
    """

    def decorate(function: Callable[..., Any]) -> FunctionReward:
        made = FunctionReward(function, name=name, weight=weight, thread=thread, timeout_s=timeout_s)
        plugins.register("rewards", made.name, made)
        return made

    return decorate if function is None else decorate(function)


def _parameters(function: Callable[..., Any], name: str) -> tuple[list[str], list[str], list[str], bool]:
    """Reserved, required and optional parameter names, and whether `**fields` takes the rest."""
    reserved: list[str] = []
    required: list[str] = []
    optional: list[str] = []
    rest = False
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward {name!r}: its parameters cannot be read ({error}); wrap it in a function") from error
    for parameter in parameters:
        if parameter.kind is _KIND.VAR_POSITIONAL:
            raise ConfigError(f"reward {name!r} takes *{parameter.name}; a reward asks for what it needs by name")
        if parameter.kind is _KIND.POSITIONAL_ONLY:
            raise ConfigError(f"reward {name!r}: {parameter.name!r} is positional-only; remove the '/' from its parameters")
        if parameter.kind is _KIND.VAR_KEYWORD:
            rest = True
        elif parameter.name in RESERVED:
            reserved.append(parameter.name)
        elif parameter.default is not _KIND.empty:
            optional.append(parameter.name)
        elif parameter.name == "self":
            raise ConfigError(f"reward {name!r} is decorated inside a class; pass the bound method, as in reward(thing.{name})")
        elif near := difflib.get_close_matches(parameter.name, RESERVED, n=1, cutoff=0.8):
            raise ConfigError(f"reward {name!r} asks for {parameter.name!r}; did you mean {near[0]!r}?")
        else:
            required.append(parameter.name)
    return reserved, required, optional, rest


async def _in_thread(function: Callable[..., Any], arguments: Mapping[str, Any], timeout_s: float | None) -> Any:
    """Returns `function(**arguments)`, called in a thread. A call past its deadline is abandoned."""

    async with _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_THREADS)):
        call = run_in_thread(functools.partial(function, **arguments))
        return await within(call, math.inf if timeout_s is None else timeout_s)


def _is_async(function: Callable[..., Any]) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__ is async too
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _weight(weight: float, name: str) -> float:
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
        raise ConfigError(f"reward {name!r}: its weight must be a finite number, not {weight!r}")
    return float(weight)
