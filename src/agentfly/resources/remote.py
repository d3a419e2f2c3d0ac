"""Environments in worker processes: calls in, frames over a socket, answers out.

A `Worker` is one process with one or more instances. When it dies, every call that waits on it fails with a `WorldError`
that says how, and its instances report their death; nothing else is touched. A call that is given up kills the process when
the instance is alone in it. Where several share a process the instance is dropped, the process takes no new ones, and it is
killed when the last has left.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ..errors import DeadlineError, WorldError
from .env import Spec, importable
from .host import DROP, GET, NEW
from .nursery import NURSERY, Born
from .placements import Home, Placed
from .wire import BadFrame, Frames, pack, pack_argument, unpack_error, unpack_value

PAGE_MB = os.sysconf("SC_PAGE_SIZE") / (1 << 20) if hasattr(os, "sysconf") else 0.0


class Worker(asyncio.Protocol):
    """Our side of one process. `ready` is done when it answers, `gone` when it is dead and reaped."""

    def __init__(self, spec: Spec) -> None:
        loop = asyncio.get_running_loop()
        self.spec = spec
        self.alive = True
        self.tainted = False
        self.why = ""
        self.instances: dict[int, RemotePlaced] = {}
        self.ready: asyncio.Future[None] = loop.create_future()
        self.gone: asyncio.Future[None] = loop.create_future()
        self.born: Born | None = None
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._count = 0
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._burial: asyncio.Task[None] | None = None

    async def start(self, number: int) -> None:
        target, options = importable(self.spec)
        try:
            self.born = born = await NURSERY.spawn(number, self.spec.pass_env)
            answered: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
            self._calls[0] = answered  # the host's first frame
            transport, _ = await asyncio.get_running_loop().create_connection(lambda: self, sock=born.channel)
            self._transport = transport
            hello = {"path": sys.path, "target": target, "options": options, "per_process": self.spec.per_process}
            transport.write(pack(hello))
            await answered
        except BaseException as error:
            self.die(f"its worker process did not start: {error}")
            raise
        if not self.ready.done():
            self.ready.set_result(None)

    @property
    def pid(self) -> int | None:
        return self.born.popen.pid if self.born is not None and self.alive else None

    async def call(self, instance: int, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if not self.alive or self._transport is None:
            raise WorldError(self.why or f"{self.spec.name}: its worker process is gone")
        self._count += 1
        call_id = self._count
        message: dict[str, Any] = {"id": call_id, "i": instance, "m": method}
        try:
            if args:
                message["a"] = [pack_argument(value) for value in args]
            if kwargs:
                message["k"] = {name: pack_argument(value) for name, value in kwargs.items()}
            data = pack(message)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"an argument of {self.spec.name}.{method} cannot travel to its worker process: {error}") from None
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        self._transport.write(data)
        try:
            answer = await future
        finally:
            self._calls.pop(call_id, None)
        if "e" in answer:
            raise unpack_error(answer["e"])
        return unpack_value(answer)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                future = self._calls.get(message.get("id", -1))
                if future is not None and not future.done():
                    future.set_result(message)
        except BadFrame as error:
            self.die(f"{self.spec.name}: its worker process sent something that is not a frame ({error}) and was killed")

    def connection_lost(self, error: Exception | None) -> None:
        self.die("")

    def die(self, why: str) -> None:
        """It is over: kill, reap, then tell everyone. Without a reason the process itself is asked for one."""
        if not self.alive:
            return
        self.alive, self.why = False, why
        self._burial = asyncio.get_running_loop().create_task(self._bury())

    async def _bury(self) -> None:
        if self.born is not None:
            tail = self.born.tail()
            if self._transport is not None:
                self._transport.abort()
            await NURSERY.bury(self.born)
            if not self.why:
                said = f"; it said: {tail}" if tail else ""
                self.why = f"{self.spec.name}: its worker process ended ({_how(self.born.popen.returncode)}){said}"
        for future in list(self._calls.values()):
            if not future.done():
                future.set_exception(WorldError(self.why))
                future.exception()  # whoever waited may have been cancelled
        if not self.ready.done():
            self.ready.set_exception(WorldError(self.why))
            self.ready.exception()
        self.gone.set_result(None)
        for placed in list(self.instances.values()):
            placed.died(self.why)

    def leave(self, number: int) -> None:
        """An instance is closed; the last one takes the process with it."""
        self.instances.pop(number, None)
        if not self.instances:
            self.die(f"{self.spec.name} is closed")


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"exit code {code}"


class RemotePlaced(Placed):
    def __init__(self, home: ProcessHome, number: int) -> None:
        super().__init__(home.spec, number)
        self._home = home
        self._worker: Worker | None = None

    @property
    def pid(self) -> int | None:
        return self._worker.pid if self._worker is not None else None

    async def start(self) -> None:
        worker = self._worker = self._home.room(self)
        if len(worker.instances) == 1:
            await worker.start(self.number)
        else:
            await asyncio.shield(worker.ready)
        await worker.call(self.number, NEW)
        self.alive = True

    async def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self._worker is None or name[:1] == "@":
            raise WorldError(f"{self.spec.name} has not been started")
        return await self._worker.call(self.number, name, args, kwargs)

    async def get(self, name: str) -> Any:
        if self._worker is None:
            raise WorldError(f"{self.spec.name} has not been started")
        return await self._worker.call(self.number, GET, (name,))

    def died(self, why: str) -> None:
        if self.alive:
            self.alive, self.why = False, why
            if self.on_death is not None:
                self.on_death()

    def abandon(self) -> None:
        worker = self._worker
        if not self.alive or worker is None:
            return
        self.alive = False
        if self.spec.per_process == 1:
            worker.die(f"{self.spec.name}: a call was given up and its worker process was killed")
        else:
            worker.tainted = True  # its thread may hang in there for ever

    async def close(self, timeout_s: float) -> None:
        worker = self._worker
        if worker is None:
            return
        if self.alive:
            await super().close(timeout_s)
        elif worker.alive and self.spec.per_process > 1 and self.number in worker.instances:
            self._home.spawn_task(worker.call(self.number, DROP), timeout_s)
        worker.leave(self.number)
        if not worker.alive:
            await asyncio.shield(worker.gone)  # killed already; reaping has a deadline of its own

    async def _close(self) -> None:
        assert self._worker is not None
        await self._worker.call(self.number, "close")
        if self.spec.per_process > 1:
            await self._worker.call(self.number, DROP)  # ends its thread in there

    def memory_mb(self) -> float | None:
        pid = self.pid
        if pid is None:
            return None
        try:
            with open(f"/proc/{pid}/statm", "rb") as file:
                return int(file.read().split()[1]) * PAGE_MB
        except (OSError, IndexError, ValueError):
            return None

    def tidy(self) -> None:
        if self._worker is not None and self._worker.born is not None and self._worker.alive:
            self._worker.born.tidy()


class ProcessHome(Home):
    """The workers of one pool."""

    def __init__(self, spec: Spec) -> None:
        importable(spec)  # what no worker could import is refused before anything starts
        super().__init__(spec, Placed)
        self._workers: list[Worker] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    def place(self, number: int) -> Placed:
        return RemotePlaced(self, number)

    def room(self, placed: RemotePlaced) -> Worker:
        """A worker with room for one more, made if need be."""
        limit = self.spec.per_process
        self._workers = [worker for worker in self._workers if worker.alive]
        roomy = (worker for worker in self._workers if not worker.tainted and len(worker.instances) < limit)
        worker = next(roomy, None)
        if worker is None:
            worker = Worker(self.spec)
            self._workers.append(worker)
        worker.instances[placed.number] = placed
        return worker

    def spawn_task(self, coroutine: Any, timeout_s: float) -> None:
        task = asyncio.get_running_loop().create_task(_quietly(coroutine, timeout_s))
        self._tasks.add(task)
        task.add_done_callback(partial(_forget, self._tasks))


def _forget(tasks: set[asyncio.Task[Any]], task: asyncio.Task[Any]) -> None:
    tasks.discard(task)


async def _quietly(coroutine: Any, timeout_s: float) -> None:
    """A drop: its answer is not needed, and the worker may die under it."""
    try:
        async with asyncio.timeout(timeout_s):
            await coroutine
    except (WorldError, DeadlineError, TimeoutError):
        return
