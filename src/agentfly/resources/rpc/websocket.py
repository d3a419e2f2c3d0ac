"""WebSocket (RFC 6455), as much as an environment's calls need: bytes in, binary messages out, and back, on either side.

The client's half of the handshake is `connect`; the server's answer is `accept_line`. `WebSocket` then sends and receives
messages, answers pings, and knows when it last heard from the other side. A frame that breaks the rules, a message beyond the
limit, or text where bytes are due ends the connection: `receive` gives None, and `why` says what was wrong. No extensions, no
compression.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import struct
from collections.abc import Iterable
from urllib.parse import urlsplit

from ...errors import ConfigError, WorldError
from ..backends.options import SCHEMES
from .frames import MAX_FRAME

CONTINUE, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
MAX_HEAD = 16 << 10
MAX_MESSAGE = MAX_FRAME + 4


class Broken(Exception):
    """The other side does not keep to the protocol."""


def accept_word(key: str) -> str:
    return base64.b64encode(hashlib.sha1(key.encode() + GUID).digest()).decode()


def encode(opcode: int, payload: bytes, masked: bool) -> bytes:
    """One whole frame."""
    size = len(payload)
    mark = 0x80 if masked else 0
    if size < 126:
        head = struct.pack(">BB", 0x80 | opcode, mark | size)
    elif size < 1 << 16:
        head = struct.pack(">BBH", 0x80 | opcode, mark | 126, size)
    else:
        head = struct.pack(">BBQ", 0x80 | opcode, mark | 127, size)
    if not masked:
        return head + payload
    key = os.urandom(4)
    return head + key + mask(payload, key)


def mask(payload: bytes, key: bytes) -> bytes:
    """Its own inverse. As one large number: byte by byte it would take a hundred times as long."""
    size = len(payload)
    repeated = (key * (size // 4 + 1))[:size]
    return (int.from_bytes(payload, "big") ^ int.from_bytes(repeated, "big")).to_bytes(size, "big")


class Decoder:
    """Bytes in, (opcode, payload) of whole messages out. `masked`: whether frames must be, which those of a client are."""

    def __init__(self, masked: bool, limit: int = MAX_MESSAGE) -> None:
        self._masked, self._limit = masked, limit
        self._buffer = bytearray()
        self._parts: list[bytes] = []
        self._opcode: int | None = None

    def feed(self, data: bytes) -> Iterable[tuple[int, bytes]]:
        self._buffer += data
        while (found := self._frame()) is not None:
            final, opcode, payload = found
            if opcode >= CLOSE:
                if not final or len(payload) > 125 or opcode not in (CLOSE, PING, PONG):
                    raise Broken("a bad control frame")
                yield opcode, payload
                continue
            if (opcode == CONTINUE) != (self._opcode is not None) or opcode > BINARY:
                raise Broken("frames in the wrong order")
            if opcode != CONTINUE:
                self._opcode = opcode
            self._parts.append(payload)
            if sum(map(len, self._parts)) > self._limit:
                raise Broken(f"a message above {self._limit} bytes")
            if final:
                whole, kind = b"".join(self._parts), self._opcode
                self._parts, self._opcode = [], None
                assert kind is not None
                yield kind, whole

    def _frame(self) -> tuple[bool, int, bytes] | None:
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        first, second = buffer[0], buffer[1]
        if first & 0x70:
            raise Broken("a reserved bit is set")
        if bool(second & 0x80) != self._masked:
            raise Broken("a client's frames are masked, a server's are not")
        size, start = second & 0x7F, 2
        if size >= 126:
            form = ">H" if size == 126 else ">Q"
            start += struct.calcsize(form)
            if len(buffer) < start:
                return None
            size = struct.unpack_from(form, buffer, 2)[0]
        if size > self._limit:
            raise Broken(f"a frame of {size} bytes")
        end = start + (4 if self._masked else 0) + size
        if len(buffer) < end:
            return None
        if self._masked:
            payload = mask(bytes(buffer[start + 4 : end]), bytes(buffer[start : start + 4]))
        else:
            payload = bytes(buffer[start:end])
        del buffer[:end]
        return bool(first & 0x80), first & 0x0F, payload


class WebSocket:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, client: bool) -> None:
        self._reader, self._writer, self._client = reader, writer, client
        self._decoder = Decoder(masked=not client)
        self._ready: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self.heard = self._loop.time()
        self.why = ""

    def send(self, data: bytes, opcode: int = BINARY) -> None:
        if not self._writer.is_closing():
            self._writer.write(encode(opcode, data, self._client))

    async def drain(self) -> None:
        await self._writer.drain()

    async def receive(self) -> bytes | None:
        """The next message; None at the end. It waits as long as the connection lives, which `watch` makes sure of."""
        while not self._ready:
            try:
                data = await self._reader.read(1 << 16)
                if not data:
                    return None
                self.heard = self._loop.time()
                for opcode, payload in self._decoder.feed(data):
                    if opcode == BINARY:
                        self._ready.append(payload)
                    elif opcode == PING:
                        self.send(payload, PONG)
                    elif opcode == CLOSE:
                        self.why = payload[2:].decode("utf-8", "replace")
                        self.send(payload[:2], CLOSE)
                        return None
                    elif opcode == TEXT:
                        raise Broken("text where bytes are due")
            except Broken as error:
                self.why = f"it does not keep to the protocol: {error}"
                self.end(1002)
                return None
            except OSError:
                return None
        return self._ready.pop(0)

    async def watch(self, ping_s: float) -> None:
        """Ask for a sign of life now and then; end a connection that gives none."""
        while not self._writer.is_closing():
            await asyncio.sleep(ping_s)
            if self._loop.time() - self.heard > 3 * ping_s:
                self.why = f"nothing was heard for {3 * ping_s:g} s"
                self.abort()
                return
            self.send(b"", PING)

    def end(self, code: int = 1000, reason: str = "") -> None:
        """Say goodbye and close, without waiting for the other side's."""
        self.send(struct.pack(">H", code) + reason.encode()[:120], CLOSE)
        self._writer.close()

    async def finish(self, timeout_s: float = 1.0) -> None:
        """Wait until it is closed, for a while; then it is cut."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self.abort()

    def abort(self) -> None:
        self._writer.transport.abort()


async def connect(url: str, token: str | None, timeout_s: float) -> WebSocket:
    """A connection to a server of ours; what it refuses is an error that says why."""
    parts = urlsplit(url)
    port = parts.port or SCHEMES[parts.scheme]
    assert parts.hostname is not None
    key = base64.b64encode(os.urandom(16)).decode()
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    lines = [f"GET {parts.path or '/'} HTTP/1.1", f"Host: {host}:{port}", "Upgrade: websocket", "Connection: Upgrade"]
    lines += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13"]
    lines += [f"Authorization: Bearer {token}"] if token is not None else []
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            secure = parts.scheme in ("wss", "https")
            reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure or None, limit=MAX_HEAD)
            writer.write("\r\n".join(lines).encode() + b"\r\n\r\n")
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            status, headers = parse_head(head)
            if status.split(" ")[1:2] == ["101"] and headers.get("sec-websocket-accept") == accept_word(key):
                return WebSocket(reader, writer, client=True)
            said = (await reader.read(500)).decode("utf-8", "replace").strip()
    except TimeoutError:
        problem: Exception = WorldError(f"the server at {url} did not answer within {timeout_s:g} s")
    except (OSError, ValueError, EOFError, asyncio.LimitOverrunError) as error:
        problem = WorldError(f"no environment server answers at {url} ({error}); start one: agentfly envs serve NAME")
    except BaseException:
        if writer is not None:
            writer.transport.abort()
        raise
    else:
        code = status.split(" ")[1] if " " in status else "?"
        word = f"the server at {url} refused: {said or status}"
        problem = ConfigError(f"{word}; name the variable with its token in token_env") if code == "401" else WorldError(word)
    if writer is not None:
        writer.transport.abort()
    raise problem


def parse_head(head: str) -> tuple[str, dict[str, str]]:
    """The first line and the headers, their names in small letters."""
    first, *rest = head.rstrip("\r\n").split("\r\n")
    headers: dict[str, str] = {}
    for line in rest:
        name, colon, value = line.partition(":")
        if not colon or name != name.strip() or not name:
            raise ValueError(f"not a header: {line[:80]!r}")
        headers[name.lower()] = value.strip()
    return first, headers
