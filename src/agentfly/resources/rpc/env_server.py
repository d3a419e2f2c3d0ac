"""`agentfly envs serve`: one kind of environment for trainers elsewhere, over HTTP.

    GET /health   JSON: what is served, how many are lent, how many there may be
    GET /         with an upgrade to WebSocket: one instance, for as long as the connection lives

The calls of a connection are the wire's frames, and its instance lives wherever a placement puts it: by default in a worker
process of its own, so that blocking code blocks nobody and a crash takes one instance. It is closed when the connection goes;
a call that was under way then takes the instance with it.

It refuses: a wrong token (compared in constant time), any request with an Origin (a web page must not reach a server on
loopback), a body, a head above 16 KiB, one connection more than `most`, a second instance on one connection, names that begin
with an underscore, and to listen beyond loopback without a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import inspect
import itertools
import json
import logging
import os
import signal
import tomllib
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import ConfigError, DeadlineError, WorldError
from ...tools.deadline import Expired, within
from ..backends.base import Instance, backend_of
from ..ready import make_ready
from ..spec import Spec, ready_of, spec_of
from .frames import BadFrame, Frames, pack, pack_error, pack_value, unpack_argument
from .server import DROP, GET, NEW
from .websocket import MAX_HEAD, WebSocket, accept_word, parse_head

log = logging.getLogger(__name__)
LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEAD_S = 10.0
SEAT_S = 10.0
SLACK = 32
"""Connections beyond `most` that may be open at once: they wait for a seat, are being refused, or ask for /health."""
MAX_CALLS = 64
"""Calls of one connection at a time; the next is read when one of them is answered."""


class EnvServer:
    """`async with EnvServer(spec) as server: server.url`."""

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
        if host not in LOOPBACK and token is None:
            raise ConfigError(f"--host {host} lets other machines in: name the variable with a token in --token-env")
        if token is not None and (not token.isascii() or len(token) < 8 or any(letter.isspace() for letter in token)):
            raise ConfigError("the token must be 8 characters or more, in ASCII and without spaces")
        if type(most) is not int or most < 1:
            raise ConfigError(f"--max must be a whole number from 1, not {most!r}")
        spec = spec_of(thing, **settings)
        self.spec: Spec = spec_of(spec, placement=placement or default_placement(spec))
        self.most, self.lent = most, 0
        self.port = port
        self._host, self._token, self._ping_s = host, token, ping_s
        self._backend = backend_of(self.spec)
        self._seats = asyncio.Semaphore(most)
        self._numbers = itertools.count(1)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"ws://{host}:{self.port}"

    async def __aenter__(self) -> EnvServer:
        """Listen, once all is there that the instances need."""
        ready = ready_of(self.spec)
        if ready is not None:
            await make_ready(self.spec.name, ready)
        try:
            self._server = await asyncio.start_server(self._accept, self._host, self.port, limit=MAX_HEAD)
        except OSError as error:
            raise ConfigError(f"cannot listen on {self._host}:{self.port}: {error.strerror or error}") from None
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening and close every instance."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=10 + self.spec.close_timeout_s)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if len(self._tasks) <= self.most + SLACK:
                await self._handle(reader, writer)
        except (OSError, ValueError, EOFError, TimeoutError, asyncio.LimitOverrunError) as error:
            log.info("a connection was refused: %s: %s", type(error).__name__, error)
        except asyncio.CancelledError:
            log.debug("a connection was ended with the server")  # its task is nobody's to await
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(HEAD_S):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, headers = parse_head(head)
        refusal = self._refuse(first, headers)
        if refusal is not None:
            await _reply(writer, *refusal)
        elif first.split(" ")[1] == "/health":
            await _reply(writer, 200, json.dumps({"environment": self._name, "lent": self.lent, "max": self.most}))
        elif not await self._seat():
            await _reply(writer, 503, f"all {self.most} instances of {self._name} are lent")
        else:
            self.lent += 1
            try:
                word = accept_word(headers["sec-websocket-key"])
                writer.write(
                    "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                    f"Sec-WebSocket-Accept: {word}\r\n\r\n".encode()
                )
                await Connection(self, WebSocket(reader, writer, client=False)).live()
            finally:
                self.lent -= 1
                self._seats.release()

    async def _seat(self) -> bool:
        """A seat, soon: a trainer that replaces an instance is often here before the old one is closed."""
        try:
            async with asyncio.timeout(SEAT_S):
                return await self._seats.acquire()
        except TimeoutError:
            return False

    def _refuse(self, first: str, headers: dict[str, str]) -> tuple[int, str] | None:
        words = first.split(" ")
        if len(words) != 3 or words[2] not in ("HTTP/1.1", "HTTP/1.0"):
            return 400, "this is an HTTP server"
        if self._token is not None:
            given = headers.get("authorization", "").encode("utf-8", "replace")
            if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
                return 401, "the token is missing or wrong"
        if words[0] != "GET" or words[1] not in ("/", "/health"):
            return 404, "there is GET / (WebSocket) and GET /health"
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            return 413, "no request here has a body"
        if "origin" in headers:
            return 403, "web pages may not connect"
        if words[1] == "/" and (
            headers.get("upgrade", "").lower() != "websocket"
            or headers.get("sec-websocket-version") != "13"
            or len(headers.get("sec-websocket-key", "")) != 24
        ):
            return 426, "connect with a WebSocket: placement = 'http' in the pool of a trainer"
        return None

    @property
    def _name(self) -> str:
        return str(getattr(self.spec.make, "__name__", self.spec.name))


class Connection:
    """One connection and its instance."""

    def __init__(self, server: EnvServer, socket: WebSocket) -> None:
        self.server, self.socket = server, socket
        self.instance: Instance | None = None
        self.calls: set[asyncio.Task[None]] = set()

    async def live(self) -> None:
        socket, spec = self.socket, self.server.spec
        watch = asyncio.create_task(socket.watch(self.server._ping_s))
        frames = Frames()
        try:
            socket.send(pack({"id": 0, "v": {"environment": self.server._name, "placement": spec.placement}}))
            while (data := await socket.receive()) is not None:
                for message in frames.feed(data):
                    while len(self.calls) >= MAX_CALLS:
                        await asyncio.wait(self.calls, return_when=asyncio.FIRST_COMPLETED)
                    task = asyncio.create_task(self.answer(message))
                    self.calls.add(task)
                    task.add_done_callback(self.calls.discard)
        except BadFrame as error:
            socket.end(1007, str(error))
        finally:
            watch.cancel()
            await self.leave()

    async def leave(self) -> None:
        """The connection is gone: so is the instance, and what it was doing."""
        busy = list(self.calls)
        for task in busy:
            task.cancel()
        instance, self.instance = self.instance, None
        if instance is not None:
            if busy:
                instance.abandon()
            closing = asyncio.ensure_future(instance.close(self.server.spec.close_timeout_s))
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(closing)
            if not closing.done():  # the server is being closed: it may not be left half-way
                await asyncio.wait([closing], timeout=self.server.spec.close_timeout_s)
        if busy:
            await asyncio.wait(busy, timeout=5)

    async def answer(self, message: dict[str, Any]) -> None:
        call_id = message.get("id")
        try:
            data = pack({"id": call_id, **pack_value(await self.call(message))})
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - an answer like any other
            data = pack({"id": call_id, "e": pack_error(_worded(error))})
        self.socket.send(data)
        with contextlib.suppress(OSError):  # the connection went while it was sent
            async with asyncio.timeout(60):
                await self.socket.drain()

    async def call(self, message: dict[str, Any]) -> Any:
        method, args, kwargs = message.get("m"), message.get("a", []), message.get("k", {})
        if not isinstance(method, str) or not isinstance(args, list) or not isinstance(kwargs, dict):
            raise WorldError("not a call")
        if method == NEW:
            return await self.begin()
        instance = self.instance
        if instance is None:
            raise WorldError("the environment is closed")
        if method == DROP:
            self.instance = None
            await instance.close(self.server.spec.close_timeout_s)
            return None
        unpacked = [unpack_argument(value) for value in args]
        name = unpacked[0] if method == GET and unpacked else method
        if not isinstance(name, str) or name.startswith(("_", "@")):
            raise AttributeError(f"{self.server._name} has no public {name!r}")
        if method == GET:
            return await instance.get(name)
        return await instance.call(name, unpacked, {key: unpack_argument(value) for key, value in kwargs.items()})

    async def begin(self) -> None:
        if self.instance is not None:
            raise WorldError("one connection has one instance")
        spec = self.server.spec
        self.instance = instance = self.server._backend.create(next(self.server._numbers))
        try:
            await within(instance.start(), spec.start_timeout_s)
        except Expired:
            raise DeadlineError(f"{spec.name} did not come up within {spec.start_timeout_s:g} s") from None
        instance.on_death = self.died

    def died(self) -> None:
        """The instance ended by itself. Its calls have been told why; the trainer is, so that it takes another."""
        why = self.instance.why if self.instance is not None else ""
        asyncio.get_running_loop().call_soon(self.socket.end, 1011, why)


def default_placement(spec: Spec) -> str:
    """As the environment says; but one that would block the server's loop goes into worker processes."""
    if spec.placement == "loop" and not inspect.iscoroutinefunction(getattr(spec.make, "reset", None)):
        return "process"
    return spec.placement


def _worded(error: BaseException) -> BaseException:
    if isinstance(error, TypeError) and "JSON form" in str(error) and "cannot leave" not in str(error):
        cure = "return text, numbers, lists, dicts or a ToolResult"
        return TypeError(f"what it returned cannot leave its server: {error}; {cure}")
    return error


async def _reply(writer: asyncio.StreamWriter, status: int, text: str) -> None:
    kind = "application/json" if text.startswith("{") else "text/plain; charset=utf-8"
    body = text.encode() + b"\n"
    head = f"HTTP/1.1 {status} {_WORDS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    writer.write(head.encode() + b"\r\n" + body)
    async with asyncio.timeout(HEAD_S):
        await writer.drain()


_WORDS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    413: "Content Too Large",
    426: "Upgrade Required",
    503: "Service Unavailable",
}


def token_from(variable: str | None) -> str | None:
    """The token that a variable holds."""
    if variable is None:
        return None
    token = os.environ.get(variable, "")
    if not token:
        raise ConfigError(f"--token-env names {variable}, but that variable is not set")
    return token


def read_options(words: Sequence[str]) -> dict[str, Any]:
    """`key=value` with the value as TOML writes it, or else a text."""
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


async def serve_until_told(server: EnvServer, say: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C, then close every instance."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with server:
        for number in (signal.SIGTERM, signal.SIGINT):  # not before: what is made ready may take hours, and ends as any program
            loop.add_signal_handler(number, stop.set)
        guarded = "a token is asked for" if server._token is not None else "without a token, on this machine alone"
        where = f"at most {server.most} instances (placement {server.spec.placement})"
        say(f"serving {server._name} at {server.url}: {guarded}; {where}")
        await stop.wait()  # the server's whole life; a signal ends it
    say("stopped")
