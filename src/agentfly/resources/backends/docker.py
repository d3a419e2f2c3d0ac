"""Docker's HTTP API over its unix socket: the few calls that a worker's container needs, and nothing of a package.

Each request opens a connection, has a deadline, and reads at most a few MiB; `attach` keeps its connection, which is then the
container's standard input, output and error (`Streams`). A refusal of the engine is a `DockerError` with its own words. Talking
to an engine over TCP is refused: whoever can do that owns the machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
from typing import Any
from urllib.parse import quote, urlencode

from ...errors import ConfigError, WorldError

DEFAULT_SOCKET = "/var/run/docker.sock"
TIMEOUT_S = 60.0
MAX_BODY = 8 << 20
TAIL = 500
_HEADER = struct.Struct(">BxxxI")


class DockerError(WorldError):
    """The engine said no; `status` is its number."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


def socket_path(chosen: str | None) -> str:
    """Where the engine listens; a ConfigError with the cure where it does not."""
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

    async def call(
        self, method: str, path: str, query: dict[str, Any] | None = None, body: Any = None, timeout_s: float = TIMEOUT_S
    ) -> Any:
        """One request; what it answered, as JSON, or None."""
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await self._send(method, path, query, body)
                try:
                    status, headers = await _head(reader)
                    data = await _body(reader, status, headers)
                finally:
                    writer.close()
        except TimeoutError:
            raise DockerError(f"Docker did not answer {method} {path} within {timeout_s:g} s") from None
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            raise DockerError(f"Docker at {self.socket} cannot be talked to: {error}") from error
        try:
            answer = json.loads(data) if data.strip() else None
        except ValueError:
            answer = data.decode("utf-8", "replace")
        if status >= 400:
            said = answer.get("message") if isinstance(answer, dict) else answer
            raise DockerError(f"Docker refused {method} {path}: {said or status}", status)
        return answer

    async def attach(self, container: str) -> Streams:
        """Its standard streams, taken before it starts, so that nothing is missed."""
        query = {"stream": 1, "stdin": 1, "stdout": 1, "stderr": 1}
        try:
            async with asyncio.timeout(TIMEOUT_S):
                reader, writer = await self._send("POST", f"/containers/{quote(container)}/attach", query, None, upgrade=True)
                try:
                    status, headers = await _head(reader)
                    if status not in (101, 200):
                        said = (await _body(reader, status, headers)).decode("utf-8", "replace").strip()
                        raise DockerError(f"Docker refused to attach to a container: {said or status}", status)
                except BaseException:
                    writer.close()
                    raise
        except TimeoutError:
            raise DockerError(f"Docker did not attach to a container within {TIMEOUT_S:g} s") from None
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            raise DockerError(f"Docker at {self.socket} cannot be talked to: {error}") from error
        return Streams(reader, writer)

    async def _send(
        self, method: str, path: str, query: dict[str, Any] | None, body: Any, upgrade: bool = False
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(self.socket, limit=1 << 20)
        data = b"" if body is None else json.dumps(body).encode()
        where = f"{path}?{urlencode(query)}" if query else path
        lines = [f"{method} {where} HTTP/1.1", "Host: docker", f"Content-Length: {len(data)}"]
        lines += ["Connection: Upgrade", "Upgrade: tcp"] if upgrade else ["Connection: close"]
        lines += ["Content-Type: application/json"] if data else []
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        return reader, writer

    # ---- the calls

    async def create(self, name: str, config: dict[str, Any]) -> str:
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
        """Kill and remove; one that is gone already is fine."""
        try:
            await self.call("DELETE", f"/containers/{quote(container)}", {"force": "true", "v": "true"})
        except DockerError as error:
            if error.status not in (404, 409):  # gone, or on its way out
                raise

    async def labelled(self, label: str) -> list[tuple[str, str, str]]:
        """Id, the label's value and the state of every container that has it."""
        found = await self.call("GET", "/containers/json", {"all": "true", "filters": json.dumps({"label": [label]})})
        return [(row["Id"], row.get("Labels", {}).get(label, ""), row.get("State", "")) for row in found or ()]


class Streams:
    """A container's standard streams on one connection: what it writes comes in parts, each marked as output or error."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.said = b""

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def read(self) -> bytes:
        """The next of its output; empty at the end. The end of its error is kept in `said`."""
        while True:
            try:
                kind, size = _HEADER.unpack(await self._reader.readexactly(8))
                if kind > 2 or size > 64 << 20:
                    raise ValueError("not a stream of a container without a terminal")
                data = await self._reader.readexactly(size)
            except (asyncio.IncompleteReadError, OSError, ValueError):
                return b""
            if kind == 1 and data:
                return data
            self.said = (self.said + data)[-4 * TAIL :]

    @property
    def tail(self) -> str:
        return self.said.decode("utf-8", "replace").strip()[-TAIL:]

    def close(self) -> None:
        self._writer.transport.abort()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError as error:
        raise ValueError("its answer has no end") from error
    first, *rest = raw.decode("latin-1").split("\r\n")
    words = first.split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
        raise ValueError(f"it does not speak HTTP ({first[:80]!r})")
    pairs = (line.partition(":") for line in rest if line)
    return int(words[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _body(reader: asyncio.StreamReader, status: int, headers: dict[str, str]) -> bytes:
    if status in (204, 304) or status < 200:
        return b""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        parts: list[bytes] = []
        while size := int((await reader.readline()).split(b";")[0], 16):
            if size + sum(map(len, parts)) > MAX_BODY:
                raise ValueError("its answer is too long")
            parts.append(await reader.readexactly(size))
            await reader.readexactly(2)
        return b"".join(parts)
    if "content-length" in headers:
        size = int(headers["content-length"])
        if size > MAX_BODY:
            raise ValueError("its answer is too long")
        return await reader.readexactly(size)
    data = bytearray()
    while part := await reader.read(1 << 16):
        data += part
        if len(data) > MAX_BODY:
            raise ValueError("its answer is too long")
    return bytes(data)
