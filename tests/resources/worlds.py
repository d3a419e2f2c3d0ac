"""Small environments for the tests of `resources`, in a module that worker processes can import."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from agentfly import errors
from agentfly.errors import ToolError
from agentfly.resources import Cost, Environment, Lease
from agentfly.testing import GuessEnv
from agentfly.types import Task, ToolResult

TASK = Task("t", (), {"secret": 5})
THREADS_OF_THE_PROCESS = {"agentfly-tool", "agentfly-stalls"}
"""Threads that outlive every environment: idle ones of `run_in_thread`, and the one that looks for calls that stall."""


def task(number: int) -> Task:
    return Task(f"task-{number}", (), {"number": number})


class Board(Environment):
    """Keeps what was written. `open` counts the open instances of each class."""

    cost = Cost(cpu=0.1, memory_mb=10, start_s=0)
    open: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.task: Task | None = None
        self.closed = False
        self.open[type(self).__name__] += 1

    def reset(self, task: Task) -> str:
        if task.fields.get("refuse"):
            raise RuntimeError("no such board")
        self.task, self.notes = task, []
        return f"board of {task.id}"

    def write(self, note: str) -> int:
        self.notes.append(note)
        return len(self.notes)

    def read(self) -> list[str]:
        return self.notes

    async def linger(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "done"

    def block(self, seconds: float) -> str:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.005)
        return "done"

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.open[type(self).__name__] -= 1


class Chalk(Board):
    """A second kind."""


class Once(Board):
    reusable = False


class Library(Board):
    max_chains = 3


class Sickly(Board):
    sick = False

    def healthy(self) -> bool:
        return not self.sick


class Worker(Board):
    """Methods that only make sense in a worker process."""

    placement = "process"

    def pid(self) -> int:
        return os.getpid()

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self, code: int) -> None:
        os._exit(code)

    def odd(self) -> Any:
        return {1, 2}

    def numbered(self) -> Any:
        return {1: "one"}

    def picture(self) -> ToolResult:
        return ToolResult(observation="a picture", image=b"\x89PNG", reward=0.5, done=True)

    def fail(self, kind: str) -> None:
        if kind == "tool":
            raise ToolError("for the model to read")
        if kind == "value":
            raise ValueError("not that")
        if kind == "exit":
            raise SystemExit(3)
        raise Strange("very odd")

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def litter(self) -> str:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            return file.name

    def spawn_child(self) -> int:
        return subprocess.Popen(["sleep", "1000"]).pid

    def hoard(self, megabytes: int) -> None:
        self.hoarded = bytearray(os.urandom(1 << 20) * megabytes)


class Curious(Board):
    """Tries to read, write and connect beyond its walls."""

    def look(self, path: str) -> str:
        try:
            return Path(path).read_text()[:100]
        except OSError as error:
            return type(error).__name__

    def put(self, path: str) -> str:
        try:
            Path(path).write_text("x")
        except OSError as error:
            return type(error).__name__
        return "written"

    def call_out(self) -> str:
        try:
            socket.create_connection(("127.0.0.1", 1), 1)
        except OSError as error:
            return type(error).__name__
        return "connected"

    def hoard(self, megabytes: int) -> int:
        return len(bytearray(megabytes << 20))


class Strange(Exception):
    pass


class NeverUp(Board):
    def __init__(self) -> None:
        raise RuntimeError("the display is missing")


class SlowUp(Board):
    def __init__(self) -> None:
        time.sleep(30)


def limit_calls(lease: Lease, kind: type, seconds: float) -> None:
    """Give the calls of one instance another time limit than its pool's, which the other instances keep."""
    instance = lease.handles[kind.__name__].slot.instance
    instance.spec = replace(instance.spec, call_timeout_s=seconds)


def soon_gone(pids: Iterable[int]) -> bool:
    """Whether all processes end within two minutes."""
    until = time.monotonic() + 120
    while any(exists(pid) for pid in pids):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def exists(pid: int) -> bool:
    """Whether a process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class Shaky(GuessEnv):
    """Fails in 5 % of the calls of reset, guess and close."""

    def _fault(self) -> None:
        if random.random() < 0.05:
            raise RuntimeError("a fault")

    def reset(self, task: Any) -> Any:
        self._fault()
        return super().reset(task)

    def guess(self, n: int) -> Any:
        self._fault()
        return super().guess(n)

    def is_solved(self) -> bool:
        return self.solved

    def close(self) -> None:
        self._fault()
        super().close()


class Digger:
    """An environment whose code a model controls."""

    def reset(self, task: Any) -> None: ...

    def dig(self) -> str:
        here = os.environ["TMPDIR"]
        os.chdir(here)
        for _ in range(1500):
            os.mkdir("a")
            os.chdir("a")
        return here

    def lie(self, name: str) -> None:
        raise getattr(errors, name)("stop the run")

    def flood(self) -> list[Any]:
        return [[] for _ in range(200_000)]

    def close(self) -> None: ...


class Scoped(Environment):
    """Holds an anyio task group from `reset` to `close`, as clients of servers do. The group fails if the task says `dead`."""

    closed: ClassVar[list[str]] = []
    """Per instance, what leaving the group raised."""
    group: Any = None

    async def reset(self, task: Task) -> None:
        import anyio  # late: this module is also imported in images without it

        await self.close()
        self.group = await anyio.create_task_group().__aenter__()
        self.group.start_soon(self.receive, task.fields.get("dead"))
        self.gone = anyio.Event()
        if task.fields.get("dead") == "reset":
            await asyncio.Event().wait()

    async def receive(self, dead: str | None) -> None:
        if dead == "reset":
            raise OSError("the server ended")
        if dead:
            await self.gone.wait()
            raise OSError("the server ended")
        await asyncio.Event().wait()

    async def ask(self, wait: bool = False) -> int:
        """With `dead = "call"` the server ends during this call."""
        self.gone.set()
        await (asyncio.Event().wait() if wait else asyncio.sleep(0))
        return 7

    def hang_up(self) -> None:
        self.gone.set()

    async def close(self) -> None:
        if self.group is not None:
            group, self.group = self.group, None
            group.cancel_scope.cancel()
            try:
                await group.__aexit__(None, None, None)
            except BaseException as error:
                self.closed.append(f"{type(error).__name__}")
                raise
            self.closed.append("")
