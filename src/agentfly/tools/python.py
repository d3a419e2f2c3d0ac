"""`python_process`: a session of Python for each chain, in a subprocess that keeps its variables from call to call.

This is process isolation, not a sandbox. It protects the training process from crashes, hangs, memory bombs and leaked
variables; it does not stop code that means harm: the child runs as the same user, sees the same files and the same network.
Do not let strangers' models use it on a machine that matters. A session is never shared between chains, and nothing is ever
scored from inside one.

A call that runs too long is interrupted, which keeps the session where the code gives way; where it does not, the session is
killed, and the model is told that its variables are gone. `run_code` runs a program once, in a fresh process with the same
limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import math
import os
import signal
import socket
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import WorldError
from ..types import ToolResult
from .definition import Tool, tool
from .process import Process, rlimits
from .text import clean, cut
from .threads import run_in_thread

LIMIT_S = 20.0
MEMORY_MB = 1024
START_S = 30.0
GRACE_S = 2.0
"""How long a session may take to give way after it was interrupted."""
_MAX_FRAME = 16 << 20
_HEAD, _TAIL = 4_000, 2_000  # of what a call printed
_MAX_VALUE = 3_000
_MAX_FILE = 1_000_000


@dataclass(frozen=True, slots=True)
class CodeRun:
    """What a program did. `exit_code` is negative where a signal ended it."""

    stdout: str
    stderr: str
    exit_code: int
    timed_out: bool


async def run_code(code: str, *, stdin: str = "", timeout_s: float, memory_mb: int = MEMORY_MB) -> CodeRun:
    """Run `code` as a program in a fresh process. Cancelling ends the process too."""
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
        process.signal(signal.SIGKILL)  # also what it has left running
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
        return ""  # the program has removed it


class _Output:
    """What a call prints: the beginning, the end, and how much there was between."""

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
    """The two ways out of a child, read as they fill: replies over the socket, prints over the pipe."""

    def __init__(self, process: Process, channel: socket.socket, prints: io.FileIO) -> None:
        self.process, self.channel, self.prints = process, channel, prints
        self.loop = asyncio.get_running_loop()
        self.output = _Output()
        self.buffer = bytearray()
        self.reply: asyncio.Future[dict[str, Any] | None] = self.loop.create_future()
        self.wanted = 0
        channel.setblocking(False)
        os.set_blocking(prints.fileno(), False)
        self.loop.add_reader(channel.fileno(), self._on_reply)
        self.loop.add_reader(prints, self._on_print)

    def expect(self, number: int) -> asyncio.Future[dict[str, Any] | None]:
        """The reply to come, or None where the child ends first."""
        self.wanted = number
        self.reply = self.loop.create_future()
        return self.reply

    def _on_reply(self) -> None:
        try:
            data = self.channel.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.buffer += data
        while len(self.buffer) >= 4:
            (length,) = struct.unpack_from(">I", self.buffer)
            if length > _MAX_FRAME:
                data = b""  # no reply of ours is so long: someone writes on our line
                break
            if len(self.buffer) < 4 + length:
                break
            body = bytes(self.buffer[4 : 4 + length])
            del self.buffer[: 4 + length]
            self._deliver(body)
        if not data:
            self.loop.remove_reader(self.channel.fileno())
            if not self.reply.done():
                self.reply.set_result(None)

    def _deliver(self, body: bytes) -> None:
        with contextlib.suppress(ValueError, RecursionError):  # not a reply of ours either
            reply = json.loads(body)
            if isinstance(reply, dict) and reply.get("id") == self.wanted and not self.reply.done():
                self.reply.set_result(reply)

    def _on_print(self) -> None:
        try:
            data = os.read(self.prints.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self.loop.remove_reader(self.prints)
        self.output.add(data)

    def printed(self) -> str:
        """Everything printed so far. What was written before a reply is in the pipe by then; later prints are not chased."""
        for _ in range(32):
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
            # Cancelled in the middle: whatever the session is doing, it is of no use any more.
            self._link, self._lost = None, True
            link.process.signal(signal.SIGKILL)
            await link.close()
            raise
        parts = [note, link.printed().rstrip("\n")]
        if reply is not None:
            parts += [cut(clean(str(reply[key])), _MAX_VALUE) for key in ("value", "error") if reply.get(key) is not None]
        if reply is None:
            self._link = None
            exit_code = await link.close()
            why = _why(exit_code) if in_time else f"did not stop after {self.limit_s:g} s and was killed"
            parts.append(f"[the session {why}; the next call starts a new one, earlier variables are lost]")
        elif reply.get("interrupted"):
            in_time = False
            parts.append(f"[stopped after {self.limit_s:g} s; the session and its variables are kept]")
        text = "\n".join(part for part in parts if part) or "(no output)"
        return text if in_time else ToolResult(observation=text, error="timeout")

    async def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    async def _start(self) -> _Link:
        try:
            link = _Link(*await run_in_thread(_spawn, rlimits(self.memory_mb)))
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

    async def _exchange(self, link: _Link, code: str) -> tuple[dict[str, Any] | None, bool]:
        """Send a cell, interrupt it at the limit. Its reply (None: none came) and whether that was in time."""
        cell = json.dumps({"id": self._count, "code": clean(code), "limit_s": self.limit_s}).encode()
        reply = link.expect(self._count)
        try:
            async with asyncio.timeout(self.limit_s):
                await link.loop.sock_sendall(link.channel, struct.pack(">I", len(cell)) + cell)
                await asyncio.wait({reply})
        except TimeoutError:
            link.process.signal(signal.SIGINT)
            await asyncio.wait({reply}, timeout=GRACE_S)
            return (reply.result() if reply.done() else None), reply.done() and reply.result() is not None
        except OSError:
            return None, True  # it ended before it had read the cell
        return reply.result(), True


def _spawn(limits: str) -> tuple[Process, socket.socket, io.FileIO]:
    """In a thread. Everything opened here closes itself when it is dropped, so a start that is cancelled leaves nothing."""
    ours, theirs = socket.socketpair()
    with theirs:
        reading, writing = os.pipe()
        prints = io.FileIO(reading)
        with io.FileIO(writing, "w"):
            streams = {"stdin": subprocess.DEVNULL, "stdout": writing, "stderr": subprocess.STDOUT}
            arguments = ["session", str(theirs.fileno()), limits]
            process = Process(arguments, files={}, streams=streams, pass_fds=(theirs.fileno(),))
    return process, ours, prints


def _why(exit_code: int | None) -> str:
    if exit_code is not None and exit_code >= 0:
        return f"ended with exit code {exit_code}"
    return f"was ended by signal {-exit_code}" if exit_code else "ended"


def python_tool(*, name: str = "python", limit_s: float = LIMIT_S, memory_mb: int = MEMORY_MB) -> Tool:
    """A `python` tool with its own time limit for a call and its own memory limit for a session."""
    rlimits(memory_mb)
    body = {"limit_s": limit_s, "memory_mb": memory_mb, "__doc__": PythonSession.__doc__, "__module__": __name__}
    session = type("PythonSession", (PythonSession,), body)
    # The tool's own deadline is only the last resort: it lies beyond everything a session does about time itself.
    return tool(session, name=name, stateful=True, timeout_s=limit_s + START_S + 2 * GRACE_S, register=False)


python_process = python_tool(name="python_process")
