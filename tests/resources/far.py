"""The placements outside this process, for tests that hold in each of them.

Docker and enroot are fakes that run the real worker command as a process. The server of `http` runs in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentfly.resources import Spec, spec_of
from agentfly.resources.rpc.env_server import EnvServer

from . import fake_enroot
from .fake_docker import FakeDocker

PLACES = ("sandbox", "docker", "enroot", "http")
CONTAINERS = ("docker", "enroot")


class ServerThread:
    """`with ServerThread(World) as server: server.url`."""

    def __init__(self, thing: Any, **options: Any) -> None:
        self._thing, self._options = thing, options
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="env-server")

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with EnvServer(self._thing, **self._options) as self.server:
            self.url = self.server.url
            self._ready.set()
            await self._stop.wait()

    def __enter__(self) -> ServerThread:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():  # a test may have ended it before
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        assert not self._thread.is_alive()


class Far:
    """One of `PLACES`, with the engine or server that it needs."""

    def __init__(self, name: str, folder: Path, stack: contextlib.ExitStack) -> None:
        self.name, self._stack = name, stack
        self.docker = stack.enter_context(FakeDocker(folder)) if name == "docker" else None
        if name == "enroot":
            self.asked = fake_enroot.install(folder)
            context = stack.enter_context(pytest.MonkeyPatch.context())
            context.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def settings(self, thing: Any) -> dict[str, Any]:
        """The settings of a pool with this placement."""
        if self.name == "sandbox":
            return {"placement": "sandbox"}
        if self.docker is not None:
            return {"placement": "container", "image": "python:3.12-slim", "socket": self.docker.socket}
        if self.name == "enroot":
            return {"placement": "container", "engine": "enroot", "image": "python"}
        server = self._stack.enter_context(ServerThread(thing, placement="process"))
        return {"placement": "http", "url": server.url}

    def spec(self, thing: Any, **more: Any) -> Spec:
        return spec_of(thing, **{**self.settings(thing), **more})


@contextlib.contextmanager
def far_place(name: str, folder: Path) -> Iterator[Far]:
    with contextlib.ExitStack() as stack:
        yield Far(name, folder, stack)


def processes() -> set[int]:
    """Every descendant of this process."""
    parents = {}
    for entry in Path("/proc").iterdir():
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, ValueError):
            continue
    found, grown = {os.getpid()}, True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        found, grown = found | more, bool(more)
    return found - {os.getpid()}
