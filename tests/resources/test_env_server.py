"""The environment server on the wire: who is refused and why, and that no client can exhaust it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from agentfly.cli.envs import read_options
from agentfly.errors import ConfigError, ForeignExit, MissingExtra, WorldError
from agentfly.net.guard import token_from
from agentfly.resources import ResourceManager, spec_of
from agentfly.resources.backends.http import open_socket
from agentfly.resources.rpc import env_server, websocket_limits
from agentfly.resources.rpc.env_server import EnvServer
from agentfly.resources.rpc.frames import HELLO_ID, FrameReader, Reply, pack_call, pack_value
from agentfly.resources.rpc.served_kind import default_placement

from .worlds import TASK, Board, Sickly, Worker

WAIT_S = 120
TOKEN = "a-long-token"
CONTINUE, TEXT, BINARY, CLOSE, PING = 0x0, 0x1, 0x2, 0x8, 0x9
FINAL = 0x80


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await main()

    asyncio.run(bounded())


def frame(first: int, payload: bytes = b"", masked: bool = True) -> bytes:
    """One WebSocket frame. The masking key is zero, so a masked payload reads as it is."""
    mark = 0x80 if masked else 0
    size = struct.pack(">B", mark | len(payload)) if len(payload) < 126 else struct.pack(">BH", mark | 126, len(payload))
    return bytes([first]) + size + (bytes(4) if masked else b"") + payload


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
AUTHORIZED = f"Authorization: Bearer {TOKEN}"
HOST = "Host: 127.0.0.1"
KEY = f"Sec-WebSocket-Key: {base64.b64encode(bytes(16)).decode()}"
UPGRADE = ("GET / HTTP/1.1", HOST, "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13")


@asynccontextmanager
async def raw(server: EnvServer, *lines: str) -> AsyncIterator[Streams]:
    """A TCP connection, with a request if there are lines."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        if lines:
            writer.write("\r\n".join(lines).encode() + b"\r\n\r\n")
        yield reader, writer
    finally:
        writer.transport.abort()


async def ask(server: EnvServer, *lines: str) -> str:
    async with raw(server, *lines) as (reader, _):
        return (await reader.read(-1)).decode()


async def health(server: EnvServer, *lines: str) -> dict[str, Any]:
    answer = await ask(server, "GET /health HTTP/1.1", HOST, *lines)
    assert answer.startswith("HTTP/1.1 200 ")
    assert "content-type: application/json" in answer.lower()
    found: dict[str, Any] = json.loads(answer.partition("\r\n\r\n")[2])
    return found


@asynccontextmanager
async def upgraded(server: EnvServer) -> AsyncIterator[Streams]:
    """A WebSocket connection below the library, to break its rules."""
    async with raw(server, *UPGRADE, KEY) as (reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 ")
        yield reader, writer


async def disconnected(reader: asyncio.StreamReader) -> None:
    """Wait until the server has closed or reset the connection."""
    with contextlib.suppress(ConnectionError):
        while await reader.read(1 << 16):
            continue


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


# ---- requests


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ((*UPGRADE, KEY), 401),
        ((*UPGRADE, KEY, "Authorization: Bearer wrong"), 401),
        ((*UPGRADE, KEY, f"Authorization: Basic {TOKEN}"), 401),
        ((*UPGRADE, KEY, f"Authorization: Bearer {TOKEN}é"), 401),
        (("GET /health HTTP/1.1", HOST), 401),
        ((*UPGRADE, KEY, AUTHORIZED, "Origin: https://evil.example"), 403),
        (("GET /health HTTP/1.1", "Host: rebound.example", AUTHORIZED), 403),
        (("GET /health HTTP/1.1", AUTHORIZED), 400),
        ((*UPGRADE, AUTHORIZED), 400),
        (("GET / HTTP/1.1", HOST, AUTHORIZED), 426),
        (("GET /../etc/passwd HTTP/1.1", HOST, AUTHORIZED), 404),
        (("POST / HTTP/1.1", HOST, AUTHORIZED), 405),
        (("GET / HTTP/1.1", *(f"X-{number}: a" for number in range(200))), 431),
        (("GET / HTTP/1.1", "X: " + "a" * 100_000), 431),
    ],
)
def test_a_request_that_is_refused_gets_the_reason_and_no_seat(lines: tuple[str, ...], status: int) -> None:
    async def main() -> None:
        async with EnvServer(Board, token=TOKEN) as server:
            assert (await ask(server, *lines)).startswith(f"HTTP/1.1 {status} ")
            assert await health(server, AUTHORIZED) == {"environment": "Board", "lent": 0, "max": 64}

    run(main)


@pytest.mark.parametrize(
    "lines",
    [
        ("nonsense",),
        ("GET /health HTTP/1.1", HOST, "Content-Length: 5"),
        ("GET /health HTTP/1.1", HOST, f"Content-Length: {'9' * 5000}"),
        ("GET /health HTTP/1.1", HOST, "Transfer-Encoding: chunked"),
    ],
)
def test_a_request_that_is_not_http_or_has_a_body_is_closed(lines: tuple[str, ...]) -> None:
    async def main() -> None:
        async with EnvServer(Board) as server:
            assert "200" not in (await ask(server, *lines)).partition("\r\n")[0]
            assert (await health(server))["lent"] == 0

    run(main)


def test_a_message_of_too_many_values_is_not_read() -> None:
    """A list of empty lists takes a byte each on the wire and eighty in memory."""
    count = 1_000_000
    body = b"\xdd" + struct.pack(">I", count) + b"\x90" * count

    async def main() -> None:
        async with EnvServer(Board) as server:
            socket = await open_socket(server.url, None, 60)
            await socket.recv()
            await socket.send(struct.pack(">I", len(body)) + body)
            with pytest.raises(Exception, match="it holds more than 100000 values"):
                await socket.recv()

    run(main)


# ---- half-open connections


def test_half_open_connections_take_no_seat_and_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_server, "HEAD_S", 1.0)

    async def main() -> None:
        async with EnvServer(Board, token=TOKEN, most=1, placement="thread") as server, AsyncExitStack() as stack:
            silent = [await stack.enter_async_context(raw(server)) for _ in range(100)]
            partial = [await stack.enter_async_context(raw(server)) for _ in range(20)]
            for _, writer in partial:
                writer.write(b"GET / HTTP/1.1\r\nX: ")
            strangers = [await stack.enter_async_context(raw(server, *UPGRADE, KEY)) for _ in range(20)]
            assert (await health(server, AUTHORIZED))["lent"] == 0
            socket = await open_socket(server.url, TOKEN, 60)
            await until(lambda: server.lent == 1)
            for reader, _ in silent + partial:
                await disconnected(reader)
            for reader, _ in strangers:
                assert (await reader.read(-1)).startswith(b"HTTP/1.1 401 ")
            await until(lambda: not server._half_open)
            assert server.lent == 1
            await socket.close()

    run(main)


def test_the_oldest_half_open_connections_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_server, "MAX_HALF_OPEN", 8)

    async def main() -> None:
        async with EnvServer(Board) as server, AsyncExitStack() as stack:
            crowd = [await stack.enter_async_context(raw(server)) for _ in range(50)]
            for reader, _ in crowd[:40]:
                await disconnected(reader)
            assert len(server._half_open) <= 8
            assert (await health(server))["lent"] == 0

    run(main)


def test_a_connection_without_a_free_seat_hears_so_and_a_crowd_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_server, "SEAT_S", 0.2)
    spec = spec_of(Board, placement="http", url="ws://127.0.0.1:1")

    async def main() -> None:
        async with EnvServer(Board, most=1, placement="thread") as server:
            first = await open_socket(server.url, None, 60)
            await until(lambda: server.lent == 1)
            for waiting in (env_server.MAX_WAITING, 0):
                monkeypatch.setattr(env_server, "MAX_WAITING", waiting)
                async with ResourceManager(None, spec_of(spec, url=server.url)) as manager:
                    with pytest.raises(WorldError, match="all 1 instances of Board are lent"):
                        await manager.acquire([Board], TASK, "a", WAIT_S)
            await first.close()
            await until(lambda: server.lent == 0)

    run(main)


# ---- frames that cost more to read than to send


def test_empty_continuation_frames_cost_little_and_health_still_answers() -> None:
    async def main() -> None:
        async with EnvServer(Board, placement="thread") as server, upgraded(server) as (reader, writer):
            began = time.process_time()
            writer.write(frame(BINARY) + frame(CONTINUE) * 35_000)  # 210 kB that add nothing to the message's size
            answered = asyncio.get_running_loop().time()
            assert (await health(server))["environment"] == "Board"
            assert asyncio.get_running_loop().time() - answered < WAIT_S / 2
            await disconnected(reader)
            await until(lambda: server.lent == 0)
            assert time.process_time() - began < 5

    run(main)


def test_pings_of_a_client_that_reads_nothing_do_not_grow_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket_limits, "STALL_S", 2.0)

    async def main() -> None:
        async with EnvServer(Board, placement="thread") as server, upgraded(server) as (reader, writer):
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            await until(lambda: bool(server._server.connections))
            (connection,) = server._server.connections
            largest, sent = 0, 0
            pings = frame(FINAL | PING, b"x" * 125) * 1000
            while server.lent and sent < 500_000_000:
                try:
                    writer.write(pings)
                    sent += len(pings)
                    async with asyncio.timeout(0.5):
                        await writer.drain()
                except TimeoutError:
                    largest = max(largest, connection.transport.get_write_buffer_size())
                except ConnectionError:
                    break
                largest = max(largest, connection.transport.get_write_buffer_size())
            await until(lambda: server.lent == 0)  # disconnected
            assert 0 < largest < 2 << 20
            assert (await health(server))["lent"] == 0

    run(main)


def test_the_client_bounds_what_a_server_does_not_read_too() -> None:
    websockets = websocket_limits.websockets()
    limited = websocket_limits.limited(websockets.asyncio.client.ClientConnection)
    assert issubclass(limited, websockets.asyncio.client.ClientConnection)
    assert limited.pause_writing is not websockets.asyncio.client.ClientConnection.pause_writing


@pytest.mark.parametrize(
    "sent",
    [
        frame(FINAL | TEXT, b"{}"),
        frame(FINAL | BINARY, b"{}", masked=False),
        b"\xff" * 8,
        frame(FINAL | CONTINUE),
        frame(BINARY) + frame(BINARY),
        frame(PING),
        frame(FINAL | PING, b"x" * 126),
        frame(0xC0 | BINARY),
        bytes([FINAL | BINARY, 0x80 | 127]) + struct.pack(">Q", 1 << 40) + bytes(4),
        frame(FINAL | BINARY, struct.pack(">I", 1 << 31)),
        frame(FINAL | BINARY, struct.pack(">I", 2) + b"\xc1\xc1"),
        frame(FINAL | BINARY, struct.pack(">I", 1) + b"\x07"),
    ],
    ids=[
        "text", "not masked", "junk", "continuation first", "message in a message", "ping in parts", "long ping",
        "reserved bit", "huge frame", "huge length", "not MessagePack", "not a call",
    ],
)  # fmt: skip
def test_a_client_that_breaks_the_protocol_is_disconnected(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket_limits, "CLOSE_S", 0.2)

    async def main() -> None:
        async with EnvServer(Board, placement="thread") as server, upgraded(server) as (reader, writer):
            writer.write(sent)
            assert bytes([FINAL | CLOSE]) in await reader.read(-1)
            began = asyncio.get_running_loop().time()
            await until(lambda: server.lent == 0)  # also if the client leaves its side open
            assert asyncio.get_running_loop().time() - began < 15

    run(main)


def test_a_head_that_arrives_byte_by_byte_ends_at_the_same_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_server, "HEAD_S", 0.5)

    async def trickle(writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET / HTTP/1.1\r\nX: ")
        with contextlib.suppress(ConnectionError):
            while not writer.transport.is_closing():
                writer.write(b"a")
                await asyncio.sleep(0.01)

    async def main() -> None:
        async with EnvServer(Board) as server, AsyncExitStack() as stack:
            slow = [await stack.enter_async_context(raw(server)) for _ in range(10)]
            writing = [asyncio.create_task(trickle(writer)) for _, writer in slow]
            assert (await health(server))["lent"] == 0
            for reader, _ in slow:
                await disconnected(reader)
            await asyncio.gather(*writing)
            assert not server._half_open

    run(main)


def test_a_client_that_reads_no_reply_does_not_grow_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket_limits, "STALL_S", 2.0)

    async def main() -> None:
        async with EnvServer(Board, placement="loop") as server, upgraded(server) as (reader, writer):
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            await until(lambda: bool(server._server.connections))
            (connection,) = server._server.connections
            largest = 0
            write = connection.transport.write

            def measured(data: bytes) -> None:
                nonlocal largest
                write(data)
                largest = max(largest, connection.transport.get_write_buffer_size())

            connection.transport.write = measured
            calls = [pack_call(1, 0, "@new", [], {}), *(pack_call(2, 0, "write", ["x" * 50_000], {}) for _ in range(20))]
            calls += [pack_call(3, 0, "read", [], {}) for _ in range(500)]  # their replies take 500 MB
            for part in (calls[0], b"".join(calls[1:21]), b"".join(calls[21:])):
                payload = struct.pack(">BQ", 0x80 | 127, len(part)) + bytes(4) + part
                writer.write(bytes([FINAL | BINARY]) + payload)
            assert (await health(server))["lent"] == 1
            await until(lambda: server.lent == 0)  # disconnected
            assert 1 << 20 < largest < 8 << 20

    run(main)


def test_a_message_of_too_many_frames_is_not_handled() -> None:
    async def main() -> None:
        async with EnvServer(Board) as server:
            socket = await open_socket(server.url, None, 60)
            await socket.recv()
            await socket.send(pack_call(1, 0, "read", [], {}) * 100_000)
            with pytest.raises(Exception, match="more than 1000 frames at once"):
                await socket.recv()

    run(main)


def test_a_client_that_leaves_more_calls_than_are_handled_at_once_gives_its_seat_back() -> None:
    async def main() -> None:
        async with EnvServer(Board, most=1, ping_s=0.5, placement="thread") as server:
            socket = await open_socket(server.url, None, 60)
            await socket.send(pack_call(1, 0, "@new", [], {}))
            for number in range(2, env_server.MAX_CALLS + 10):
                await socket.send(pack_call(number, 0, "linger", [3600.0], {}))
            assert (await health(server))["lent"] == 1
            socket.transport.abort()
            await until(lambda: server.lent == 0)

    run(main)


# ---- seats


def test_the_instances_of_a_pool_share_a_connection_and_each_takes_a_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_server, "SEAT_S", 0.2)

    async def main() -> None:
        async with EnvServer(Board, most=3, placement="thread") as server:
            spec = spec_of(Board, placement="http", url=server.url)
            async with ResourceManager(None, spec_of(spec, max=4)) as manager:
                await manager.warm(Board, 3)
                assert (server.lent, len(server._server.connections)) == (3, 1)
                leases = [await manager.acquire([Board], TASK, f"chain {number}") for number in range(3)]
                assert [await lease[Board].write("x") for lease in leases] == [1, 1, 1]
                with pytest.raises(WorldError, match="all 3 instances of Board are lent"):
                    await manager.acquire([Board], TASK, "one more", 3.0)
                for lease in leases:
                    await lease.release()
                assert server.lent == 3
            await until(lambda: server.lent == 0)

    run(main)


def test_an_instance_that_ends_gives_its_seat_back_and_harms_no_other() -> None:
    async def main() -> None:
        async with EnvServer(Worker, most=2) as server:
            spec = spec_of(Worker, placement="http", url=server.url, max=2)
            async with ResourceManager(None, spec) as manager:
                first, second = await manager.acquire([Worker], TASK, "a"), await manager.acquire([Worker], TASK, "b")
                with pytest.raises(WorldError, match="killed by SIGKILL"):
                    await first[Worker].die()
                await first.release()
                await until(lambda: server.lent == 1)
                async with manager.lease([Worker], TASK, "c") as third:
                    assert await third[Worker].write("x") == 1
                assert await second[Worker].write("y") == 1
                await second.release()

    run(main)


def test_a_server_that_cannot_be_reached_is_passed_over() -> None:
    async def main() -> None:
        async with EnvServer(Board, placement="thread") as server:
            spec = spec_of(Board, placement="http", url=("ws://127.0.0.1:1", server.url), max=2)
            async with ResourceManager(None, spec) as manager:
                assert await manager.warm(Board, 2) == 2
                assert manager.metrics()["resources/Board/failed"] == 0

    run(main)


# ---- calls


async def read_reply(socket: Any, reader: FrameReader) -> Reply:
    (reply,) = reader.replies(await socket.recv())
    return reply


def test_a_client_that_misuses_calls_hears_why_and_harms_no_other() -> None:
    calls: list[tuple[str, list[Any], str]] = [
        ("read", [], "WorldError"),
        ("@new", [], "none"),
        ("@new", [], "WorldError"),
        ("__init__", [], "AttributeError"),
        ("@get", ["__dict__"], "AttributeError"),
        ("@get", [3], "AttributeError"),
        ("@get", [], "AttributeError"),
        ("_hidden", [], "AttributeError"),
        ("nothing_like_it", [], "AttributeError"),
        ("write", [1, 2, 3], "TypeError"),
        ("write", ["good"], "none"),
    ]

    async def main() -> None:
        before = Board.open["Board"]
        async with EnvServer(Board, placement="thread") as server:
            socket, reader = await open_socket(server.url, None, 60), FrameReader()
            assert await read_reply(socket, reader) == (HELLO_ID, {"environment": "Board", "placement": "thread"}, None)
            for number, (method, args, expected) in enumerate(calls):
                await socket.send(pack_call(number, 0, method, args, {}))
                reply = await read_reply(socket, reader)
                assert (reply.id, (reply.error or ["none"])[0]) == (number, expected)
            assert reply.value == 1
            await socket.close()
            await until(lambda: Board.open["Board"] == before)

    run(main)


def test_an_environment_that_exits_ends_neither_its_connection_nor_the_server() -> None:
    async def main() -> None:
        async with EnvServer(Worker, placement="thread") as server:
            spec = spec_of(Worker, placement="http", url=server.url)
            async with ResourceManager(None, spec) as manager, manager.lease([Worker], TASK, "a", WAIT_S) as lease:
                with pytest.raises(ForeignExit, match="SystemExit: 3"):
                    await lease.call(Worker, "fail", "exit")
                assert await lease.call(Worker, "read") == []

    run(main)


def test_silence_is_noticed_on_both_sides() -> None:
    async def main() -> None:
        async with EnvServer(Board, ping_s=0.1, placement="thread") as server, upgraded(server) as (reader, _):
            await reader.read(-1)  # a client that answers no ping
            await until(lambda: server.lent == 0)

        async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            key = head.partition("Sec-WebSocket-Key: ")[2].partition("\r\n")[0]
            digest = hashlib.sha1(key.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
            lines = ["HTTP/1.1 101 X", "Upgrade: websocket", "Connection: Upgrade"]
            lines += [f"Sec-WebSocket-Accept: {base64.b64encode(digest).decode()}", "", ""]
            writer.write("\r\n".join(lines).encode())
            hello = pack_value(HELLO_ID, {"environment": "Board", "placement": "loop"})
            writer.write(frame(FINAL | BINARY, hello, masked=False))
            await reader.read(-1)  # and sends nothing more
            writer.close()

        silent = await asyncio.start_server(mute, "127.0.0.1", 0)
        url = f"ws://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        async with silent, ResourceManager(None, spec_of(Board, placement="http", url=url, ping_s=0.1)) as manager:
            with pytest.raises(WorldError, match=r"nothing was heard for 0\.3 s"):
                await manager.acquire([Board], TASK, "a", 60)

    run(main)


# ---- the trainer's side


def test_the_trainer_checks_the_token_and_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENV_TOKEN", TOKEN)

    async def main() -> None:
        async with EnvServer(Sickly, token=TOKEN, placement="thread") as server:
            url = server.url.replace("ws:", "http:")
            good = spec_of(Sickly, placement="http", url=url, token_env="ENV_TOKEN")
            async with ResourceManager(None, good) as manager, manager.lease([Sickly], TASK, "a", WAIT_S) as lease:
                assert await lease.call(Sickly, "read") == []
            other = spec_of(Board, placement="http", url=server.url, token_env="ENV_TOKEN")
            async with ResourceManager(None, other) as manager:
                with pytest.raises(WorldError, match="the server of its pool serves 'Sickly', not 'Board'"):
                    await manager.acquire([Board], TASK, "a", WAIT_S)
            async with ResourceManager(None, spec_of(Sickly, placement="http", url=server.url)) as manager:
                with pytest.raises(ConfigError, match=r"the token is missing or wrong.*; name the variable with its token"):
                    await manager.acquire([Sickly], TASK, "a", WAIT_S)

    run(main)
    with pytest.raises(ConfigError, match="token_env names NO_TOKEN, but that variable holds no token"):
        ResourceManager(None, spec_of(Board, placement="http", url="ws://127.0.0.1:1", token_env="NO_TOKEN"))


def test_a_redirect_is_a_refusal_and_no_other_server_sees_the_token() -> None:
    async def main() -> None:
        asked = []

        async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.append(await reader.readuntil(b"\r\n\r\n"))
            where = f"ws://127.0.0.1:{port}/elsewhere"
            writer.write(f"HTTP/1.1 302 Found\r\nLocation: {where}\r\nContent-Length: 0\r\n\r\n".encode())
            writer.close()

        server = await asyncio.start_server(redirect, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            with pytest.raises(WorldError, match=r"the server at ws://127\.0\.0\.1:\d+ refused: 302"):
                await open_socket(f"ws://127.0.0.1:{port}", TOKEN, 60)
        assert len(asked) == 1

    run(main)


def test_no_server_is_one_sentence() -> None:
    async def main() -> None:
        with pytest.raises(
            WorldError, match=r"no environment server answers at ws://127\.0\.0\.1:1 .*agentfly envs serve NAME"
        ):
            await open_socket("ws://127.0.0.1:1", None, 60)

    run(main)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "websockets"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "websockets", None)
    with pytest.raises(MissingExtra, match=r"pip install 'agentfly\[serve\]'"):
        EnvServer(Board)
    with pytest.raises(MissingExtra, match=r"pip install 'agentfly\[serve\]'"):
        ResourceManager(None, spec_of(Board, placement="http", url="ws://127.0.0.1:1"))


# ---- settings


def test_a_server_beyond_loopback_needs_a_token_and_bad_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"a server on 0\.0\.0\.0 .* needs a token: name the variable .* --token-env"):
        EnvServer(Board, host="0.0.0.0")
    with pytest.raises(ConfigError, match="8 characters or more"):
        EnvServer(Board, token="short")
    with pytest.raises(ConfigError, match="--max must be a whole number from 1"):
        EnvServer(Board, most=0)
    monkeypatch.delenv("NO_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="--token-env names NO_TOKEN, but that variable holds no token"):
        token_from("NO_TOKEN", "--token-env")
    assert token_from(None, "--token-env") is None
    assert read_options(["tier=landlock", "limit_s=2.5", 'names=["a"]']) == {"tier": "landlock", "limit_s": 2.5, "names": ["a"]}
    with pytest.raises(ConfigError, match="--option takes key=value, not 'tier'"):
        read_options(["tier"])


def test_an_environment_that_would_block_the_server_is_placed_in_processes() -> None:
    from agentfly.envs.code.env import CodeInterpreter

    assert default_placement(spec_of(Board)) == "process"
    assert default_placement(spec_of(CodeInterpreter)) == "loop"
    assert default_placement(spec_of(Worker, placement="thread")) == "thread"
