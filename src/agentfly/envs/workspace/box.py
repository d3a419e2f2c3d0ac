"""One workspace, as the trainer sees it: a session of the sandbox that speaks with `inside`."""

from __future__ import annotations

import ast
import base64
import json
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from ...aio.threads import run_in_thread
from ...errors import DataError, WorldError
from ...sandbox.limits import CellResult, SandboxLimits, WorkspaceLayout
from ...sandbox.server import SandboxServer
from ...sandbox.session import SandboxSession
from ...sandbox.shared_server import SharedServer, borrow
from . import trees

Fields = Mapping[str, Any]
"""The fields of a task."""
Files = Mapping[str, bytes | None]
"""Files by path; None removes one."""
Fresh = Callable[[Files], AbstractAsyncContextManager["Box"]]
"""Opens another workspace with the task's tree and these files."""
INSIDE = "agentfly_sandbox.envs.workspace.inside"
SLACK_S = 20.0
OUTPUT_CHARS = 200_000  # of one answer of the session: files travel in it, in pieces


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of `Workspace`: see there."""

    tier: str | None = None
    min_tier: str | None = None
    network: str = "none"
    memory_mb: int = 512
    disk_mb: int = 256
    processes: int = 64
    cpu_s: int = 600

    def limits(self) -> SandboxLimits:
        return SandboxLimits(
            memory_mb=self.memory_mb, disk_mb=self.disk_mb, processes=self.processes, cpu_s=self.cpu_s,
            inodes=64 * self.disk_mb, output_chars=OUTPUT_CHARS,
        )  # fmt: skip


class Lost(Exception):
    """The workspace has ended; the text says why."""


class Box:
    """One workspace: a session of the sandbox that speaks with `inside`."""

    def __init__(self, session: SandboxSession, shared: SharedServer) -> None:
        self.session, self.shared = session, shared
        self.root = ""
        self.output = ""  # what programs wrote during the last call
        self._open = True

    async def call(self, name: str, *arguments: object, limit_s: float = 30.0) -> Any:
        """Calls a method of `inside.Inside`. Raises OSError if the workspace reports one, Lost if the workspace is gone."""
        result = await self.session.run(f"inside.call({name!r}, *{arguments!r})", limit_s + SLACK_S)
        self.output = result.stdout
        return _answer(result)

    async def write(self, files: Files) -> None:
        """Writes files; None removes one."""
        for part in _parts(files):
            await self.call("write", part)

    async def run(
        self, argv: list[str], given: bytes = b"", limit_s: float = 60.0, most: int = 1 << 17
    ) -> tuple[int | None, bytes]:
        """Runs a program beside the shell. Returns its status (None: out of time) and its output, cut in the middle."""
        packed = base64.b85encode(given).decode()
        status, head, tail, length = await self.call("run", argv, packed, limit_s, min(most, 60_000), limit_s=limit_s)
        begin, end = base64.b85decode(head), base64.b85decode(tail)
        missing = length - len(begin) - len(end)
        mark = f"\n[... {missing:,} bytes left out ...]\n".encode() if missing > 0 else b""
        return status, begin + mark + end

    async def close(self) -> None:
        if self._open:
            self._open = False
            self.shared.leave()
            await self.session.close()


async def prepare(settings: Settings, fields: Fields) -> None:
    """Starts the sandbox server and unpacks the tree of a task. Raises ConfigError if the tier does not work here."""
    (await _borrow(settings, fields))[2].leave()


async def _borrow(settings: Settings, fields: Fields) -> tuple[str, SandboxServer, SharedServer]:
    layer = await run_in_thread(trees.layer_of, fields)
    server, shared = await borrow(
        settings.tier, settings.min_tier, settings.limits(), preload=(INSIDE,),
        layout=WorkspaceLayout(trees.store(), settings.network),
    )  # fmt: skip
    return layer, server, shared


async def open_box(settings: Settings, fields: Fields, files: Files | None = None) -> Box:
    """A new workspace with the tree of the task, and these files over it. Raises ConfigError if the tier does not work here."""
    layer, server, shared = await _borrow(settings, fields)
    try:
        box = Box(await server.session(layer), shared)
    except BaseException:
        shared.leave()
        raise
    try:
        started = await box.session.run("from agentfly_sandbox.envs.workspace import inside", SLACK_S)
        if started.error:
            raise WorldError(f"a workspace could not be started: {started.error}")
        small = trees.small_files(fields["files"]) if fields.get("files") else {}
        first, *more = _parts({**small, **(files or {})}) or [""]
        box.root = await box.call("begin", first)
        for part in more:
            await box.call("write", part)
        return box
    except Lost as error:
        await box.close()
        raise WorldError(f"a workspace could not be started: {error}") from error
    except BaseException:
        await box.close()
        raise


def _answer(result: CellResult) -> Any:
    """The value that `inside.call` returned. It is checked: the session is behind the walls."""
    if not result.alive:
        raise Lost((result.error or "it is gone").removeprefix("the session has ended and its variables are lost: "))
    if result.error or result.value is None:
        raise Lost(f"it did not answer ({(result.error or 'no value').splitlines()[-1]})")
    try:
        answer = json.loads(ast.literal_eval(result.value))
        failed = answer.get("error")
    except (ValueError, SyntaxError, AttributeError, TypeError, MemoryError, RecursionError) as error:
        raise Lost("its answer cannot be read") from error
    if failed is not None:
        raise OSError(str(failed)[:200])
    return answer.get("value")


def _parts(files: Files) -> list[str]:
    """Files as arguments of `Inside.write`, each part small enough for one cell."""
    parts: list[dict[str, list[object]]] = []
    size = 1 << 30
    for path, data in files.items():
        if data is not None and len(data) > 1 << 20:
            raise DataError(f"the file {path!r} has {len(data):,} bytes; at most 1 MB can be written into a workspace")
        if size + len(data or b"") > 1 << 20:
            parts.append({})
            size = 0
        parts[-1][path] = [0o644, None if data is None else base64.b85encode(data).decode()]
        size += len(data or b"") + len(path)
    return [base64.b85encode(zlib.compress(json.dumps(part).encode(), 1)).decode() for part in parts]
