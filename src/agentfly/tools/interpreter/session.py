"""`python_process`: a Python session for each chain, in a subprocess that keeps its variables between calls.

A call that exceeds its time limit is interrupted, and the session is kept if the code stops; otherwise the session is killed
and the model is told that its variables are lost. Chains never share a session, and rewards are never computed inside one.
`run_code` runs a program once, in a new process with the same limits.
"""

from __future__ import annotations

import asyncio
import io
import math
import os
import signal
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ...aio.threads import run_in_thread
from ...errors import WorldError
from ...types import ToolResult
from ..definition import Tool, tool
from ..text import clean, cut
from .cells import CELL, CHUNK, HEAD, LENGTH, MAX_CHARS, Reply, read_reply
from .process import Process, rlimits

LIMIT_S = 20.0
MEMORY_MB = 1024
START_S = 30.0
GRACE_S = 2.0
"""How long a session may take to reply after it was interrupted; then it is killed."""
_MAX_TEXT = 6 * (MAX_CHARS + 100)  # bytes of a text in a reply; a character takes at most 6
_MAX_FRAME = HEAD.size + 4 * _MAX_TEXT
_MAX_FORGED = 8
"""How many frames that are no reply a session survives. Only cells that write to the socket themselves send such frames."""
_HEAD, _TAIL = 4_000, 2_000  # characters kept of what a call printed
_MAX_VALUE = 3_000
_MAX_FILE = 1_000_000


@dataclass(frozen=True, slots=True)
class CodeRun:
    """The outcome of a program. `exit_code` is negative if a signal ended it."""

    stdout: str
    stderr: str
    exit_code: int
    timed_out: bool


async def run_code(code: str, *, stdin: str = "", timeout_s: float, memory_mb: int = MEMORY_MB) -> CodeRun:
    """Runs `code` as a program in a new process. Cancelling the call kills the process. Raises WorldError if none can start."""
    limits = rlimits(memory_mb, cpu_s=math.ceil(timeout_s) + 2)
    return await run_in_thread(_run_code, clean(code), clean(stdin), timeout_s, limits)  # type: ignore[no-any-return]


def _run_code(code: str, stdin: str, timeout_s: float, limits: str) -> CodeRun:
    streams = {"stdin": ".stdin", "stdout": ".stdout", "stderr": ".stderr"}
    try:
        process = Process(["once", "main.py", limits], files={"main.py": code, ".stdin": stdin}, streams=streams)
    except OSError as error:
        raise WorldError(f"a Python process could not be started: {error}") from error
    try:
        timed_out = not process.wait(timeout_s)
        process.signal(signal.SIGKILL)  # the whole group: what the program left running too
        process.popen.wait(timeout=5)
        stdout, stderr = (_read(Path(process.directory, name)) for name in (".stdout", ".stderr"))
    except subprocess.TimeoutExpired as error:
        raise WorldError("a Python process could not be killed") from error
    finally:
        code_of_exit = process.destroy()
    return CodeRun(stdout, stderr, -signal.SIGKILL if code_of_exit is None else code_of_exit, timed_out)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_FILE).decode(errors="replace")
            missing = os.fstat(file.fileno()).st_size - _MAX_FILE
            return text if missing <= 0 else f"{text}\n[... cut: {missing:,} bytes left out]"
    except OSError:
        return ""  # the program removed the file


class _Output:
    """Collects what a call prints: the beginning, the end, and the number of bytes."""

    def __init__(self) -> None:
        self.head, self.tail, self.count = bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        self.count += len(data)
        room = 4 * _HEAD - len(self.head)
        self.head += data[:room] if room > 0 else b""
        self.tail += data[max(room, 0) :]
        del self.tail[: -4 * _TAIL or None]

    def take(self) -> str:
        head, tail, count = self.head, self.tail, self.count
        self.__init__()  # type: ignore[misc]
        if count == len(head) + len(tail):
            text = (head + tail).decode(errors="replace")
            if len(text) <= _HEAD + _TAIL:
                return text
            first, last, missing = text[:_HEAD], text[-_TAIL:], f"{len(text) - _HEAD - _TAIL:,} characters"
        else:
            first, last = head.decode(errors="replace")[:_HEAD], tail.decode(errors="replace")[-_TAIL:]
            missing = f"about {count - len(first) - len(last):,} characters"
        return f"{first}\n[... {missing} left out ...]\n{last}"


class _Link:
    """The two connections to a child: replies arrive on the socket, prints on the pipe. Both are read as they fill."""

    def __init__(self, process: Process, channel: socket.socket, prints: io.FileIO) -> None:
        self.process, self.channel, self.prints = process, channel, prints
        self.loop = asyncio.get_running_loop()
        self.output = _Output()
        self.buffer = bytearray()
        self.reply: asyncio.Future[Reply | None] = self.loop.create_future()
        self.wanted = self.forged = 0
        channel.setblocking(False)
        os.set_blocking(prints.fileno(), False)
        self.loop.add_reader(channel.fileno(), self._on_reply)
        self.loop.add_reader(prints, self._on_print)

    def expect(self, number: int) -> asyncio.Future[Reply | None]:
        """Returns a future for the reply to this cell. Its result is None if the child ends first."""
        self.wanted = number
        self.reply = self.loop.create_future()
        return self.reply

    def _on_reply(self) -> None:
        try:
            data = self.channel.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.buffer += data
        if data and self._deliver():
            return
        self.loop.remove_reader(self.channel.fileno())
        if not self.reply.done():
            self.reply.set_result(None)

    def _deliver(self) -> bool:
        """Takes complete frames out of the buffer. Returns False if the cell has written too much to the socket itself."""
        while len(self.buffer) >= LENGTH.size:
            size = LENGTH.size + LENGTH.unpack_from(self.buffer)[0]
            if size > _MAX_FRAME or self.forged > _MAX_FORGED:
                return False
            if len(self.buffer) < size:
                break
            frame = bytes(self.buffer[:size])
            del self.buffer[:size]
            try:
                reply = read_reply(frame, _MAX_TEXT, 0)
            except ValueError:
                reply = None
            if reply is not None and reply.number == self.wanted and not self.reply.done():
                self.reply.set_result(reply)
            else:
                self.forged += 1
        return True

    def _on_print(self) -> None:
        try:
            data = os.read(self.prints.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self.loop.remove_reader(self.prints)
        self.output.add(data)

    def printed(self) -> str:
        """Returns what was printed so far. Prints before a reply are in the pipe when the reply arrives."""
        for _ in range(32):  # bounded: a background process of the cell may print forever
            before = self.output.count
            self._on_print()
            if self.output.count == before:
                break
        return self.output.take()

    async def close(self) -> int | None:
        self.loop.remove_reader(self.channel.fileno())
        self.loop.remove_reader(self.prints)
        self.channel.close()
        self.prints.close()
        return await run_in_thread(self.process.destroy)  # type: ignore[no-any-return]


class PythonSession:
    """Run Python code. Variables are kept between calls; what is printed and the value of the last line come back."""

    limit_s = LIMIT_S
    memory_mb = MEMORY_MB

    def __init__(self) -> None:
        self._link: _Link | None = None
        self._count = 0
        self._lost = False

    async def __call__(self, code: str) -> str | ToolResult:
        note = ""
        if self._link is None:
            self._link = await self._start()
            note, self._lost = ("[a new session was started; earlier variables are lost]" if self._lost else ""), False
        link = self._link
        self._count += 1
        try:
            reply, in_time = await self._exchange(link, code)
        except BaseException:
            # The call was cancelled: the state of the session is unknown, so the next call gets a new one.
            self._link, self._lost = None, True
            link.process.signal(signal.SIGKILL)
            await link.close()
            raise
        parts = [note, link.printed().rstrip("\n")]
        if reply is not None:
            shown = (reply.value, None if reply.interrupted else reply.error)
            parts += [cut(clean(text), _MAX_VALUE) for text in shown if text is not None]
        if reply is None:
            self._link = None
            exit_code = await link.close()
            why = _why(exit_code) if in_time else f"did not stop after {self.limit_s:g} s and was killed"
            parts.append(f"[the session {why}; the next call starts a new one, earlier variables are lost]")
        elif reply.interrupted:
            in_time = False
            parts.append(f"[stopped after {self.limit_s:g} s; the session and its variables are kept]")
        text = "\n".join(part for part in parts if part) or "(no output)"
        return text if in_time else ToolResult(observation=text, error="timeout", limit="time")

    async def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    async def _start(self) -> _Link:
        try:
            link = _Link(*await run_in_thread(_spawn, rlimits(self.memory_mb), self.limit_s))
        except OSError as error:
            raise WorldError(f"a Python session could not be started: {error}") from error
        try:
            await asyncio.wait({link.reply}, timeout=START_S)
            if not link.reply.done() or link.reply.result() is None:
                raise WorldError(f"a Python session did not start: {link.printed()[-500:] or 'it gave no reply'}")
        except BaseException:
            await link.close()
            raise
        return link

    async def _exchange(self, link: _Link, code: str) -> tuple[Reply | None, bool]:
        """Sends a cell and interrupts it at the limit. Returns its reply, None if none came, and whether it came in time."""
        cell = clean(code).encode()
        reply = link.expect(self._count)
        try:
            async with asyncio.timeout(self.limit_s):
                await link.loop.sock_sendall(link.channel, CELL.pack(len(cell), self._count) + cell)
                await asyncio.wait({reply})
        except TimeoutError:
            link.process.signal(signal.SIGINT)
            await asyncio.wait({reply}, timeout=GRACE_S)
            return (reply.result() if reply.done() else None), reply.done() and reply.result() is not None
        except OSError:
            return None, True  # the child ended before it read the cell
        return reply.result(), True


def _spawn(limits: str, limit_s: float) -> tuple[Process, socket.socket, io.FileIO]:
    """Runs in a thread. All that it opens closes when it is collected, so a cancelled start leaves nothing behind."""
    ours, theirs = socket.socketpair()
    with theirs:
        reading, writing = os.pipe()
        prints = io.FileIO(reading)
        with io.FileIO(writing, "w"):
            streams = {"stdin": subprocess.DEVNULL, "stdout": writing, "stderr": subprocess.STDOUT}
            arguments = ["session", str(theirs.fileno()), limits, str(limit_s)]
            process = Process(arguments, files={}, streams=streams, pass_fds=(theirs.fileno(),))
    return process, ours, prints


def _why(exit_code: int | None) -> str:
    if exit_code is not None and exit_code >= 0:
        return f"ended with exit code {exit_code}"
    return f"was ended by signal {-exit_code}" if exit_code else "ended"


def python_tool(*, name: str = "python", limit_s: float = LIMIT_S, memory_mb: int = MEMORY_MB) -> Tool:
    """Returns a `python` tool with this time limit per call and this memory limit per session."""
    rlimits(memory_mb)
    body = {"limit_s": limit_s, "memory_mb": memory_mb, "__doc__": PythonSession.__doc__, "__module__": __name__}
    session = type("PythonSession", (PythonSession,), body)
    # The session enforces `limit_s` itself. The tool's deadline is the last resort, so it lies beyond start, limit and grace.
    return tool(session, name=name, stateful=True, timeout_s=limit_s + START_S + 2 * GRACE_S, register=False)


python_process = python_tool(name="python_process")
