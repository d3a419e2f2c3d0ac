"""The server of an environment host: instances of several kinds, many on one connection. Needs `agentfly[serve]`.

    WebSocket --@new [kind]--> instance 7 of this connection     where it lives follows from the kind's placement
              --call 7-------> reply                             a method of a `loop` environment runs at once
              --@drop 7 [given up]-> closed
              <--reply -7----- instance 7 ended by itself: the reason

Frames are those of `rpc.frames`. Frames that are sent in one tick of the event loop share a WebSocket message. If a connection
ends, so do its instances. Unlike `env_server`, the server does not limit the number of instances: the trainer's pools do, and
only the processes of the run have the token.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ... import plugins
from ...aio.deadline import Expired, within
from ...errors import ConfigError, DeadlineError, WorldError
from ...types import Task
from ..instance import Backend, Instance, backend_of
from ..spec import Spec, importable, make_ready, ready_of, spec_of
from .env_server import BAD_DATA, GuardedServer
from .frames import DROP, GET, HELLO_ID, NEW, SERVED, BadFrame, Call, FrameReader, pack_error, pack_reply, pack_value

MAX_BATCH = 1 << 20
CLOSING_S = 30.0
"""For the instances of a connection to close, all at the same time."""
_FIELDS = ("name", "placement", "per_process", "start_timeout_s", "reset_timeout_s", "close_timeout_s")

log = logging.getLogger(__name__)


def kind_value(spec: Spec) -> dict[str, Any]:
    """What a host needs to know of a kind, with a JSON form. Raises ConfigError if a host could not import it."""
    target, options = importable(spec)
    place = {name: list(value) if isinstance(value, tuple) else value for name, value in spec.place.items()}
    own = {name: getattr(spec, name) for name in _FIELDS}
    return {**own, "target": target, "options": options, "place": place, "pass_env": list(spec.pass_env)}


def kind_from(value: Mapping[str, Any]) -> Spec:
    """The spec of a kind on a host. Raises ConfigError if this machine cannot import it, or lacks what its placement needs."""
    settings = {name: value[name] for name in (*_FIELDS, "options", "place")}
    try:
        made = plugins.resolve("envs", value["target"])
        return spec_of(made, **settings, pass_env=tuple(value["pass_env"]))
    except ImportError as error:
        raise ConfigError(f"environment {value['name']!r} cannot be imported: {error}") from None


class HostedKind:
    """One kind of environment on this host."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.backend: Backend = backend_of(spec)
        self.ready: Callable[[Task | None], Any] | None = ready_of(spec)
        self.numbers = itertools.count(1)

    async def try_out(self) -> None:
        """Make the kind ready, start one instance and close it. Raises ConfigError if no instance can work here."""
        if self.ready is not None:
            await make_ready(self.spec.name, self.ready)
        instance = self.backend.create(next(self.numbers))
        try:
            await within(instance.start(), self.spec.start_timeout_s)
        except ConfigError:
            raise
        except ImportError as error:
            raise ConfigError(f"environment {self.spec.name!r} does not start: {error}") from None
        except Exception as error:  # noqa: BLE001 - it may start the next time; the pools count and report failed starts
            log.warning("a first %s did not start: %s: %s", self.spec.name, type(error).__name__, error)
        finally:
            await instance.close(self.spec.close_timeout_s)


class HostServer(GuardedServer):
    """`async with HostServer(specs, host=..., token=...) as server: server.url`."""

    def __init__(self, specs: Iterable[Spec], *, host: str, token: str, port: int = 0, ping_s: float = 20.0) -> None:
        super().__init__(host, port, token, ping_s, "the driver sets one", CLOSING_S)
        self.kinds = {spec.name: HostedKind(spec) for spec in specs}
        self.num_instances = 0

    async def __aenter__(self) -> HostServer:
        for kind in self.kinds.values():
            await kind.try_out()
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def about(self) -> dict[str, Any]:
        return {"environments": list(self.kinds), "instances": self.num_instances}

    async def serve(self, socket: Any) -> None:
        await HostConnection(self, socket).serve()


@dataclass(slots=True, eq=False)
class Held:
    """An instance of a connection, and the calls of it that run now."""

    kind: HostedKind
    instance: Instance
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class HostConnection:
    """One connection and its instances, by the number that the client gave them."""

    def __init__(self, server: HostServer, socket: Any) -> None:
        self.server, self.socket = server, socket
        self.held: dict[int, Held] = {}
        self.loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._outgoing: list[bytes] = []
        self._size = 0

    async def serve(self) -> None:
        """Answer calls until the connection ends, then close its instances."""
        reader = FrameReader(SERVED)
        self.send(pack_value(HELLO_ID, self.server.about()))
        try:
            async for data in self.socket:  # ends with the connection
                if isinstance(data, str):
                    raise BadFrame("text instead of bytes")
                for call in reader.calls(data):
                    self.handle(call)
        except BadFrame as error:
            await self.socket.close(BAD_DATA, str(error)[:120])
        except self.server._websockets.exceptions.ConnectionClosed as error:
            log.debug("a connection was lost: %s", error)
        finally:
            await self.leave()

    async def leave(self) -> None:
        """Close every instance. One with a call in progress is abandoned."""
        held, self.held = list(self.held.values()), {}
        closing = [asyncio.create_task(self.close(each, bool(each.tasks))) for each in held]
        if closing:
            await asyncio.wait(closing, timeout=CLOSING_S)

    # ---- calls

    def handle(self, call: Call) -> None:
        held = self.held.get(call.instance)
        if call.method == NEW:
            self.create(call)
        elif held is None:
            self.send(pack_error(call.id, WorldError("the environment is closed")))
        elif call.method == DROP:
            del self.held[call.instance]
            self.spawn(self.drop(call, held), self._tasks)
        elif call.method == "reset" and held.kind.ready is not None:
            self.spawn(self.answer(call.id, self.reset_ready(held, call)), held.tasks)
        elif held.instance.local:
            self.call_local(call, held)
        else:
            name, instance = call.method, held.instance
            work = instance.get(*call.args) if name == GET else instance.call(name, call.args, call.kwargs)
            self.spawn(self.answer(call.id, work), held.tasks)

    def call_local(self, call: Call, held: Held) -> None:
        """Call an environment of this event loop: its sync methods return at once."""
        try:
            if call.method == GET:
                value = getattr(held.instance.env, *call.args)
            else:
                value = getattr(held.instance.env, call.method)(*call.args, **call.kwargs)
        except BaseException as error:  # noqa: BLE001 - every exception is a reply; SystemExit would end the host
            self.send(pack_error(call.id, error))
            return
        if inspect.isawaitable(value):
            self.spawn(self.answer(call.id, held.instance.at_home(value)), held.tasks)
        else:
            self.send(pack_reply(call.id, value, "environment host"))

    async def answer(self, call_id: int, work: Any) -> None:
        try:
            data = pack_reply(call_id, await work, "environment host")
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - every exception is a reply
            data = pack_error(call_id, error)
        self.send(data)

    async def reset_ready(self, held: Held, call: Call) -> Any:
        """Make the kind ready for the task, which has no deadline here, and reset the instance."""
        spec, ready = held.kind.spec, held.kind.ready
        assert ready is not None
        task = call.args[0] if call.args else None
        await make_ready(spec.name, ready, task)
        try:
            return await within(held.instance.call("reset", call.args, call.kwargs), spec.reset_timeout_s)
        except Expired:
            raise DeadlineError(f"{spec.name} was not reset within {spec.reset_timeout_s:g} s") from None

    # ---- instances

    def create(self, call: Call) -> None:
        kind = self.server.kinds.get(call.args[0] if call.args else "")
        if kind is None or call.instance in self.held or call.instance < 1:
            known = ", ".join(self.server.kinds) or "none"
            self.send(pack_error(call.id, WorldError(f"{call.args} cannot be created here as {call.instance}; known: {known}")))
            return
        held = self.held[call.instance] = Held(kind, kind.backend.create(next(kind.numbers)))
        self.server.num_instances += 1
        held.instance.on_death = partial(self.died, call.instance, held)
        self.spawn(self.answer(call.id, self.start(held)), held.tasks)

    async def start(self, held: Held) -> None:
        spec = held.kind.spec
        try:
            await within(held.instance.start(), spec.start_timeout_s)
        except Expired:
            raise DeadlineError(f"{spec.name} did not come up within {spec.start_timeout_s:g} s") from None

    def died(self, number: int, held: Held) -> None:
        """An instance ended by itself. Its calls have failed already; the client learns that it needs another one."""
        if self.held.get(number) is held:
            del self.held[number]
            why = held.instance.why or f"{held.kind.spec.name} ended"
            self.send(pack_error(-number, WorldError(why)))
            self.spawn(self.close(held, False), self._tasks)

    async def drop(self, call: Call, held: Held) -> None:
        """Close an instance at the wish of the client, which may have given up a call of it."""
        await self.close(held, bool(held.tasks) or bool(call.args and call.args[0]))
        self.send(pack_value(call.id, None))

    async def close(self, held: Held, given_up: bool) -> None:
        busy = list(held.tasks)
        for task in busy:
            task.cancel()
        if given_up:
            held.instance.abandon()
        held.instance.on_death = None
        try:
            await held.instance.close(held.kind.spec.close_timeout_s)
        finally:
            self.server.num_instances -= 1
        if busy:
            await asyncio.wait(busy, timeout=5)

    # ---- sending

    def spawn(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        task = self.loop.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def send(self, data: bytes) -> None:
        if self._size + len(data) > MAX_BATCH:
            self.flush()
        if not self._outgoing:
            self.loop.call_soon(self.flush)
        self._outgoing.append(data)
        self._size += len(data)

    def flush(self) -> None:
        if self._outgoing:
            data = b"".join(self._outgoing)
            self._outgoing.clear()
            self._size = 0
            self.server._websockets.asyncio.server.broadcast([self.socket], data)  # the library's `send` that never waits
