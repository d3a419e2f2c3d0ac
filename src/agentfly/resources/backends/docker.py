"""Docker's HTTP API over its Unix socket: the few calls that a worker's container needs.

Each call opens a connection, has a deadline, and reads a bounded answer. `attach` keeps its connection, which then carries the
container's standard streams (`Streams`). If the engine refuses a call, `DockerError` has its message. An engine that is reached
over TCP is not supported: anyone who can connect to it controls its machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import struct
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

from ...errors import ConfigError, WorldError

DEFAULT_SOCKET = "/var/run/docker.sock"
TIMEOUT_S = 60.0
MAX_BODY = 8 << 20
MAX_PART = 64 << 20
TAIL = 500
STDOUT = 1
_HEADER = struct.Struct(">BxxxI")


class DockerError(WorldError):
    """The engine refused a call (`status` is the HTTP status) or could not be reached (0)."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


def socket_path(chosen: str | None) -> str:
    """The path of the engine's socket. Raises ConfigError if there is none."""
    host = os.environ.get("DOCKER_HOST", "")
    if chosen is None and host and not host.startswith("unix://"):
        raise ConfigError(f"$DOCKER_HOST is {host!r}; only a unix socket is used: set the option 'socket', or unset it")
    path = chosen or host.removeprefix("unix://") or DEFAULT_SOCKET
    if not os.path.exists(path):
        raise ConfigError(
            f"no Docker engine is here (there is no {path}): install and start Docker, name its socket in the option "
            f"'socket', or use engine = 'enroot' or placement = 'sandbox', which needs none"
        )
    return path


class Docker:
    def __init__(self, socket: str) -> None:
        self.socket = socket

    async def call(self, method: str, path: str, query: dict[str, Any] | None = None, body: Any = None) -> Any:
        """Send one request and return its JSON answer, or None. Raises DockerError."""
        import httpx

        data = bytearray()
        transport = httpx.AsyncHTTPTransport(uds=self.socket, verify=False)  # a Unix socket has no TLS to verify
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                httpx.AsyncClient(transport=transport, base_url="http://docker", timeout=None, trust_env=False) as client,
                client.stream(method, path, params=query, json=body) as response,
            ):
                async for part in response.aiter_bytes():
                    data += part
                    if len(data) > MAX_BODY:
                        raise DockerError(f"Docker's answer to {method} {path} is too long")
        except TimeoutError:
            raise DockerError(f"Docker did not answer {method} {path} within {TIMEOUT_S:g} s") from None
        except httpx.HTTPError as error:
            raise DockerError(f"Docker does not answer at {self.socket}: {error or type(error).__name__}") from error
        try:
            answer = json.loads(data) if data.strip() else None
        except (ValueError, RecursionError):
            answer = data.decode("utf-8", "replace")
        if response.status_code >= 400:
            said = answer.get("message") if isinstance(answer, dict) else answer
            raise DockerError(f"Docker refused {method} {path}: {said or response.status_code}", response.status_code)
        return answer

    async def attach(self, container: str) -> Streams:
        """The standard streams of a container that has not been started, so that no output is missed."""
        request = (
            f"POST /containers/{quote(container)}/attach?stream=1&stdin=1&stdout=1&stderr=1 HTTP/1.1\r\n"
            "Host: docker\r\nContent-Length: 0\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
        )
        writer = None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(self.socket)
                writer.write(request.encode())
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                status = head.split(" ", 2)[1] if head.startswith("HTTP/1.") else ""
                if status not in ("101", "200"):
                    said = (await reader.read(TAIL)).decode("utf-8", "replace").strip()
                    raise DockerError(f"Docker refused to attach to a container: {said or head[:80]}")
        except BaseException as error:
            if writer is not None:
                writer.transport.abort()
            if isinstance(error, TimeoutError):
                raise DockerError(f"Docker did not attach to a container within {TIMEOUT_S:g} s") from None
            if isinstance(error, OSError | EOFError | ValueError | asyncio.LimitOverrunError):
                raise DockerError(f"Docker does not answer at {self.socket}: {error}") from error
            raise
        return Streams(reader, writer)

    async def create(self, name: str, config: dict[str, Any]) -> str:
        """Create a container and return its id. Raises ConfigError if the image is not here: images are never pulled."""
        try:
            return str((await self.call("POST", "/containers/create", {"name": name}, config))["Id"])
        except DockerError as error:
            if error.status == 404:
                image = config["Image"]
                raise ConfigError(f"Docker has no image {image!r} here: docker pull {image}") from error
            raise

    async def start(self, container: str) -> None:
        await self.call("POST", f"/containers/{quote(container)}/start")

    async def remove(self, container: str) -> None:
        """Kill and remove a container. One that is gone, or being removed, is no error."""
        try:
            await self.call("DELETE", f"/containers/{quote(container)}", {"force": "true", "v": "true"})
        except DockerError as error:
            if error.status not in (404, 409):
                raise

    async def labelled(self, label: str) -> list[tuple[str, str, str]]:
        """The id, the label's value and the state of every container that has the label."""
        rows = await self.call("GET", "/containers/json", {"all": "true", "filters": json.dumps({"label": [label]})})
        return [(row["Id"], row.get("Labels", {}).get(label, ""), row.get("State", "")) for row in rows or ()]


class Streams:
    """A container's standard streams on one connection. Each part of the output is marked as standard output or error."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._errors = b""

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def parts(self) -> AsyncIterator[bytes]:
        """The standard output, part by part."""
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                kind, size = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
                if kind > 2 or size > MAX_PART:
                    return
                data = await self._reader.readexactly(size)
                if kind == STDOUT:
                    yield data
                else:
                    self._errors = (self._errors + data)[-4 * TAIL :]

    @property
    def tail(self) -> str:
        """The end of the standard error."""
        return self._errors.decode("utf-8", "replace").strip()[-TAIL:]

    def close(self) -> None:
        self._writer.transport.abort()
