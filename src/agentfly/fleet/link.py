"""Both ends of the connection between a fleet and one of its processes: messages in frames of `resources.rpc.frames`.

    message    [kind, id, value]     id 0 expects no reply; "reply" and "error" carry the id of what they answer

The first message of a process is "hello" with the token of its ticket; the fleet closes any other connection. Both sides send
"beat" about every second, so that each notices a peer that is frozen or unreachable.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..resources.rpc.frames import BadFrame, FrameLimits, FrameReader, pack_message
from ..resources.rpc.worker_main import die
from .bare import machine, software

HELLO_LIMITS = FrameLimits(frame=1 << 16, values=1000, at_once=4)
"""What is read of a connection before its token is checked."""
CONNECT_S = 30.0


class LinkMessage(NamedTuple):
    """One message. `id` is 0 if no reply is expected."""

    kind: str
    id: int
    value: Any


def pack(kind: str, message_id: int = 0, value: object = None) -> bytes:
    """A message as a frame. Raises `codec.NotEncodable`."""
    return pack_message([kind, message_id, value])


def beat_s(health_s: float) -> float:
    """Seconds between two beats, if a peer that is silent for `health_s` counts as dead."""
    return min(1.0, health_s / 5)


class Link(asyncio.Protocol):
    """One end of a connection. `on_message(link, message)` and `on_lost(link)` run in the link's event loop.

    `silent_s` is for the owner's timer: the link sets it to 0 at each message.
    """

    def __init__(
        self,
        on_message: Callable[[Link, LinkMessage], None],
        on_lost: Callable[[Link], None],
        limits: FrameLimits | None = None,
    ) -> None:
        self.silent_s = 0.0
        self.transport: asyncio.Transport | None = None
        self._on_message, self._on_lost = on_message, on_lost
        self._reader = FrameReader(limits)
        self._closed = False

    def accept(self) -> None:
        """The peer has proven who it is: read messages of any size from it."""
        self._reader = FrameReader()

    def send(self, kind: str, message_id: int = 0, value: Any = None) -> None:
        """Send a message; one to a closed connection is dropped. Raises `codec.NotEncodable`."""
        self.write(pack(kind, message_id, value))

    def write(self, data: bytes) -> None:
        """Send packed messages."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)

    def close(self) -> None:
        """Drop the connection, also one that is about to be made."""
        self._closed = True
        if self.transport is not None:
            self.transport.abort()

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if self._closed:
            transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._on_lost(self)

    def data_received(self, data: bytes) -> None:
        self.silent_s = 0.0
        try:
            messages = [_check(value) for value in self._reader.values(data)]
        except BadFrame:
            self.close()
            return
        for message in messages:
            if message.kind != "beat":
                self._on_message(self, message)


def _check(value: object) -> LinkMessage:
    if type(value) is list and len(value) == 3 and type(value[0]) is str and type(value[1]) is int:
        return LinkMessage(*value)
    raise BadFrame("it is not a message")


class Connection(threading.Thread):
    """In a process of a fleet: the thread that holds its link, so that a busy main thread does not make it look frozen.

    `on_message(message)` is called in this thread. The process ends if the connection is lost, or the trainer is silent for ten
    times `health_s`.
    """

    def __init__(self, ticket: Mapping[str, Any], on_message: Callable[[LinkMessage], Any]) -> None:
        super().__init__(name="agentfly-connection", daemon=True)
        self._ticket = ticket
        self._loop = asyncio.new_event_loop()
        self._link = Link(lambda _, message: on_message(message), lambda _: die("the connection to the trainer was lost"))

    def send(self, kind: str, message_id: int = 0, value: Any = None) -> None:
        """Send a message, from any thread. Raises `codec.NotEncodable`."""
        self._loop.call_soon_threadsafe(self._link.write, pack(kind, message_id, value))

    def run(self) -> None:
        try:
            self._loop.run_until_complete(self._live())
        except OSError as error:
            die(f"the trainer cannot be reached at {self._ticket['address']}: {error}")

    async def _live(self) -> None:
        address, health_s = self._ticket["address"], self._ticket["health_s"]
        async with asyncio.timeout(CONNECT_S):
            if isinstance(address, str):
                await self._loop.create_unix_connection(lambda: self._link, address)
            else:
                await self._loop.create_connection(lambda: self._link, *address)
        hello = {name: self._ticket[name] for name in ("token", "index", "attempt")}
        self._link.send("hello", 0, {**hello, "pid": os.getpid(), "machine": machine(), "software": software()})
        pause = beat_s(health_s)
        while self._link.silent_s < 10 * health_s:
            self._link.send("beat")
            await asyncio.sleep(pause)
            self._link.silent_s += pause
        die(f"the trainer was silent for {10 * health_s:g} s")


def connect(ticket: Mapping[str, Any]) -> tuple[Connection, asyncio.Queue[LinkMessage]]:
    """Connect a process of a fleet. Its messages come in the queue, in the event loop that calls."""
    loop = asyncio.get_running_loop()
    inbox: asyncio.Queue[LinkMessage] = asyncio.Queue()
    connection = Connection(ticket, lambda message: loop.call_soon_threadsafe(inbox.put_nowait, message))
    connection.start()
    return connection, inbox


async def is_stopped(inbox: asyncio.Queue[LinkMessage], timeout_s: float) -> bool:
    """Wait for a message. Returns whether one came in time that says "stop"."""
    try:
        async with asyncio.timeout(timeout_s):
            return (await inbox.get()).kind == "stop"
    except TimeoutError:
        return False
