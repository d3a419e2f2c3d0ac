"""Environments on the other side of a wire: calls in, frames over a connection, answers out.

A `Worker` is one other side with one or more instances; the `WorkerTransport` under it is what it lives in (a process here, a
sandbox, a container, a server elsewhere: one file each) and carries the bytes. When it dies, every call that waits on it fails
with a `WorldError` that says how, and its instances report their death; nothing else is touched. A call that is given up kills
the transport when the instance is alone in it. Where several share one the instance is dropped, it takes no new ones, and it is
killed when the last has left.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ...errors import DeadlineError, WorldError
from ..backends.base import Backend, Instance
from ..backends.spawn import SPAWNER, WorkerProcess
from ..spec import Spec, importable
from .frames import BadFrame, Frames, pack, pack_argument, unpack_error, unpack_value
from .server import DROP, GET, NEW

PAGE_MB = os.sysconf("SC_PAGE_SIZE") / (1 << 20) if hasattr(os, "sysconf") else 0.0


class WorkerTransport:
    """What a worker lives in, and the wire to it. One transport is opened once, and buried once, whatever came of it."""

    thing = "worker process"
    """What messages call it."""
    pid: int | None = None
    """The worker's process, where it is one of this machine's that we may look at."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    async def open(self, worker: Worker, number: int) -> None:
        """Start it and say hello. From then on what it says goes to `worker.data_received`, its end to `connection_lost`."""
        raise NotImplementedError

    def write(self, data: bytes) -> None:
        raise NotImplementedError

    async def terminate(self, asked: bool) -> str:
        """End it for certain; how it ended. `asked`: we want it gone, and it need not be asked why. Never raises."""
        raise NotImplementedError

    def tidy(self) -> None:
        """Called now and then."""


class ProcessTransport(WorkerTransport):
    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self._born: WorkerProcess | None = None
        self._transport: asyncio.Transport | None = None

    async def open(self, worker: Worker, number: int) -> None:
        target, options = importable(self.spec)
        self._born = await SPAWNER.spawn(number, self.spec.pass_env)
        self.pid = self._born.popen.pid
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_connection(lambda: worker, sock=self._born.channel)
        hello = {"path": sys.path, "target": target, "options": options, "per_process": self.spec.per_process}
        self._transport.write(pack(hello))

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    async def terminate(self, asked: bool) -> str:
        born = self._born
        if born is None:
            return "it was never born"
        tail = born.tail()
        if self._transport is not None:
            self._transport.abort()
        await SPAWNER.terminate(born)
        return f"({_how(born.popen.returncode)})" + (f"; it said: {tail}" if tail else "")

    def tidy(self) -> None:
        if self._born is not None:
            self._born.tidy()


class Worker(asyncio.Protocol):
    """Our side of one transport. `ready` is done when it answers, `gone` when it is dead and buried."""

    def __init__(self, spec: Spec, transport: WorkerTransport) -> None:
        loop = asyncio.get_running_loop()
        self.spec = spec
        self.transport = transport
        self.alive = True
        self.tainted = False
        self.why = ""
        self.about: Any = None
        """What it said of itself when it came up."""
        self.instances: dict[int, RemoteInstance] = {}
        self.ready: asyncio.Future[None] = loop.create_future()
        self.gone: asyncio.Future[None] = loop.create_future()
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._count = 0
        self._frames = Frames()
        self._write: Callable[[bytes], None] | None = None
        self._burial: asyncio.Task[None] | None = None

    async def start(self, number: int) -> None:
        answered: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._calls[0] = answered  # its first frame
        try:
            await self.transport.open(self, number)
            answer = await answered
            if answer.get("error"):  # a cell of a sandbox that ended before it became a worker
                raise WorldError(str(answer["error"])[-500:])
            self.about = unpack_value(answer)
        except BaseException as error:
            self.die(f"its {self.transport.thing} did not start: {error}")
            raise
        self._write = self.transport.write
        if not self.ready.done():
            self.ready.set_result(None)

    @property
    def pid(self) -> int | None:
        return self.transport.pid if self.alive else None

    async def call(self, instance: int, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if not self.alive or self._write is None:
            raise WorldError(self.why or f"{self.spec.name}: its {self.transport.thing} is gone")
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
            raise TypeError(
                f"an argument of {self.spec.name}.{method} cannot travel to its {self.transport.thing}: {error}"
            ) from None
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        self._write(data)
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
            self.die(f"{self.spec.name}: its {self.transport.thing} sent no valid frame ({error}) and was killed")

    def connection_lost(self, error: Exception | None) -> None:
        self.die("")

    def die(self, why: str) -> None:
        """It is over: kill, reap, then tell everyone. Without a reason the transport itself is asked for one."""
        if not self.alive:
            return
        self.alive, self.why = False, why
        self._burial = asyncio.get_running_loop().create_task(self._bury())

    async def _bury(self) -> None:
        how = await self.transport.terminate(bool(self.why))
        if not self.why:
            self.why = f"{self.spec.name}: its {self.transport.thing} ended {how}"
        for future in list(self._calls.values()):
            if not future.done():
                future.set_exception(WorldError(self.why))
                future.exception()  # whoever waited may have been cancelled
        if not self.ready.done():
            self.ready.set_exception(WorldError(self.why))
            self.ready.exception()
        self.gone.set_result(None)
        for instance in list(self.instances.values()):
            instance.died(self.why)

    def leave(self, number: int) -> None:
        """An instance is closed; the last one takes the transport with it."""
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


class RemoteInstance(Instance):
    def __init__(self, home: RemoteBackend, number: int) -> None:
        super().__init__(home.spec, number)
        self._backend = home
        self._worker: Worker | None = None

    @property
    def pid(self) -> int | None:
        return self._worker.pid if self._worker is not None else None

    async def start(self) -> None:
        worker = self._worker = self._backend.room(self)
        if len(worker.instances) == 1:
            await worker.start(self.number)
            self._backend.check(worker.about)
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
            worker.die(f"{self.spec.name}: a call was given up and its {worker.transport.thing} was killed")
        else:
            worker.tainted = True  # its thread may hang in there for ever

    async def close(self, timeout_s: float) -> None:
        worker = self._worker
        if worker is None:
            return
        if self.alive:
            await super().close(timeout_s)
        elif worker.alive and self.spec.per_process > 1 and self.number in worker.instances:
            self._backend.spawn_task(worker.call(self.number, DROP), timeout_s)
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
        if self._worker is not None and self._worker.alive:
            self._worker.transport.tidy()

    @property
    def about(self) -> Any:
        """What the other side said of itself when it came up."""
        return None if self._worker is None else self._worker.about


class RemoteBackend(Backend):
    """The workers of one pool. A placement of its own overrides `transport`."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec, Instance)
        self._workers: list[Worker] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    def transport(self) -> WorkerTransport:
        raise NotImplementedError

    def check(self, about: Any) -> None:
        """What the other side said of itself; for a placement that must look."""

    def create(self, number: int) -> RemoteInstance:
        return RemoteInstance(self, number)

    def room(self, instance: RemoteInstance) -> Worker:
        """A worker with room for one more, made if need be."""
        limit = self.spec.per_process
        self._workers = [worker for worker in self._workers if worker.alive]
        roomy = (worker for worker in self._workers if not worker.tainted and len(worker.instances) < limit)
        worker = next(roomy, None)
        if worker is None:
            worker = Worker(self.spec, self.transport())
            self._workers.append(worker)
        worker.instances[instance.number] = instance
        return worker

    def spawn_task(self, coroutine: Any, timeout_s: float) -> None:
        task = asyncio.get_running_loop().create_task(_quietly(coroutine, timeout_s))
        self._tasks.add(task)
        task.add_done_callback(partial(_forget, self._tasks))


class ProcessBackend(RemoteBackend):
    def __init__(self, spec: Spec) -> None:
        importable(spec)  # what no worker could import is refused before anything starts
        super().__init__(spec)

    def transport(self) -> WorkerTransport:
        return ProcessTransport(self.spec)


def _forget(tasks: set[asyncio.Task[Any]], task: asyncio.Task[Any]) -> None:
    tasks.discard(task)


async def _quietly(coroutine: Any, timeout_s: float) -> None:
    """A drop: its answer is not needed, and the worker may die under it."""
    try:
        async with asyncio.timeout(timeout_s):
            await coroutine
    except (WorldError, DeadlineError, TimeoutError):
        return
