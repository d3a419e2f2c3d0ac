"""An ASGI application on uvicorn, with the limits that every server of the package has. Needs `agentfly[serve]`.

connection    at most `max_connections`, and half as many that are half-open: the oldest is closed, and all after READ_S
head          at most MAX_HEAD bytes
body          at most `max_body` bytes, within READ_S
answer        ended if the client reads nothing of it for READ_S
request       Host, Origin and token are checked by the `Guard` before the application sees it
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import ConfigError, MissingExtra
from .address import url_of
from .guard import Guard

log = logging.getLogger(__name__)
MAX_HEAD = 16 << 10
MAX_DISCARDED = 256 << 20
READ_S = 30.0
CLOSE_S = 5

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
ErrorBody = Callable[[str, int, str], Mapping[str, Any]]
"""The JSON of a refusal, from the path of the request, the status and a sentence."""


class HalfOpen:
    """The connections of a server that have sent no whole request yet, oldest first.

    If there are more than `most`, the oldest is ended, so connections that say nothing take no place of those that do.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._transports: dict[Any, asyncio.Transport] = {}
        self._ending: set[Any] = set()

    def __len__(self) -> int:
        return len(self._transports)

    def others(self, connection: object) -> int:
        """How many connections beside this one hold no place; those that are being ended count until they are gone."""
        return len(self._transports) + len(self._ending) - (connection in self._transports or connection in self._ending)

    def add(self, connection: Any, transport: Any) -> None:
        self._transports[connection] = transport
        if len(self._transports) > self._most:
            oldest = next(iter(self._transports))
            self._ending.add(oldest)
            self._transports.pop(oldest).abort()

    def remove(self, connection: object) -> None:
        self._transports.pop(connection, None)
        self._ending.discard(connection)

    def abort(self) -> None:
        """End all of them."""
        for transport in list(self._transports.values()):
            transport.abort()


class WebServer:
    """Serves `app` in the running event loop: `async with WebServer(app, guard) as server: server.url`.

    `port` 0 takes a free port. `fallback_port`: if the port is in use, take a free one instead of raising ConfigError. The
    attribute `app` is the application behind the limits and the guard. `error_body` is the JSON of their refusals, for clients
    that expect a shape.
    """

    def __init__(
        self,
        app: App,
        guard: Guard,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        fallback_port: bool = False,
        max_connections: int = 1024,
        max_body: int = 1 << 20,
        error_body: ErrorBody | None = None,
    ) -> None:
        self.host, self.port = host, port
        self.app: App = _Limits(app, guard, max_body, error_body or (lambda path, status, sentence: {"error": sentence}))
        self._fallback_port = fallback_port
        self._max_connections = max_connections
        self._server: Any = None
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return url_of("http", self.host, self.port)

    async def __aenter__(self) -> WebServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Listen. Raises ConfigError if the address cannot be bound, MissingExtra without `agentfly[serve]`."""
        half_open = HalfOpen(max(1, self._max_connections // 2))
        server_class, protocol = _uvicorn(half_open, self._max_connections)
        import uvicorn

        sock = self._bind()
        config = uvicorn.Config(
            self.app,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=300,
            timeout_graceful_shutdown=CLOSE_S,
            h11_max_incomplete_event_size=MAX_HEAD,
        )
        self._server = server_class(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[sock]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise ConfigError(f"the server on {self.host}:{self.port} stopped while it started")
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        """Stop listening and end every connection; a request that is being handled has CLOSE_S to end. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            self._server.should_exit = True
            await asyncio.wait([task], timeout=CLOSE_S + 5)
            if not task.done():
                task.cancel()
                await asyncio.wait([task], timeout=CLOSE_S)

    def _bind(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it. Without it a small answer waits 40 ms for the client's acknowledgement of its head: asyncio
        # sets it only for sockets that name their protocol.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            try:
                sock.bind((self.host, self.port))
            except OSError as error:
                if not self._fallback_port or error.errno != errno.EADDRINUSE:
                    raise
                sock.bind((self.host, 0))
        except OSError as error:
            sock.close()
            raise ConfigError(f"cannot listen on {self.host}:{self.port}: {error.strerror or error}") from None
        self.port = sock.getsockname()[1]
        return sock


class AsyncServer(Protocol):
    """What `serve_until_stopped` runs: a WebServer, or an object that starts and closes one."""

    @property
    def url(self) -> str: ...

    async def __aenter__(self) -> Any: ...

    async def __aexit__(self, *_: object) -> None: ...


async def serve_until_stopped(server: AsyncServer, say: Callable[[str], None], opening: str, closing: str = "stopped") -> None:
    """Serve until SIGTERM or Ctrl-C. `opening` may contain "{url}"."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with server:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        try:
            say(opening.format(url=server.url))
            await stop.wait()  # the server's whole life
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
    say(closing)


class _Limits:
    """Middleware: asks the guard, bounds the body in size and time, and turns an exception of the application into a 500."""

    def __init__(self, app: App, guard: Guard, max_body: int, error_body: ErrorBody) -> None:
        self._app, self._guard, self._max_body, self._error_body = app, guard, max_body, error_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        try:
            self._check_head(headers, scope)
            body = await self._body(headers, receive)
        except _Refused as refused:
            await self._refuse(scope, send, refused.status, refused.sentence)
            return
        if body is None:
            return
        started = False

        async def receive_all() -> MutableMapping[str, Any]:
            nonlocal body
            if body is None:
                return await receive()  # the next event is the disconnect
            data, body = body, None
            return {"type": "http.request", "body": data, "more_body": False}

        async def send_and_note(event: MutableMapping[str, Any]) -> None:
            nonlocal started
            started = True
            await send(event)

        try:
            await self._app(scope, receive_all, send_and_note)
        except Exception:
            log.exception("a request for %s failed", scope["path"][:80])
            if not started:
                await self._refuse(scope, send, 500, "the server failed; its log says how")

    async def _refuse(self, scope: Scope, send: Send, status: int, sentence: str) -> None:
        await _answer(send, status, self._error_body(scope["path"], status, sentence))

    def _check_head(self, headers: Sequence[tuple[str, str]], scope: Scope) -> None:
        # h11 bounds a head only while it is incomplete: one that arrives in a single read may be larger.
        if sum(len(name) + len(value) for name, value in headers) > MAX_HEAD:
            raise _Refused(431, f"a request's head has at most {MAX_HEAD} bytes")
        query = scope.get("query_string", b"").decode("latin-1")
        if (refusal := self._guard.refuse(headers, scope.get("method", "GET"), query)) is not None:
            raise _Refused(*refusal)

    async def _body(self, headers: Sequence[tuple[str, str]], receive: Receive) -> bytes | None:
        """The whole body; None if the client disconnected.

        A body above `max_body` is read to its end and discarded: closing the connection before would reset it, and the client
        would lose the answer. A body above MAX_DISCARDED is refused without reading it.
        """
        too_large = _Refused(413, f"a request's body has at most {self._max_body} bytes")
        if any(name.lower() == "content-length" and int(value) > MAX_DISCARDED for name, value in headers):
            raise too_large
        body, size = bytearray(), 0
        try:
            async with asyncio.timeout(READ_S):
                while True:
                    event = await receive()
                    if event["type"] == "http.disconnect":
                        return None
                    part = event.get("body", b"")
                    size += len(part)
                    if size <= self._max_body:
                        body += part
                    if size > MAX_DISCARDED or (size > self._max_body and not event.get("more_body", False)):
                        raise too_large
                    if not event.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise _Refused(408, "the request's body arrived too slowly") from None


@dataclass(eq=False)
class _Refused(Exception):
    status: int
    sentence: str


async def _answer(send: Send, status: int, value: Mapping[str, Any]) -> None:
    import json

    body = json.dumps(value).encode() + b"\n"
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
        (b"x-content-type-options", b"nosniff"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _uvicorn(half_open: HalfOpen, max_connections: int) -> tuple[Any, Any]:
    """A uvicorn server that leaves signals alone, and its HTTP protocol, which notes half-open connections."""
    try:
        import uvicorn
        from uvicorn.protocols.http.h11_impl import H11Protocol
    except ModuleNotFoundError as error:
        raise MissingExtra(f"a server needs {error.name!r}: pip install 'agentfly[serve]'") from error

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # signals belong to the program, which may train beside this server

    class Protocol(H11Protocol):
        """uvicorn waits without limit for the head of a request, and for a client that reads no answer."""

        _deadline: asyncio.TimerHandle | None = None
        _stall: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            half_open.add(self, transport)
            self._deadline = self.loop.call_later(READ_S, transport.abort)

        def data_received(self, data: bytes) -> None:
            if self._deadline is None and self._is_between_requests():
                self._deadline = self.loop.call_later(READ_S, self.transport.abort)
            # uvicorn refuses the request if so many connections are open; it counts this one, and those that are half-open.
            self.limit_concurrency = max_connections + 1 + half_open.others(self)
            super().data_received(data)
            if not self._is_between_requests():
                self._cancel_deadline()
                if self.cycle.more_body:
                    half_open.add(self, self.transport)
                else:
                    half_open.remove(self)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._check_reading(None)

        def resume_writing(self) -> None:
            self._cancel_stall()
            super().resume_writing()

        def _check_reading(self, before: int | None) -> None:
            """End the connection if the client has read nothing of the answer since the last check."""
            unread = self.transport.get_write_buffer_size()
            if before is not None and unread >= before:
                self.transport.abort()
            else:
                self._stall = self.loop.call_later(READ_S, self._check_reading, unread)

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel_stall()
            self._cancel_deadline()
            half_open.remove(self)
            super().connection_lost(exc)

        def on_response_complete(self) -> None:
            # A request that was sent whole in one packet is over: only the next one's head gets a new deadline.
            self._cancel_deadline()
            half_open.remove(self)
            super().on_response_complete()

        def _is_between_requests(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _cancel_stall(self) -> None:
            if self._stall is not None:
                self._stall.cancel()
                self._stall = None

        def _cancel_deadline(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return Server, Protocol
