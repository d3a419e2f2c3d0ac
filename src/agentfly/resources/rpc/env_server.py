"""`agentfly envs serve`: one kind of environment for trainers elsewhere, over HTTP. Needs `agentfly[serve]`.

    TCP connection --request--> Guard: Host, Origin, token --> GET /health    JSON: environment, lent, max
         |                            |                    `-> GET /          WebSocket --seat--> first reply, then calls
         `-- no request: HEAD_S       `-- refused: 401, 403, 404

A connection is half-open until the guard has accepted its request. Half-open connections take no seat, time out after HEAD_S,
and the oldest is closed if there are more than MAX_HALF_OPEN. One WebSocket is one instance: the server creates it for the
connection, in a worker process by default, so that a call that blocks or crashes affects no other, and closes it afterwards.
The server refuses a second instance on one connection and names that begin with an underscore.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import inspect
import itertools
import json
import logging
import tomllib
from collections.abc import Coroutine, Sequence
from typing import Any

from ...aio.deadline import Expired, within
from ...errors import ConfigError, DeadlineError, WorldError
from ...net.address import url_of
from ...net.guard import Guard
from ...net.server import HalfOpen
from ..instance import Instance, backend_of
from ..spec import Spec, make_ready, ready_of, spec_of
from . import websocket_limits
from .frames import DROP, GET, HELLO_ID, NEW, SERVED, BadFrame, Call, FrameReader, pack_error, pack_reply, pack_value

log = logging.getLogger(__name__)
HEAD_S = 10.0
MAX_HALF_OPEN = 256
SEAT_S = 10.0
MAX_WAITING = 32
"""Connections that may wait for a seat at once. A further one is refused immediately."""
MAX_CALLS = 64
"""Calls of one connection at once. The next is read when one of them is answered."""
BAD_DATA, FAILED, TRY_LATER = 1007, 1011, 1013
"""WebSocket close codes."""


class GuardedServer:
    """A WebSocket server that asks for a token. A subclass says what it is (`about`) and serves a connection (`serve`).

    Raises ConfigError if `host` is not loopback and there is no token, MissingExtra without `agentfly[serve]`.
    """

    def __init__(self, host: str, port: int, token: str | None, ping_s: float, cure: str, close_s: float = 10.0) -> None:
        self.guard = Guard(host, token, cure=cure)
        self.port = port
        self._host, self._ping_s, self._close_s = host, ping_s, close_s
        self._websockets = websocket_limits.websockets()
        self._half_open = HalfOpen(MAX_HALF_OPEN)
        self._server: Any = None

    @property
    def url(self) -> str:
        return url_of("ws", self._host, self.port)

    def about(self) -> dict[str, Any]:
        """What GET /health answers."""
        raise NotImplementedError

    async def serve(self, socket: Any) -> None:
        """Serve one connection until it ends."""
        raise NotImplementedError

    async def listen(self) -> None:
        """Raises ConfigError if the address cannot be used."""
        try:
            self._server = await self._websockets.asyncio.server.serve(
                self.serve,
                self._host,
                self.port,
                process_request=self._process_request,
                create_connection=self._connection_class(),
                open_timeout=HEAD_S,
                server_header=None,
                **websocket_limits.settings(self._ping_s),
            )
        except OSError as error:
            raise ConfigError(f"cannot listen on {self._host}:{self.port}: {error.strerror or error}") from None
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening, and close every connection with what it holds."""
        if self._server is not None:
            self._half_open.abort()
            self._server.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(10 + self._close_s):
                    await self._server.wait_closed()

    def _connection_class(self) -> Any:
        half_open = self._half_open

        class TrackedConnection(websocket_limits.limited(self._websockets.asyncio.server.ServerConnection)):  # type: ignore[misc]
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                super().connection_made(transport)
                half_open.add(self, transport)

            def connection_lost(self, exc: Exception | None) -> None:
                half_open.remove(self)
                super().connection_lost(exc)

        return TrackedConnection

    def _process_request(self, connection: Any, request: Any) -> Any:
        """The HTTP response to a request, or None if the WebSocket handshake may go on."""
        refusal = self.guard.refuse(list(request.headers.raw_items()))
        if refusal is not None:
            return connection.respond(http.HTTPStatus(refusal[0]), f"{refusal[1]}\n")
        if request.path == "/health":
            response = connection.respond(http.HTTPStatus.OK, json.dumps(self.about()) + "\n")
            del response.headers["Content-Type"]
            response.headers["Content-Type"] = "application/json"
            return response
        if request.path != "/":
            return connection.respond(http.HTTPStatus.NOT_FOUND, "there is GET / (WebSocket) and GET /health\n")
        self._half_open.remove(connection)
        return None


class EnvServer(GuardedServer):
    """`async with EnvServer(thing) as server: server.url`. At most `most` instances are lent at once."""

    def __init__(
        self,
        thing: Any,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        most: int = 64,
        token: str | None = None,
        ping_s: float = 20.0,
        placement: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(host, port, token, ping_s, "name the variable with the token in --token-env")
        if type(most) is not int or most < 1:
            raise ConfigError(f"--max must be a whole number from 1, not {most!r}")
        spec = spec_of(thing, **settings)
        self.spec: Spec = spec_of(spec, placement=placement or default_placement(spec))
        self._close_s = self.spec.close_timeout_s
        self.name = str(getattr(self.spec.make, "__name__", self.spec.name))
        self.most, self.lent = most, 0
        self.backend = backend_of(self.spec)
        self.numbers = itertools.count(1)
        self._seats = asyncio.Semaphore(most)
        self._waiting = 0

    @property
    def opening(self) -> str:
        """What `agentfly envs serve` prints, with "{url}" for the address."""
        guarded = "a token is asked for" if self.guard.has_token else "without a token, on this machine alone"
        return f"serving {self.name} at {{url}}: {guarded}; at most {self.most} instances (placement {self.spec.placement})"

    async def __aenter__(self) -> EnvServer:
        """Listen, after everything that the instances need has been prepared."""
        ready = ready_of(self.spec)
        if ready is not None:
            await make_ready(self.spec.name, ready)
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def about(self) -> dict[str, Any]:
        return {"environment": self.name, "lent": self.lent, "max": self.most}

    async def serve(self, socket: Any) -> None:
        if not await self._take_seat():
            await socket.close(TRY_LATER, f"all {self.most} instances of {self.name} are lent"[:120])
            return
        self.lent += 1
        try:
            await EnvConnection(self, socket).serve()
        finally:
            self.lent -= 1
            self._seats.release()

    async def _take_seat(self) -> bool:
        """Whether a seat is free within SEAT_S. A trainer that replaces an instance often connects before the old one ends."""
        if self._waiting >= MAX_WAITING:
            return False
        self._waiting += 1
        try:
            async with asyncio.timeout(SEAT_S):
                return await self._seats.acquire()
        except TimeoutError:
            return False
        finally:
            self._waiting -= 1


class EnvConnection:
    """One connection with a seat, and its instance."""

    def __init__(self, server: EnvServer, socket: Any) -> None:
        self.server, self.socket = server, socket
        self.instance: Instance | None = None
        self.calls: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Answer calls until the connection ends, then close the instance."""
        reader = FrameReader(SERVED)
        about = {"environment": self.server.name, "placement": self.server.spec.placement}
        try:
            await self.send(pack_value(HELLO_ID, about))
            async for data in self.socket:  # ends with the connection
                if isinstance(data, str):
                    raise BadFrame("text instead of bytes")
                for call in reader.calls(data):
                    while len(self.calls) >= MAX_CALLS:
                        await asyncio.wait(self.calls, return_when=asyncio.FIRST_COMPLETED)
                    self.spawn(self.answer(call))
        except BadFrame as error:
            await self.end(BAD_DATA, str(error))
        except self.server._websockets.exceptions.ConnectionClosed as error:
            log.debug("a connection was lost: %s", error)
        finally:
            await self.leave()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.calls.add(task)
        task.add_done_callback(self.calls.discard)

    async def leave(self) -> None:
        """Cancel the connection's calls and close its instance. A call in progress costs the instance: it is abandoned."""
        busy = list(self.calls)
        for task in busy:
            task.cancel()
        instance, self.instance = self.instance, None
        if instance is not None:
            if busy:
                instance.abandon()
            await instance.close(self.server.spec.close_timeout_s)
        if busy:
            await asyncio.wait(busy, timeout=5)

    async def answer(self, call: Call) -> None:
        try:
            data = pack_reply(call.id, await self.run(call), "server")
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - every exception is a reply; SystemExit would end the server
            data = pack_error(call.id, error)
        await self.send(data)

    async def send(self, data: bytes) -> None:
        with contextlib.suppress(self.server._websockets.exceptions.ConnectionClosed):  # `serve` notices, too
            await self.socket.send(data)

    async def run(self, call: Call) -> Any:
        if call.method == NEW:
            await self.create()
            return None
        instance = self.instance
        if instance is None:
            raise WorldError("the environment is closed")
        if call.method == DROP:
            self.instance = None
            await instance.close(self.server.spec.close_timeout_s)
            return None
        name = call.args[0] if call.method == GET and call.args else call.method
        if not isinstance(name, str) or name.startswith(("_", "@")):
            raise AttributeError(f"{self.server.name} has no public {name!r}")
        if call.method == GET:
            return await instance.get(name)
        return await instance.call(name, call.args, call.kwargs)

    async def create(self) -> None:
        if self.instance is not None:
            raise WorldError("one connection has one instance")
        spec = self.server.spec
        self.instance = instance = self.server.backend.create(next(self.server.numbers))
        try:
            await within(instance.start(), spec.start_timeout_s)
        except Expired:
            raise DeadlineError(f"{spec.name} did not come up within {spec.start_timeout_s:g} s") from None
        instance.on_death = self.died

    def died(self) -> None:
        """The instance ended by itself. Its calls have failed already; the trainer learns that it needs another one."""
        why = self.instance.why if self.instance is not None else ""
        self.spawn(self.end(FAILED, why))

    async def end(self, code: int, why: str) -> None:
        reason = why.encode()[:120].decode("utf-8", "ignore")  # a close frame has 125 bytes
        await self.socket.close(code, reason)


def default_placement(spec: Spec) -> str:
    """The environment's own placement; but one whose sync methods would block the server's loop goes into worker processes."""
    if spec.placement == "loop" and not inspect.iscoroutinefunction(getattr(spec.make, "reset", None)):
        return "process"
    return spec.placement


def read_options(words: Sequence[str]) -> dict[str, Any]:
    """`key=value` words as a dict. A value that is not TOML is text."""
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"--option takes key=value, not {word!r}")
        try:
            found[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found[key] = value
    return found
