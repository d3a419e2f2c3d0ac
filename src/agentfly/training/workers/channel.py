"""The connection between the trainer and a worker: messages in frames of `resources.rpc.frames`.

    message    [kind, id, value]     id 0 expects no reply; "reply" and "error" carry the id of what they answer

A worker's first message is "hello" with the token that its launcher gave it; the trainer closes any other connection. Both
sides send "beat" about every second, so that each notices a peer that is frozen or unreachable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from ...resources.rpc.frames import BadFrame, FrameLimits, FrameReader, pack_message

HELLO_LIMITS = FrameLimits(frame=1 << 16, values=1000, at_once=4)
"""What is read of a connection before its token is checked."""


class Message(NamedTuple):
    """One message. `id` is 0 if no reply is expected."""

    kind: str
    id: int
    value: Any


def pack(kind: str, message_id: int = 0, value: Any = None) -> bytes:
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
        on_message: Callable[[Link, Message], None],
        on_lost: Callable[[Link], None],
        limits: FrameLimits | None = None,
    ) -> None:
        self.silent_s = 0.0
        self.transport: asyncio.Transport | None = None
        self._on_message, self._on_lost = on_message, on_lost
        self._reader = FrameReader(limits)

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
        """Drop the connection."""
        if self.transport is not None:
            self.transport.abort()

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

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


def _check(value: Any) -> Message:
    if type(value) is list and len(value) == 3 and type(value[0]) is str and type(value[1]) is int:
        return Message(*value)
    raise BadFrame("it is not a message")
