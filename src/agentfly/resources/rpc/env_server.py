"""The environment server: lends environments to trainers elsewhere, over WebSocket. Needs `agentfly[serve]`.

    TCP connection --request--> Guard: Host, Origin, token --> GET /health    JSON: environment, lent, max
         |                            |                    `-> GET /          WebSocket --seat--> first reply, then frames
         `-- no request: HEAD_S       `-- refused: 401, 403, 404

    WebSocket --@new 7 [kind]--------> instance 7 of this connection, which takes a seat
              --call 7---------------> reply
              --@drop 7 [given up]---> closed
              <--reply -7------------- instance 7 ended by itself: the reason

A connection is half-open until the guard has accepted its request. Half-open connections take no seat, time out after HEAD_S,
and the oldest is closed if there are more than MAX_HALF_OPEN. If a connection ends, so do its instances.

`agentfly envs serve` lends one kind, in worker processes by default, so that a call that blocks or crashes affects no other.
The servers of a run's fleet lend several, without a limit of seats: the trainer's pools have limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import inspect
import json
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ...aio.deadline import Expired, within
from ...errors import ConfigError, DeadlineError, WorldError
from ...net.address import url_of
from ...net.guard import Guard
from ...net.server import HalfOpen
from ..instance import Instance
from ..spec import Spec, make_ready, spec_of
from . import websocket_limits
from .frames import DROP, GET, HELLO_ID, NEW, SERVED, BadFrame, CallFrame, FrameReader, pack_error, pack_reply, pack_value
from .served_kind import ServedKind, default_placement, public_name

log = logging.getLogger(__name__)
HEAD_S = 10.0
MAX_HALF_OPEN = 256
SEAT_S = 10.0
MAX_WAITING = 32
"""Connections and instances that may wait for a seat at once. A further one is refused immediately."""
MAX_CALLS = 64
"""Calls of one instance at once. The next frame of its connection is handled when one of them is answered."""
BAD_DATA, TRY_LATER = 1007, 1013
"""WebSocket close codes."""


class EnvServer:
    """`async with EnvServer(thing) as server: server.url`. At most `most` instances are lent at once.

    `thing` is a kind of environment, or a list of `Spec`s. With `most` None the server trusts its clients, who are processes of
    the same run: nothing limits their instances and calls, they may use private names, and the server makes a kind ready for
    each task. Every kind is then tried out before the server listens.

    Raises ConfigError if `host` is not loopback and there is no token, MissingExtra without `agentfly[serve]`.
    """

    def __init__(
        self,
        thing: object,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        most: int | None = 64,
        token: str | None = None,
        ping_s: float = 20.0,
        placement: str | None = None,
        **settings: object,
    ) -> None:
        self.guard = Guard(host, token, cure="name the variable with the token in --token-env")
        if most is not None and (type(most) is not int or most < 1):
            raise ConfigError(f"--max must be a whole number from 1, not {most!r}")
        self.websockets = websocket_limits.websockets()
        if isinstance(thing, list):
            specs: list[Spec] = thing
        else:
            spec = spec_of(thing, **settings)
            specs = [spec_of(spec, placement=placement or default_placement(spec))]
        self.kinds = {public_name(spec) if most else spec.name: ServedKind(spec) for spec in specs}
        self.most, self.lent = most, 0
        """`lent` counts seats: one of each connection, and one of each further instance of it."""
        self.port = port
        self._host, self._ping_s = host, ping_s
        self.close_s = 20.0 + max((spec.close_timeout_s for spec in specs), default=0.0)
        """For the instances of a connection to close, all at the same time."""
        self._seats = asyncio.Semaphore(most or 1 << 30)
        self._waiting = 0
        self._half_open = HalfOpen(MAX_HALF_OPEN)
        self._server: Any = None

    @property
    def url(self) -> str:
        return url_of("ws", self._host, self.port)

    @property
    def name(self) -> str:
        """The kinds that it lends."""
        return ", ".join(self.kinds)

    @property
    def placement(self) -> str:
        return ", ".join(kind.spec.placement for kind in self.kinds.values())

    @property
    def opening(self) -> str:
        """What `agentfly envs serve` prints, with "{url}" for the address."""
        guarded = "a token is asked for" if self.guard.has_token else "without a token, on this machine alone"
        return f"serving {self.name} at {{url}}: {guarded}; at most {self.most} instances (placement {self.placement})"

    async def __aenter__(self) -> EnvServer:
        """Listen, after everything that the instances need has been prepared. Raises ConfigError if the address is not free."""
        for kind in self.kinds.values():
            if kind.ready is not None:
                await make_ready(kind.spec.name, kind.ready)
            if self.most is None:
                await kind.try_out()
        try:
            self._server = await self.websockets.asyncio.server.serve(
                self._serve,
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
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening, and close every connection with its instances."""
        if self._server is None:
            return
        self._half_open.abort()
        self._server.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10 + self.close_s):
                await self._server.wait_closed()

    def _connection_class(self) -> Any:
        half_open = self._half_open

        class TrackedConnection(websocket_limits.limited(self.websockets.asyncio.server.ServerConnection)):  # type: ignore[misc]
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
            about = {"environment": self.name, "lent": self.lent, "max": self.most}
            response = connection.respond(http.HTTPStatus.OK, json.dumps(about) + "\n")
            del response.headers["Content-Type"]
            response.headers["Content-Type"] = "application/json"
            return response
        if request.path != "/":
            return connection.respond(http.HTTPStatus.NOT_FOUND, "there is GET / (WebSocket) and GET /health\n")
        self._half_open.remove(connection)
        return None

    async def _serve(self, socket: Any) -> None:
        """Serve one connection until it ends."""
        try:
            await self.take_seat()
        except WorldError as error:
            await socket.close(TRY_LATER, str(error)[:120])
            return
        connection = EnvConnection(self, socket)
        try:
            await connection.serve()
        finally:
            connection.leave_seats()

    async def take_seat(self) -> None:
        """Raises WorldError if none is free within SEAT_S. A trainer often replaces an instance before the old one ends."""
        all_taken = WorldError(f"all {self.most} instances of {self.name} are lent")
        if self._waiting >= MAX_WAITING:
            raise all_taken
        self._waiting += 1
        try:
            async with asyncio.timeout(SEAT_S):
                await self._seats.acquire()
        except TimeoutError:
            raise all_taken from None
        finally:
            self._waiting -= 1
        self.lent += 1

    def leave_seat(self) -> None:
        self.lent -= 1
        self._seats.release()


@dataclass(slots=True, eq=False)
class LentInstance:
    """An instance of a connection, and the calls of it that run now. `seated`: it has a seat until it is closed."""

    kind: ServedKind
    instance: Instance
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    seated: bool = False


class EnvConnection:
    """One connection and its instances, by the number that the client gave them."""

    def __init__(self, server: EnvServer, socket: Any) -> None:
        self.server, self.socket = server, socket
        self.lent: dict[int, LentInstance] = {}
        self.seats, self.used, self.waiting = 1, 0, 0
        """Seats, how many of them instances use, and instances that wait for one. An idle connection keeps its last seat."""
        self.send = websocket_limits.FrameBatch(socket).send
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Answer calls until the connection ends, then close its instances."""
        reader = FrameReader(SERVED)
        closed = asyncio.create_task(self.socket.wait_closed())
        self.send(pack_value(HELLO_ID, {"environment": self.server.name, "placement": self.server.placement}))
        try:
            async for data in self.socket:  # ends with the connection
                if isinstance(data, str):
                    raise BadFrame("text instead of bytes")
                for call in reader.calls(data):
                    self.handle(call)
                    if not await self.has_room(closed):
                        return
        except BadFrame as error:
            await self.socket.close(BAD_DATA, str(error)[:120])
        except self.server.websockets.exceptions.ConnectionClosed as error:
            log.debug("a connection was lost: %s", error)
        finally:
            closed.cancel()
            await self.leave()

    async def has_room(self, closed: asyncio.Task[None]) -> bool:
        """Wait until the client reads its replies and, if it is not trusted, until its instances may have more calls.

        Returns False if the connection ends meanwhile.
        """
        if self.socket.paused:
            await self.socket.drain()
        while self.server.most is not None and len(self._tasks) >= MAX_CALLS * max(1, len(self.lent)):
            await asyncio.wait({closed, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
            if closed.done():
                return False
        return True

    async def leave(self) -> None:
        """Close every instance. One with a call in progress is abandoned."""
        lent, self.lent = list(self.lent.values()), {}
        closing = [asyncio.create_task(self.close(each, bool(each.tasks))) for each in lent]
        if closing:
            await asyncio.wait(closing, timeout=self.server.close_s)

    # ---- calls

    def handle(self, call: CallFrame) -> None:
        lent = self.lent.get(call.instance)
        if call.method == NEW:
            self.create(call)
        elif lent is None:
            self.send(pack_error(call.id, WorldError("the environment is closed")))
        elif call.method == DROP:
            del self.lent[call.instance]
            self.spawn(self.drop(call, lent))
        elif lent.instance.local and not (call.method == "reset" and lent.kind.ready):
            self.call_local(call, lent)
        else:
            self.spawn(self.answer(call.id, self.run(call, lent)), lent)

    def name_of(self, call: CallFrame) -> str:
        """The method or attribute of the environment that a call asks for. Raises AttributeError if it is not public."""
        name = call.args[0] if call.method == GET and call.args else call.method
        hidden = "@" if self.server.most is None else ("_", "@")
        if not isinstance(name, str) or name.startswith(hidden):
            raise AttributeError(f"{self.server.name} has no public {name!r}")
        return name

    def call_local(self, call: CallFrame, lent: LentInstance) -> None:
        """Call an environment of this event loop: its sync methods return at once."""
        try:
            value = getattr(lent.instance.env, self.name_of(call))
            if call.method != GET:
                value = value(*call.args, **call.kwargs)
        except BaseException as error:  # noqa: BLE001 - every exception is a reply; SystemExit would end the server
            self.send(pack_error(call.id, error))
            return
        if inspect.isawaitable(value):
            self.spawn(self.answer(call.id, lent.instance.at_home(value)), lent)
        else:
            self.send(pack_reply(call.id, value, "environment server"))

    async def run(self, call: CallFrame, lent: LentInstance) -> Any:
        name, instance = self.name_of(call), lent.instance
        if call.method == GET:
            return await instance.get(name)
        if name == "reset" and lent.kind.ready is not None and self.server.most is None:
            return await self.reset_ready(call, lent)
        return await instance.call(name, call.args, call.kwargs)

    async def reset_ready(self, call: CallFrame, lent: LentInstance) -> Any:
        """Make the kind ready for the task, which has no deadline here, and reset the instance."""
        spec, ready = lent.kind.spec, lent.kind.ready
        assert ready is not None
        await make_ready(spec.name, ready, call.args[0] if call.args else None)
        try:
            return await within(lent.instance.call("reset", call.args, call.kwargs), spec.reset_timeout_s)
        except Expired:
            raise DeadlineError(f"{spec.name} was not reset within {spec.reset_timeout_s:g} s") from None

    async def answer(self, call_id: int, work: Any) -> None:
        try:
            data = pack_reply(call_id, await work, "environment server")
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - every exception is a reply; SystemExit would end the server
            data = pack_error(call_id, error)
        self.send(data)

    def spawn(self, work: Coroutine[Any, Any, None], lent: LentInstance | None = None) -> None:
        task = asyncio.get_running_loop().create_task(work)
        for tasks in (self._tasks,) if lent is None else (self._tasks, lent.tasks):
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    # ---- instances

    def create(self, call: CallFrame) -> None:
        kinds = self.server.kinds
        name = call.args[0] if call.args else next(iter(kinds), "")
        kind = kinds.get(name) if isinstance(name, str) else None
        if kind is None or call.instance in self.lent or call.instance < 0:
            why = f"{name!r} cannot be created here as {call.instance}; known: {self.server.name or 'none'}"
            self.send(pack_error(call.id, WorldError(why)))
            return
        lent = self.lent[call.instance] = LentInstance(kind, kind.create())
        lent.instance.on_death = partial(self.died, call.instance, lent)
        self.spawn(self.answer(call.id, self.start(call.instance, lent)), lent)

    async def start(self, number: int, lent: LentInstance) -> None:
        try:
            await self.take_seat()
        except WorldError as error:
            self.lent.pop(number, None)
            if not self.seats:
                await self.socket.close(TRY_LATER, str(error)[:120])
            raise
        lent.seated = True
        await lent.kind.start(lent.instance)

    def died(self, number: int, lent: LentInstance) -> None:
        """An instance ended by itself. Its calls have failed already; the client learns that it needs another one."""
        if self.lent.get(number) is lent:
            del self.lent[number]
            why = lent.instance.why or f"{lent.kind.spec.name} ended"
            self.send(pack_error(-number, WorldError(why)))
            self.spawn(self.close(lent, False))

    async def drop(self, call: CallFrame, lent: LentInstance) -> None:
        """Close an instance at the wish of the client, which may have given up a call of it."""
        await self.close(lent, bool(lent.tasks) or bool(call.args and call.args[0]))
        self.send(pack_value(call.id, None))

    async def close(self, lent: LentInstance, given_up: bool) -> None:
        busy = list(lent.tasks)
        for task in busy:
            task.cancel()
        if given_up:
            lent.instance.abandon()
        lent.instance.on_death = None
        try:
            await lent.instance.close(lent.kind.spec.close_timeout_s)
        finally:
            if lent.seated:
                self.leave_seat()
        if busy:
            await asyncio.wait(busy, timeout=5)

    # ---- seats

    async def take_seat(self) -> None:
        """Use an idle seat of the connection, or one more. Raises WorldError if there is none."""
        if self.used == self.seats:
            self.waiting += 1
            try:
                await self.server.take_seat()
            finally:
                self.waiting -= 1
            self.seats += 1
        self.used += 1

    def leave_seat(self) -> None:
        self.used -= 1
        if self.seats > 1 or (self.seats and self.waiting):
            self.seats -= 1
            self.server.leave_seat()

    def leave_seats(self) -> None:
        """The connection has ended."""
        while self.seats:
            self.seats -= 1
            self.server.leave_seat()
