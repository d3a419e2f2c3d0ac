"""WebSocket connections: the limits and the batching that both ends of an environment server share. Needs `agentfly[serve]`.

`websockets` bounds messages, queues and handshakes. `limited` adds three bounds:

    fragments of a message     empty ones add nothing to its size, and not every version of the library counts them
    bytes left unread          each ping is answered at once: a peer that reads nothing would grow the write buffer for ever
    time to close              after a close frame or a violation, a peer that does not close would stay until the next ping
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ...plugins import missing_extra
from .frames import HEADER, MAX_FRAME

STALL_S = 60.0
"""A peer that reads nothing for so long while bytes wait for it is disconnected."""
CLOSE_S = 2.0
MAX_QUEUE = 8
MAX_FRAGMENTS = 1024
MAX_BATCH, MAX_BATCH_FRAMES = 1 << 20, 1000
"""Bytes and frames of one message. A larger frame has a message to itself, and readers accept as many frames at once."""

log = logging.getLogger(__name__)
_quiet = logging.getLogger(f"{__name__}.websockets")
_quiet.setLevel(logging.CRITICAL)  # the library logs each failed handshake of any stranger as an error, with a traceback


def settings(ping_s: float) -> dict[str, Any]:
    """Arguments for `serve` and `connect`. A peer that is silent for three times `ping_s` is disconnected."""
    return {
        "compression": None,
        "max_size": MAX_FRAME + HEADER.size,
        "max_queue": MAX_QUEUE,
        "ping_interval": ping_s,
        "ping_timeout": 2 * ping_s,
        "close_timeout": CLOSE_S,
        "logger": _quiet,
    }


def websockets() -> Any:
    """The module with `serve`, `connect`, their connection classes and the exceptions. Raises MissingExtra."""
    try:
        import websockets.asyncio.client
        import websockets.asyncio.server
        import websockets.exceptions
    except ModuleNotFoundError:
        raise missing_extra("placement 'http' and `agentfly envs serve`", "websockets") from None
    return websockets


def limited(base: Any) -> Any:
    """A connection class like `base` with these bounds. It stops reading while its peer does."""

    class LimitedConnection(base):  # type: ignore[misc]
        _stalled: asyncio.TimerHandle | None = None
        _closing: asyncio.TimerHandle | None = None
        _fragments = 0

        def process_event(self, event: Any) -> None:
            if self.transport.is_closing():
                return  # the rest of the bytes that were received with the fragment too many
            super().process_event(event)
            if getattr(event, "opcode", None) == 0:
                self._fragments = 0 if event.fin else self._fragments + 1
                if self._fragments > MAX_FRAGMENTS:
                    self.transport.abort()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._stalled = self.loop.call_later(STALL_S, self.transport.abort)
            self.transport.pause_reading()

        def resume_writing(self) -> None:
            self._cancel_stall()
            super().resume_writing()
            if not self.recv_messages.paused:
                self.transport.resume_reading()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            # The handler resumes reading when it has emptied the queue of messages, also while the peer reads nothing.
            if self._stalled is not None and not self.transport.is_closing():
                self.transport.pause_reading()
            if self._closing is None and self.protocol.close_expected():
                self._closing = self.loop.call_later(CLOSE_S, self.transport.abort)

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel_stall()
            if self._closing is not None:
                self._closing.cancel()
            super().connection_lost(exc)

        def _cancel_stall(self) -> None:
            if self._stalled is not None:
                self._stalled.cancel()
                self._stalled = None

    return LimitedConnection


class FrameBatch:
    """Sends the frames of one tick of the event loop as one WebSocket message, without waiting for the peer."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._broadcast = websockets().asyncio.server.broadcast  # the library's `send` that never waits
        self._frames: list[bytes] = []
        self._size = 0

    def send(self, data: bytes) -> None:
        """Send a frame, which the library drops if the connection is closed."""
        if self._size + len(data) > MAX_BATCH or len(self._frames) == MAX_BATCH_FRAMES:
            self._flush()
        if not self._frames:
            asyncio.get_running_loop().call_soon(self._flush)
        self._frames.append(data)
        self._size += len(data)

    def _flush(self) -> None:
        if self._frames:
            data = b"".join(self._frames)
            self._frames.clear()
            self._size = 0
            self._broadcast([self._socket], data)


def reason_of(closed: Any) -> str:
    """Why a connection ended, from the library's ConnectionClosed."""
    reasons = (frame.reason for frame in (closed.rcvd, closed.sent) if frame is not None and frame.reason)
    return str(next(reasons, "the connection was lost"))
