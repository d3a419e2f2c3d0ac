"""Placements `loop` and `thread`: instances in this process, called directly on the event loop or in one thread each."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ...aio.deadline import GRACE_S
from ...aio.single_task import SingleTask
from ...aio.threads import WorkerThread
from ...errors import WorldError
from ..instance import Backend, Instance
from ..spec import Spec

log = logging.getLogger(__name__)


class HomeInstance(Instance):
    """Async methods run in one task, so that `close` may leave a task group that `reset` entered. See `SingleTask`."""

    def __init__(self, spec: Spec, number: int) -> None:
        super().__init__(spec, number)
        self._task = SingleTask(spec.name, self._close_env, spec.close_timeout_s, self._die)

    def at_home(self, awaitable: Awaitable[Any]) -> Any:
        return self._task.run(awaitable)

    def _call(self, function: Callable[[], Any]) -> Any:
        value = function()
        return self.at_home(value) if inspect.isawaitable(value) else value

    def _die(self, why: str) -> None:
        self.alive, self.why = False, why

    def _close_env(self) -> Any:
        env, self.env = self.env, None
        return None if env is None else env.close()


class LoopInstance(HomeInstance):
    local = True

    async def start(self) -> None:
        self.env = await self.run(partial(self.spec.make, **self.spec.options))
        self.alive = self._task.why is None

    async def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return await self.run(partial(getattr(self.env, name), *args, **kwargs))

    async def get(self, name: str) -> Any:
        return getattr(self.env, name)

    async def run(self, function: Callable[[], Any]) -> Any:
        value = self._call(function)
        return await value if inspect.isawaitable(value) else value

    async def close(self, timeout_s: float) -> None:
        await super().close(timeout_s + GRACE_S)  # a call that was given up may still clean up

    async def _close(self) -> None:
        await self._task.end()

    def _die(self, why: str) -> None:
        super()._die(why)
        if self.on_death is not None:
            self.on_death()


class ThreadInstance(HomeInstance):
    _thread: WorkerThread | None = None

    async def start(self) -> None:
        self._thread = WorkerThread(f"{self.spec.name}-{self.number}")
        await self._thread.run(self._build)
        self.alive = True

    def _build(self) -> None:
        self.env = self.spec.make(**self.spec.options)  # set in the thread, so that a cancelled start is closed, too

    async def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return await self.run(lambda: getattr(self.env, name)(*args, **kwargs))

    async def get(self, name: str) -> Any:
        return await self.run(partial(getattr, self.env, name))

    async def run(self, function: Callable[[], Any]) -> Any:
        if self._thread is None or not self._thread.usable:
            raise WorldError(f"{self.spec.name} is closed")
        return await self._thread.run(partial(self._call, function))

    def abandon(self) -> None:
        self.alive = False
        if self._thread is not None:
            self._thread.abandon(self._finish)

    async def close(self, timeout_s: float) -> None:
        until = asyncio.get_running_loop().time() + timeout_s
        if self._thread is None:
            return
        if self._thread.usable:
            await super().close(timeout_s)
        self.abandon()  # ends the thread
        if not await self._thread.join(max(0.05, until - asyncio.get_running_loop().time())):
            log.warning("a call of %s does not return; its thread is left behind", self.spec.name)

    async def _close(self) -> None:
        if self.env is not None and self._thread is not None:  # otherwise it is being built, and may never be
            await self._thread.run(self._finish)

    def _finish(self) -> Any:
        return self._task.end() if self._task.started else self._close_env()  # a thread without async calls has no event loop


class LoopBackend(Backend):
    instance_class = LoopInstance


class ThreadBackend(Backend):
    instance_class = ThreadInstance
