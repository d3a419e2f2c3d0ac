"""The trainer's side of one session: a non-blocking socket on the event loop, one cell at a time.

A reply is data to check: one that is too long, malformed, unasked for or not for this cell ends the session. Its lengths are
checked before the rest of it is read, so a session can make the trainer hold one reply of acceptable size and no more. Whether
a cell timed out and how the session ended is decided by the trainer's clock and the fork server's waitpid alone.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Protocol

from ..errors import WorldError
from ..types import SandboxLimit
from .interpreter.cells import CELL, CHUNK, CellReply, read_reply
from .limits import CellResult, SandboxLimits
from .runtime.protocol import INTERRUPT, KILL, MAX_IMAGE_BYTES, QUICK, SLOW

MAX_CODE_CHARS = 2_000_000
REFUSALS: dict[str, SandboxLimit] = {
    "MemoryError": "memory",
    "OSError: [Errno 12]": "memory",
    "OSError: [Errno 24]": "files",
    "OSError: [Errno 27]": "disk",
    "OSError: [Errno 28]": "disk",
    "OSError: [Errno 122]": "disk",
    "BlockingIOError: [Errno 11]": "processes",
    "RuntimeError: can't start new thread": "processes",
}
"""How the last line of a cell's error begins if the kernel has refused more than a limit allows."""
SLOW_S = 0.02
"""A cell that still runs after this time is not a short call: its session gets longer time slices, and yields to short ones."""


class SessionControl(Protocol):
    """What a session needs of its server."""

    limits: SandboxLimits
    start_timeout_s: float
    ended: str | None

    def command(self, op: int, number: int) -> None: ...

    def count(self, name: str) -> None: ...

    def cell_started(self, session: SandboxSession, cell: int) -> None: ...


class SandboxSession:
    """Made by `SandboxServer.session()`."""

    def __init__(self, server: SessionControl, number: int, channel: socket.socket) -> None:
        self.number = number
        self.ended: str | None = None  # the reason, once the session has ended
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._channel = channel
        self._buffer = bytearray()
        self._outgoing = memoryview(b"")
        self._waiter: asyncio.Future[CellReply | None] | None = None
        self._signalled: asyncio.Future[None] | None = None  # done when the fork server has sent SIGINT
        self._gone: asyncio.Future[None] = self._loop.create_future()  # done when the fork server has reaped it
        self._timer: asyncio.TimerHandle | None = None
        self._late = self._slow = False
        self._limit: SandboxLimit | None = None  # the limit that ended the session
        self._reported = False  # whether a result has told the caller about the end
        self._deadline = 0.0
        self._cell = 0
        self._max_chars = server.limits.output_chars + 100
        self._loop.add_reader(channel.fileno(), self._on_readable)

    @property
    def alive(self) -> bool:
        return self.ended is None

    async def run(self, code: str, timeout_s: float = 30.0) -> CellResult:
        """Runs one cell. A cell that takes longer than `timeout_s` is interrupted; if it does not stop, its session is killed.

        Cancelling the call ends the session. Raises WorldError if the server has ended, or if an earlier result already said
        that the session ended. A session that ended by itself since the last cell, as code can make it, gives a result that is
        not `alive`."""
        if self.ended is not None:
            if self._reported or self._server.ended is not None:
                raise WorldError(f"the sandbox session has ended: {self.ended}")
            return self._lost()
        if self._waiter is not None:
            raise WorldError("the sandbox session is running another cell: one at a time")
        if len(code) > MAX_CODE_CHARS:
            return CellResult(error=f"the code has {len(code):,} characters, the limit is {MAX_CODE_CHARS:,}")
        self._cell += 1
        self._late = False
        self._deadline = self._loop.time() + timeout_s
        self._server.cell_started(self, self._cell)
        if timeout_s <= SLOW_S:
            self._timer = self._loop.call_at(self._deadline, self._on_late)
        body = code.encode("utf-8", "surrogatepass")
        reply = await self._exchange(CELL.pack(len(body), self._cell) + body)
        if self._slow:
            self._slow = False
            self._server.command(QUICK, self.number)
        if reply is None:
            return self._lost()
        most = self._max_chars  # code in the session can lift the limits there
        value, error = (None if text is None else text[:most] for text in (reply.value, reply.error))
        result = CellResult(reply.stdout[:most], reply.stderr[:most], value, error, reply.images, limit=self._reached(reply))
        if not self._late:
            return result
        if self._signalled is not None:
            # The cell may have ended before the signal was sent. Without this wait the signal could hit the next cell.
            await asyncio.shield(self._signalled)
        error = f"TimeoutError: the cell took longer than {timeout_s:g} s and was interrupted; the session goes on"
        return CellResult(
            result.stdout, result.stderr, None, error, result.images, timed_out=True, alive=self.alive, limit="time"
        )

    def _lost(self) -> CellResult:
        self._reported = True
        error = f"the session has ended and its variables are lost: {self.ended}"
        return CellResult(error=error, timed_out=self._late, alive=False, limit="time" if self._late else self._limit)

    def _reached(self, reply: CellReply) -> SandboxLimit | None:
        """The limit that a cell reached whose session goes on. The kernel tells the cell alone, so the reply must say it."""
        last = (reply.error or "").rstrip().rpartition("\n")[2]
        for beginning, limit in REFUSALS.items():
            if last.startswith(beginning):
                return limit
        most = self._server.limits.output_chars  # a text that was cut has a mark, so it is longer than that
        return "output" if max(len(reply.stdout), len(reply.stderr), len(reply.value or "")) > most else None

    async def close(self) -> None:
        """Ends the session and waits until the fork server has reaped it. Can be called again."""
        self._reported = True
        self._end("it was closed")
        await self.wait_gone(10)

    def hand_over(self, code: str) -> socket.socket:
        """Runs a last cell and returns the connection: from now on the cell speaks on it. This object still learns of the
        end."""
        self._loop.remove_reader(self._channel.fileno())
        channel = self._channel.dup()
        body = code.encode()
        channel.send(CELL.pack(len(body), 0) + body)  # fits into the empty socket buffer, so it never blocks
        return channel

    async def wait_gone(self, timeout_s: float) -> bool:
        """Whether the fork server reaps the session within this time; then `ended` says why it ended."""
        return bool((await asyncio.wait([self._gone], timeout=timeout_s))[0])

    # ---- the exchange of one cell ----

    async def started(self) -> None:
        """Waits for the first reply, which says whether the isolation works. Raises WorldError if it does not."""
        self._timer = self._loop.call_later(self._server.start_timeout_s, self._end, "it did not start in time")
        reply = await self._exchange(b"")
        if reply is None or reply.error:
            why = self.ended or (reply.error if reply else None)
            self._end("it did not start")
            raise WorldError(f"a sandbox session could not be started: {why}")

    async def _exchange(self, message: bytes) -> CellReply | None:
        self._waiter = self._loop.create_future()
        try:
            if message:
                self._outgoing = memoryview(message)
                self._on_writable()
            return await self._waiter
        except asyncio.CancelledError:
            self._end("its call was cancelled")
            raise
        finally:
            self._waiter = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _on_writable(self) -> None:
        try:
            sent = self._channel.send(self._outgoing)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # reading fails too, and ends the session
        self._outgoing = self._outgoing[sent:]
        if self._outgoing:
            self._loop.add_writer(self._channel.fileno(), self._on_writable)
        else:
            self._loop.remove_writer(self._channel.fileno())  # no effect if there is none

    def _on_readable(self) -> None:
        data: bytes | bytearray
        try:
            data = self._channel.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            # Usually the session has exited, and the fork server is about to say how. One that only closed its socket is
            # killed.
            self._loop.remove_reader(self._channel.fileno())
            self._loop.call_later(0.5, self._end, "it closed its connection")
            return
        if self._waiter is None or self._waiter.done():
            self._end("it sent a reply that was not asked for")
            return
        if self._buffer:
            self._buffer += data
            data = self._buffer
        try:
            reply = read_reply(data, 6 * self._max_chars, MAX_IMAGE_BYTES)  # a character takes at most 6 bytes
        except ValueError:
            reply = None
        else:
            if reply is None:
                if not self._buffer:
                    self._buffer += data
                return
        self._buffer = bytearray()
        if reply is None or reply.number != self._cell:
            self._end("it sent something that is not a reply")
        else:
            self._waiter.set_result(reply)

    # ---- deadlines, and how a session ends ----

    def on_slow(self, cell: int) -> None:
        """Called `SLOW_S` after a cell started. If it still runs, it now yields to short calls, and its deadline gets a
        timer."""
        if cell == self._cell and self._waiter is not None and self._timer is None:
            self._slow = True
            self._server.command(SLOW, self.number)
            self._timer = self._loop.call_at(self._deadline, self._on_late)

    def _on_late(self) -> None:
        self._late = True
        self._server.count("timed_out")
        self._signalled = self._loop.create_future()
        self._server.command(INTERRUPT, self.number)
        self._timer = self._loop.call_later(self._server.limits.grace_s, self._end, "it did not stop when its time was over")

    def on_signalled(self) -> None:
        if self._signalled is not None and not self._signalled.done():
            self._signalled.set_result(None)

    def on_exit(self, facts: dict[str, Any]) -> None:
        """Called when the fork server has reaped the session. `facts` come from the fork server, not from the session."""
        code, cpu_s = facts["code"], facts["cpu_s"]
        limits = self._server.limits
        limit = facts.get("limit")
        if facts["why"] or facts["error"]:
            why = facts["why"] or facts["error"]
        elif facts["oom"]:
            limit, why = "memory", f"it used more than {limits.memory_mb} MB of memory"
        elif code == -9 and cpu_s >= limits.cpu_s - 1:
            limit, why = "cpu", f"it used more than {limits.cpu_s} s of CPU time"
        else:
            why = f"it was ended by signal {-code}" if code < 0 else f"it exited with code {code}"
        if self.ended is None:
            self._limit = limit
        self._end(why, reaped=True)

    def _end(self, why: str, reaped: bool = False) -> None:
        """Ends the session from any state. Can be called again; only the first reason counts."""
        if self.ended is None:
            self.ended = why
            self._loop.remove_reader(self._channel.fileno())
            self._loop.remove_writer(self._channel.fileno())
            self._channel.close()
            if not reaped:
                self._server.command(KILL, self.number)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if reaped:
            self.on_signalled()
            if not self._gone.done():
                self._gone.set_result(None)
