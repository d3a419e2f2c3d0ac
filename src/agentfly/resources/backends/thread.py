"""Placements `loop` and `thread`: instances in this process, called directly on the event loop or in one thread each."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ...aio.threads import WorkerThread
from ...errors import WorldError
from .base import Backend, Instance

log = logging.getLogger(__name__)


class LoopInstance(Instance):
    local = True

    async def start(self) -> None:
        self.env = await self.run(partial(self.spec.make, **self.spec.options))
        self.alive = True

    async def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return await self.run(partial(getattr(self.env, name), *args, **kwargs))

    async def get(self, name: str) -> Any:
        return getattr(self.env, name)

    async def run(self, function: Callable[[], Any]) -> Any:
        value = function()
        return await value if inspect.isawaitable(value) else value

    async def _close(self) -> None:
        if self.env is not None:
            await self.call("close", (), {})


class ThreadInstance(Instance):
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
        return await self._thread.run(function)

    def abandon(self) -> None:
        self.alive = False
        if self._thread is not None:
            self._thread.abandon(self._close_env)

    def _close_env(self) -> Any:
        return None if self.env is None else self.env.close()

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
        if self.env is not None:  # otherwise it is being built, and may never be
            await self.run(self._close_env)
            self.env = None


class LoopBackend(Backend):
    instance_class = LoopInstance


class ThreadBackend(Backend):
    instance_class = ThreadInstance
