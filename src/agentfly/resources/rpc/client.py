"""The trainer's end of one worker: calls are sent as frames, replies resolve them, and the end of the worker fails them.

    connecting --first reply--> ready --call, reply, ...--> ending --terminate()--> gone
         |                                                     ^
         `------ start failed, connection lost, bad frame, ----'
                 call abandoned, last instance closed

What a worker is (a process, a sandbox, a container, a connection to a server) is a subclass, one per placement. Each worker is
connected once and terminated once, also if the start fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from ...codec import NotEncodable
from ...errors import WorldError
from ..spec import Spec
from .frames import HELLO_ID, NEW, BadFrame, FrameLimits, FrameReader, Reply, error_of, pack_call

MAX_STRAY = 1000
"""How many replies without a waiting call a worker with limits may send beyond those that a call waits for."""


class Worker(asyncio.Protocol):
    """One worker with one or more instances. `ready` is done when it has answered, `gone` when it is terminated.

    `options` are those of the placement, None if it has none.
    """

    kind = "worker process"
    """What messages call it."""
    limits: FrameLimits | None = None
    """What it may send; None if no code of a model runs in it."""
    pid: int | None = None
    """The worker's process, if it is a process of this machine whose memory may be read."""

    def __init__(self, spec: Spec, options: Any) -> None:
        loop = asyncio.get_running_loop()
        self.spec, self.options, self.name = spec, options, spec.name
        self.alive = True
        self.tainted = False
        """Whether a call was abandoned in here: its thread may never return, so the worker takes no new instances."""
        self.why = ""
        self.about: Any = None
        self.instances: dict[int, Callable[[str], None]] = {}
        """What to call for each instance when the worker ends, with the reason."""
        self.ready: asyncio.Future[None] = loop.create_future()
        self.gone: asyncio.Future[None] = loop.create_future()
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._count = HELLO_ID
        self._reader = FrameReader(self.limits)
        self._stray = 0
        self._transport: asyncio.Transport | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    # ---- for a placement

    async def connect(self, number: int) -> None:
        """Start the worker and send the hello. From then on the worker's bytes go to `data_received`."""
        raise NotImplementedError

    def read_from(self, parts: AsyncIterator[bytes]) -> None:
        """Receive the worker's bytes from an iterator in place of a transport. Its end is the end of the connection."""
        self._reading = asyncio.create_task(self._read(parts))

    async def _read(self, parts: AsyncIterator[bytes]) -> None:
        async for data in parts:
            self.data_received(data)
        self.connection_lost(None)

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    async def terminate(self, wanted: bool) -> str:
        """End the worker for certain and return how it ended, such as "(exit code 3)". Never raises. Nothing is read any more.

        `wanted`: the trainer ends it. Otherwise it ended by itself, and the reason is worth a short wait.
        """
        raise NotImplementedError

    def unasked(self, reply: Reply) -> bool:
        """Whether a reply that answers no call means something."""
        return False

    def tidy(self) -> None:
        """Called now and then while the worker lives."""

    # ---- for its instances

    async def start(self, number: int) -> None:
        """Connect and wait for the first reply. Raises WorldError, or what `connect` raises."""
        answered = self._calls[HELLO_ID] = asyncio.get_running_loop().create_future()
        try:
            await self.connect(number)
            self.about = _value_of(await answered, trusted=True)
        except BaseException as error:
            self.end(f"its {self.kind} did not start: {error}")
            raise
        if not self.ready.done():
            self.ready.set_result(None)

    async def call(self, instance: int, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """The value of a call. Raises its exception, TypeError if an argument cannot travel, WorldError if the worker ends."""
        call_id = self.post(instance, method, args, kwargs or {})
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            return _value_of(await future, trusted=self.limits is None or method == NEW)
        finally:
            self._calls.pop(call_id, None)

    def post(self, instance: int, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """Send a call and return its id. A reply that no `call` waits for is dropped."""
        if not self.alive or not self.ready.done():
            raise WorldError(self.why or f"{self.name}: its {self.kind} is gone")
        self._count += 1
        try:
            data = pack_call(self._count, instance, method, args, kwargs)
        except NotEncodable as error:
            raise TypeError(f"an argument of {self.name}.{method} cannot travel to its {self.kind}: {error}") from None
        self.write(data)
        return self._count

    def leave(self, number: int) -> None:
        """An instance is closed. The last one ends the worker."""
        self.instances.pop(number, None)
        if not self.instances:
            self.end(f"{self.name} is closed")

    def end(self, why: str) -> None:
        """Terminate the worker, then fail its calls and tell its instances. Without a reason, `terminate` provides it."""
        if self.alive:
            self.alive, self.why = False, why
            self._ending = asyncio.get_running_loop().create_task(self._end())

    async def _end(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading], timeout=5)
        how = await self.terminate(bool(self.why))
        if not self.why:
            self.why = f"{self.name}: its {self.kind} ended {how}"
        waiting: list[asyncio.Future[Any]] = [*self._calls.values(), self.ready]
        for future in waiting:
            if not future.done():
                future.set_exception(WorldError(self.why))
                future.exception()  # marks it as retrieved: the caller may have been cancelled
        self.gone.set_result(None)
        for died in list(self.instances.values()):
            died(self.why)

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            replies = self._reader.replies(data)
        except BadFrame as error:
            self.end(f"{self.name}: its {self.kind} sent no valid frame ({error}) and was killed")
            return
        for reply in replies:
            future = self._calls.get(reply.id)
            if future is not None and not future.done():
                future.set_result(reply)
                self._stray = max(0, self._stray - 1)  # every call that is given up may leave a late reply
            elif not self.unasked(reply) and self.limits is not None:
                self._stray += 1  # late, or not asked for
                if self._stray > MAX_STRAY:
                    self.end(f"{self.name}: its {self.kind} sent replies that were not asked for and was killed")
                    return

    def connection_lost(self, error: Exception | None) -> None:
        self.end("")


def _value_of(reply: Reply, trusted: bool) -> Any:
    if reply.error is not None:
        raise error_of(reply.error, trusted)
    return reply.value
