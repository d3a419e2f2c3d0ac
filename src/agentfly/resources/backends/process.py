"""Placement `process`: instances in worker processes of this machine, which `spawn` starts."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ..rpc.client import Worker
from ..rpc.frames import pack_hello
from ..spec import importable
from .remote import RemoteBackend
from .spawn import SPAWNER, WorkerProcess


class ProcessWorker(Worker):
    process: WorkerProcess | None = None

    async def connect(self, number: int) -> None:
        target, options = importable(self.spec)
        hello = {"path": sys.path, "target": target, "options": options, "per_process": self.spec.per_process}
        await self.spawn(number, self.spec.pass_env, None, hello)
        assert self.process is not None
        self.pid = self.process.popen.pid

    async def spawn(
        self, number: int, pass_env: Sequence[str], command: Sequence[str] | None, hello: Mapping[str, Any]
    ) -> None:
        """Start the process, connect to its socket and send the hello."""
        self.process = await SPAWNER.spawn(number, pass_env, command)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=self.process.channel)
        self.write(pack_hello(hello))

    async def terminate(self, wanted: bool) -> str:
        process = self.process
        if process is None:
            return "before it started"
        printed = process.tail()
        await SPAWNER.terminate(process)
        return self.describe_end(process.popen.returncode) + (f"; it said: {printed}" if printed else "")

    def describe_end(self, code: int | None) -> str:
        if code is not None and code < 0:
            try:
                return f"(killed by {signal.Signals(-code).name})"
            except ValueError:
                return f"(killed by signal {-code})"
        return f"(exit code {code})"

    def tidy(self) -> None:
        if self.process is not None:
            self.process.tidy()


class ProcessBackend(RemoteBackend):
    worker_class = ProcessWorker

    def check_usable(self) -> None:
        importable(self.spec)
