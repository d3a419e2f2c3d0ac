"""A fake Docker engine: its HTTP API on a Unix socket, with each container a plain process that runs the real command.

It knows the calls of `agentfly.resources.backends.docker` and refuses others with 404. As the real engine, it closes a
container's input when the attached client disconnects, and removes the container when it ends. It keeps every configuration
that it received, so that a test can read the restrictions.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import struct
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

IMAGES = ("python:3.12-slim",)


@dataclass
class Container:
    name: str
    config: dict[str, Any]
    process: asyncio.subprocess.Process | None = None
    client: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """As in the real engine, no container is removed during its start: its process would be left."""


class FakeDocker:
    """`with FakeDocker(folder) as docker: docker.socket`."""

    def __init__(self, folder: Path) -> None:
        self.socket = str(folder / "docker.sock")
        self.containers: dict[str, Container] = {}
        self.configs: list[dict[str, Any]] = []
        self.broken = False
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="fake-docker")

    def __enter__(self) -> FakeDocker:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)

    def pids(self) -> list[int]:
        return [one.process.pid for one in list(self.containers.values()) if one.process is not None]

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_unix_server(self._handle, self.socket)
        self._ready.set()
        await self._stop.wait()
        server.close()
        for container in list(self.containers.values()):
            await self._remove(container)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kept = False
        try:
            kept = await self._exchange(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            kept = False  # the client was cancelled in the middle
        finally:
            if not kept:
                writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request. True if its connection is kept, as a container's streams."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, where, _ = head.split("\r\n")[0].split(" ")
        sizes = [line.partition(":")[2] for line in head.split("\r\n") if line.lower().startswith("content-length")]
        body = await reader.readexactly(int(sizes[0])) if sizes else b""
        parts = urlsplit(where)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        attached = self.containers.get(parts.path.split("/")[2]) if parts.path.endswith("/attach") else None
        if attached is not None and not self.broken:
            writer.write(b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n")
            attached.client = (reader, writer)
            return True
        status, answer = await self._answer(method, parts.path, query, body)
        data = b"" if answer is None else json.dumps(answer).encode()
        if method == "GET":  # the engine chunks long answers
            coded = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (data[:7], data[7:]) if part) + b"0\r\n\r\n"
            writer.write(f"HTTP/1.1 {status} X\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + coded)
        else:
            writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        return False

    async def _answer(self, method: str, path: str, query: dict[str, str], body: bytes) -> tuple[int, Any]:
        words = path.strip("/").split("/")
        if self.broken:
            return 500, {"message": "broken"}
        if (method, path) == ("POST", "/containers/create"):
            config = json.loads(body)
            self.configs.append(config)
            if config["Image"] not in IMAGES:
                return 404, {"message": f"No such image: {config['Image']}"}
            self.containers[query["name"]] = Container(query["name"], config)
            return 201, {"Id": query["name"], "Warnings": []}
        if (method, path) == ("GET", "/containers/json"):
            label = json.loads(query["filters"])["label"][0]
            rows = [(one, one.config["Labels"]) for one in self.containers.values()]
            return 200, [
                {"Id": one.name, "Labels": labels, "State": "running" if one.process else "created"}
                for one, labels in rows
                if label in labels
            ]
        found = self.containers.get(words[1]) if len(words) > 1 and words[0] == "containers" else None
        if found is None:
            return 404, {"message": f"No such container: {path}"}
        if method == "POST" and words[2:] == ["start"] and found.client is not None:
            async with found.starting:
                if found.name not in self.containers:
                    return 404, {"message": f"No such container: {path}"}
                await self._start(found)
            return 204, None
        if method == "DELETE":
            await self._remove(found)
            return 204, None
        return 404, {"message": "page not found"}

    async def _start(self, one: Container) -> None:
        words = [sys.executable if word == "python3" else word for word in one.config["Cmd"]]
        env = dict(pair.split("=", 1) for pair in one.config["Env"])
        pipe = asyncio.subprocess.PIPE
        one.process = await asyncio.create_subprocess_exec(*words, env=env, stdin=pipe, stdout=pipe, stderr=pipe, cwd="/tmp")
        make = asyncio.get_running_loop().create_task
        one.tasks = [make(self._feed(one)), make(self._carry(one))]

    async def _feed(self, one: Container) -> None:
        assert one.client is not None
        assert one.process is not None
        assert one.process.stdin is not None
        with contextlib.suppress(ConnectionError):
            while data := await one.client[0].read(1 << 16):
                one.process.stdin.write(data)
                await one.process.stdin.drain()
        if one.config["StdinOnce"]:
            one.process.stdin.close()

    async def _carry(self, one: Container) -> None:
        """Copy the output and errors to the client, and remove the container at the end of both."""
        assert one.client is not None
        process, writer = one.process, one.client[1]
        assert process is not None
        assert process.stdout is not None
        assert process.stderr is not None

        async def copy(kind: int, source: asyncio.StreamReader) -> None:
            while data := await source.read(1 << 16):
                with contextlib.suppress(ConnectionError):
                    writer.write(struct.pack(">BxxxI", kind, len(data)) + data)
                    await writer.drain()

        await asyncio.gather(copy(1, process.stdout), copy(2, process.stderr))
        await process.wait()
        writer.close()
        if one.config["HostConfig"]["AutoRemove"]:
            self.containers.pop(one.name, None)
            one.tasks[0].cancel()

    async def _remove(self, one: Container) -> None:
        async with one.starting:
            self.containers.pop(one.name, None)
        if one.process is not None:
            for pid in descendants(one.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.wait_for(one.process.wait(), 60)
            await asyncio.wait(one.tasks, timeout=60)
        elif one.client is not None:
            one.client[1].close()


def descendants(pid: int) -> list[int]:
    """A process and its descendants, which would end with its PID namespace."""
    found = [pid]
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == pid:
                found += descendants(int(entry.name))
    return found
