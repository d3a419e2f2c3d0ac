"""The server's limits hold against clients that break the rules, and it always stops."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette", reason="Starlette is not installed: pip install 'agentfly[serve]'")
pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'agentfly[serve]'")

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import agentfly.net.server as server_module
from agentfly.errors import ConfigError
from agentfly.net.guard import Guard
from agentfly.net.server import WebServer, serve_until_stopped

DEADLINE_S = 240.0


async def size(request: Request) -> JSONResponse:
    return JSONResponse({"bytes": len(await request.body())})


async def fail(request: Request) -> JSONResponse:
    raise RuntimeError("a bug")


async def large(request: Request) -> Response:
    return Response(bytes(16 << 20))


APP = Starlette(routes=[Route("/", size, methods=["GET", "POST"]), Route("/fail", fail), Route("/large", large)])


def serve(body: Callable[[WebServer], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        async with asyncio.timeout(DEADLINE_S), WebServer(APP, Guard("127.0.0.1"), **options) as server:
            return await body(server)

    return asyncio.run(main())


async def raw(server: WebServer, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(data)
    found = await reader.read()
    writer.close()
    return found


def test_a_body_is_counted_while_it_arrives() -> None:
    async def body(server: WebServer) -> list[int]:
        async with httpx.AsyncClient() as client:
            sent = [await client.post(server.url, content=b"x" * count) for count in (0, 1000, 1001)]
        return [each.status_code for each in sent]

    assert serve(body, max_body=1000) == [200, 200, 413]


def test_a_chunked_body_cannot_pass_the_bound() -> None:
    async def body(server: WebServer) -> bytes:
        chunks = b"".join(b"64\r\n" + b"x" * 100 + b"\r\n" for _ in range(50)) + b"0\r\n\r\n"
        return await raw(server, b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)

    assert serve(body, max_body=1000).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + b"9" * 5000, b"400"),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1", b"400"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * (20 << 10), b"431"),
        (b"GET / HTTP/1.1\r\nHost: evil.example", b"403"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example", b"403"),
        (b"nonsense", b"400"),
    ],
)
def test_a_broken_or_foreign_request_is_refused(head: bytes, status: bytes) -> None:
    found = serve(lambda server: raw(server, head + b"\r\n\r\n"))
    assert found.split(b" ")[1] == status


def test_a_connection_that_sends_no_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "READ_S", 0.5)

    async def body(server: WebServer) -> list[bytes]:
        partial = b"GET / HTTP/1.1\r\nHost: loc"
        slow = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nabc"
        return list(await asyncio.gather(raw(server, b""), raw(server, partial), raw(server, slow)))

    silent, half, slow = serve(body)
    assert silent == half == b""
    assert slow.startswith(b"HTTP/1.1 408")


def test_idle_connections_beyond_the_limit_do_not_keep_others_out_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "READ_S", 0.2)

    async def body(server: WebServer) -> int:
        idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(6)]
        for reader, writer in idle:
            assert await reader.read() == b""
            writer.close()
        monkeypatch.setattr(server_module, "READ_S", 60.0)
        async with httpx.AsyncClient() as client:
            return (await client.get(server.url)).status_code

    assert serve(body, max_connections=4) == 200


def test_a_bug_in_the_application_is_a_500_and_the_server_goes_on() -> None:
    async def body(server: WebServer) -> list[int]:
        async with httpx.AsyncClient() as client:
            return [(await client.get(server.url + path)).status_code for path in ("/fail", "/", "/none")]

    assert serve(body) == [500, 200, 404]


def test_a_port_in_use_is_a_config_error_or_another_port() -> None:
    async def body(server: WebServer) -> None:
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{server.port}"):
            await WebServer(APP, Guard("127.0.0.1"), port=server.port).start()
        async with WebServer(APP, Guard("127.0.0.1"), port=server.port, fallback_port=True) as other:
            assert other.port != server.port

    serve(body)


def test_small_answers_do_not_wait_for_the_acknowledgement_of_their_head() -> None:
    """Nagle's algorithm delays the body by 40 ms if head and body are written one after the other."""

    async def body(server: WebServer) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode())
        assert await reader.readline()
        (accepted,) = [connection.transport for connection in server._server.server_state.connections]
        assert accepted.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()

    serve(body)


def test_closing_ends_open_connections_and_is_idempotent() -> None:
    async def main() -> bytes:
        async with asyncio.timeout(DEADLINE_S):
            server = WebServer(APP, Guard("127.0.0.1"))
            await server.start()
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            await server.close()
            await server.close()
            left = await reader.read()
            writer.close()
            return left

    assert asyncio.run(main()) == b""


def test_a_signal_stops_a_server_that_a_command_runs() -> None:
    import os
    import signal

    said: list[str] = []

    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S):
            server = WebServer(APP, Guard("127.0.0.1"))
            task = asyncio.create_task(serve_until_stopped(server, said.append, "open at {url}", "closed"))
            while not said:
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            await task

    asyncio.run(main())
    assert said[0].startswith("open at http://127.0.0.1:")
    assert said[1] == "closed"


HALF_A_BODY = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\n\r\n{"


@pytest.mark.parametrize("said", [b"", b"GET / HT", HALF_A_BODY], ids=["silent", "half a head", "half a body"])
def test_connections_without_a_request_take_no_place_of_others(said: bytes) -> None:
    async def body(server: WebServer) -> tuple[list[int], int]:
        crowd = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(30)]
        for _, writer in crowd:
            writer.write(said)
        async with httpx.AsyncClient() as first, httpx.AsyncClient() as second:
            statuses = [(await client.get(server.url)).status_code for client in (first, second)]  # both stay open
            async with httpx.AsyncClient() as third:
                statuses.append((await third.get(server.url)).status_code)
        ended = 0
        for reader, writer in crowd[:25]:
            try:
                ended += await reader.read() == b""
            except ConnectionResetError:
                ended += 1
            writer.close()
        return statuses, ended

    assert serve(body, max_connections=2) == ([200, 200, 503], 25)


def test_a_head_that_arrives_byte_by_byte_ends_at_the_same_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "READ_S", 0.5)

    async def body(server: WebServer) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        reading = asyncio.create_task(reader.read())
        writer.write(b"GET / HTTP/1.1\r\nX: ")
        while not reading.done():
            writer.write(b"a")
            await asyncio.sleep(0.01)
        writer.close()

    serve(body)


def test_clients_that_read_no_answer_are_disconnected_and_keep_no_other_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "READ_S", 1.0)

    async def body(server: WebServer) -> None:
        writers = []
        for _ in range(8):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
            writer.write(b"GET /large HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 100)
            writers.append(writer)
            await reader.readexactly(1)  # the answer has begun; the stream reads no further than its limit
        async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
            while (await client.get(server.url)).status_code != 200:
                await asyncio.sleep(0.05)
        while server._server.server_state.connections:
            await asyncio.sleep(0.05)
        for writer in writers:
            writer.transport.abort()

    serve(body, max_connections=8)
