"""Where an instance lives: `loop` (called directly), `thread` (a thread of its own), and on the other side of a wire
(`remote`): `process` (a worker process), `sandbox`, `container`, `http` (a server).

A `Backend` belongs to one pool and creates `Instance`s. An instance can do the same everywhere: start, be
called, be abandoned in the middle of a call, be closed. A call here has no deadline of its own: the lease puts one around
it. `close` never raises and always ends, within its time.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ...errors import ConfigError, WorldError
from ...tools.deadline import Expired, within
from ...types import Task
from ..spec import Spec
from ..threads import OwnThread

log = logging.getLogger(__name__)


class Instance:
    """One instance in its place. `on_death` is called once, on the loop, when it ends by itself."""

    local = False
    """Whether `env` is here and may be touched directly."""

    def __init__(self, spec: Spec, number: int) -> None:
        self.spec = spec
        self.number = number
        self.env: Any = None
        self.alive = False
        self.why = ""
        self.on_death: Callable[[], None] | None = None

    @property
    def pid(self) -> int | None:
        return None

    async def start(self) -> None:
        raise NotImplementedError

    async def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        raise NotImplementedError

    async def get(self, name: str) -> Any:
        raise NotImplementedError

    async def run(self, function: Callable[[], Any]) -> Any:
        """A function of our own, where the instance lives. Not in a worker process: functions do not travel."""
        raise ConfigError(f"a function cannot be run where {self.spec.name} lives")

    async def reset(self, task: Task) -> Any:
        return await self.call("reset", (task,), {})

    def abandon(self) -> None:
        """A call was given up: from now on it can only be closed."""
        self.alive = False

    async def close(self, timeout_s: float) -> None:
        """End it. What goes wrong is logged."""
        try:
            await within(self._close(), timeout_s)
        except Expired:
            log.warning("closing %s took longer than %g s and was given up", self.spec.name, timeout_s)
        except Exception as error:  # noqa: BLE001 - an environment that cannot be closed must not hold up the others
            log.warning("closing %s failed: %s: %s", self.spec.name, type(error).__name__, error)
        finally:
            self.alive = False

    async def _close(self) -> None:
        raise NotImplementedError

    def memory_mb(self) -> float | None:
        """What its own process takes; None where it shares ours."""
        return None

    def tidy(self) -> None:
        """Called now and then."""


class LoopInstance(Instance):
    local = True

    async def start(self) -> None:
        env = self.spec.make(**self.spec.options)
        self.env = await env if inspect.isawaitable(env) else env
        self.alive = True

    async def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        value = getattr(self.env, name)(*args, **kwargs)
        return await value if inspect.isawaitable(value) else value

    async def get(self, name: str) -> Any:
        return getattr(self.env, name)

    async def run(self, function: Callable[[], Any]) -> Any:
        value = function()
        return await value if inspect.isawaitable(value) else value

    async def reset(self, task: Task) -> Any:
        value = self.env.reset(task)
        return await value if inspect.isawaitable(value) else value

    async def _close(self) -> None:
        if self.env is not None:
            await self.call("close", (), {})


class ThreadInstance(Instance):
    _thread: OwnThread | None = None
    _left = False

    async def start(self) -> None:
        self._thread = OwnThread(f"{self.spec.name}-{self.number}")
        await self._thread.run(self._build)
        self.alive = True

    def _build(self) -> None:
        self.env = self.spec.make(**self.spec.options)  # set in the thread: a start that was given up is still closed

    async def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self._thread is None or self._left:
            raise WorldError(f"{self.spec.name} is closed")
        return await self._thread.run(partial(getattr(self.env, name), *args, **kwargs))

    async def get(self, name: str) -> Any:
        if self._thread is None or self._left:
            raise WorldError(f"{self.spec.name} is closed")
        return await self._thread.run(partial(getattr, self.env, name))

    async def run(self, function: Callable[[], Any]) -> Any:
        if self._thread is None or self._left:
            raise WorldError(f"{self.spec.name} is closed")
        return await self._thread.run(function)

    def abandon(self) -> None:
        self.alive = False
        if self._thread is not None and not self._left:
            self._left = True
            self._thread.leave(self._last_words)

    def _last_words(self) -> Any:
        return None if self.env is None else self.env.close()

    async def close(self, timeout_s: float) -> None:
        until = asyncio.get_running_loop().time() + timeout_s
        if not self._left:
            await super().close(timeout_s)
        self.abandon()  # ends the thread; after a close that went well its last words close a second time, which is allowed
        if self._thread is not None and not await self._thread.join(max(0.05, until - asyncio.get_running_loop().time())):
            log.warning("a call of %s does not return; its thread is left behind", self.spec.name)

    async def _close(self) -> None:
        if self.env is not None and self._thread is not None:
            await self._thread.run(self.env.close)
            self.env = None


class Backend:
    """Makes the instances of one pool."""

    def __init__(self, spec: Spec, kind: type[Instance]) -> None:
        self.spec = spec
        self._kind = kind

    def create(self, number: int) -> Instance:
        return self._kind(self.spec, number)


def _process(spec: Spec) -> Backend:
    from ..rpc.client import ProcessBackend

    return ProcessBackend(spec)


def _sandbox(spec: Spec) -> Backend:
    from .sandbox import SandboxBackend

    return SandboxBackend(spec)


def _container(spec: Spec) -> Backend:
    from .container import ContainerBackend

    return ContainerBackend(spec)


def _http(spec: Spec) -> Backend:
    from .http import HttpBackend

    return HttpBackend(spec)


PLACEMENTS: dict[str, Callable[[Spec], Backend]] = {
    "loop": lambda spec: Backend(spec, LoopInstance),
    "thread": lambda spec: Backend(spec, ThreadInstance),
    "process": _process,
    "sandbox": _sandbox,
    "container": _container,
    "http": _http,
}


def backend_of(spec: Spec) -> Backend:
    try:
        make = PLACEMENTS[spec.placement]
    except KeyError:
        raise ConfigError(
            f"environment {spec.name!r}: unknown placement {spec.placement!r}; known: {', '.join(PLACEMENTS)}"
        ) from None
    return make(spec)
