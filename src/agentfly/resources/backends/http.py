"""Placements `http` and `servers`: environments on environment servers (`rpc.env_server`). Needs `agentfly[serve]`.

    http     the addresses are in the config: `agentfly envs serve`, on this machine or another
    servers  the addresses are in the directory that the run's fleet keeps

The instances that a pool has on one server share one WebSocket connection. A new instance goes to the server with the fewest
instances of this process. Every wait has a deadline: connecting, each call (the lease's), and silence (pings). If a server ends
or falls silent, its calls fail with a WorldError, and the pool starts other instances on the servers that are left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ...errors import ConfigError, WorldError
from ...net.guard import token_from
from ..directory import ServerAddress, ServerDirectory
from ..instance import Backend, Instance
from ..placements import FleetOptions, HttpOptions
from ..rpc import websocket_limits
from ..rpc.client import Worker
from ..rpc.frames import DROP, MAX_FRAME, NEW, SANDBOXED, Reply
from ..rpc.served_kind import public_name
from ..spec import Spec, importable, ready_of, spec_of
from .remote import WorkerInstance

CONNECT_S = 30.0
PING_S = 20.0
"""The fleet notices a frozen server within seconds. The pings find a network that carries the fleet's traffic alone."""


def on_servers(spec: Spec, directory: ServerDirectory) -> Spec:
    """The spec of a pool whose instances live on the servers of a fleet, where their own placement is that of `spec`.

    Placement `http` stays: its environments are on a server already. Raises ConfigError if a server could not import the
    environment.
    """
    if spec.placement in ("http", "servers"):
        return spec
    who = f"environment {spec.name!r} on environment servers (cluster.env_hosts)"
    if spec.max_growth_mb is not None:
        raise ConfigError(f"{who}: its growth is not measured there: remove max_growth_mb, and set max_uses")
    try:
        importable(spec)
    except ConfigError as error:
        raise ConfigError(f"{who}: {error}") from None
    changed: dict[str, Any] = {"per_process": 1, "pass_env": ()}
    if ready_of(spec) is not None:
        # The server makes the environment ready for the task before it resets it, and has the deadline of the reset itself.
        changed["reset_timeout_s"] = spec.reset_timeout_s + spec.call_timeout_s
    return spec_of(spec, placement="servers", directory=directory, **changed)


class ServerConnection(Worker):
    """The connection of one pool to one environment server."""

    def __init__(self, backend: HttpBackend, address: ServerAddress) -> None:
        self.limits = None if backend.of_fleet else SANDBOXED._replace(frame=MAX_FRAME)
        super().__init__(backend.spec, backend.spec.placement_options)
        self.directory, self.address, self.kind = backend.directory, address, address.name
        self.ping_s = backend.ping_s
        self.started = False
        self._socket: Any = None
        self._ended_by = ""

    async def connect(self, number: int) -> None:
        timeout_s = min(CONNECT_S, self.spec.start_timeout_s)
        self._socket = await open_socket(self.address.url, self.directory.token or None, timeout_s, self.ping_s)
        self._batch = websocket_limits.FrameBatch(self._socket)
        self.read_from(self._messages())

    async def _messages(self) -> AsyncIterator[bytes]:
        closed = websocket_limits.websockets().exceptions.ConnectionClosed
        try:
            while True:
                data = await self._socket.recv()
                if isinstance(data, str):
                    self._ended_by = "it sent text"
                    break
                yield data
        except closed as error:
            self._ended_by = websocket_limits.reason_of(error)
            if "ping timeout" in self._ended_by:
                self._ended_by = f"nothing was heard for {3 * self.ping_s:g} s"

    def write(self, data: bytes) -> None:
        self._batch.send(data)

    def unasked(self, reply: Reply) -> bool:
        """The server reports the end of an instance under its negative number."""
        died = self.instances.get(-reply.id)
        if died is None or reply.error is None:
            return False
        died(reply.error[1])
        return True

    async def terminate(self, wanted: bool) -> str:
        self.directory.disconnected(self.address, self)
        if self._socket is None:
            return f"before it started ({self.address.url})"
        self._socket.transport.abort()  # a frozen server would not answer a close frame, and the calls fail only after this
        return f"the connection ({self._ended_by or 'it is gone'}): {self.address.url}"


async def open_socket(url: str, token: str | None, timeout_s: float, ping_s: float = PING_S) -> Any:
    """A connection to an environment server. Raises ConfigError if the token is wrong, WorldError if there is no server."""
    websockets = websocket_limits.websockets()
    connect: Any = websockets.asyncio.client.connect

    class Connect(connect):  # type: ignore[misc]
        def process_redirect(self, exc: Exception) -> Exception:
            return exc  # the pool names its server: a redirect is a refusal

    try:
        return await Connect(
            f"ws{url.removeprefix('http')}" if url.startswith("http") else url,  # https becomes wss
            additional_headers={"Authorization": f"Bearer {token}"} if token is not None else {},
            user_agent_header=None,
            proxy=None,
            open_timeout=timeout_s,
            create_connection=websocket_limits.limited(websockets.asyncio.client.ClientConnection),
            **websocket_limits.settings(ping_s),
        )
    except websockets.exceptions.InvalidStatus as error:
        said = bytes(error.response.body or b"")[:500].decode("utf-8", "replace").strip()
        refusal = f"the server at {url} refused: {said or error.response.status_code}"
        if error.response.status_code == 401:
            raise ConfigError(f"{refusal}; name the variable with its token in token_env") from None
        raise WorldError(refusal) from None
    except TimeoutError:
        raise WorldError(f"the server at {url} did not answer within {timeout_s:g} s") from None
    except (OSError, EOFError, ValueError, websockets.exceptions.WebSocketException) as error:
        raise WorldError(f"no environment server answers at {url} ({error}); start one: agentfly envs serve NAME") from None


class ServerInstance(WorkerInstance):
    """An instance on a server. Its number names it on the connection."""

    _worker: ServerConnection | None = None

    def __init__(self, backend: HttpBackend, number: int) -> None:
        super().__init__(backend.spec, number)
        self._backend = backend

    async def start(self) -> None:
        """Start on the server with the fewest instances. If its connection ends meanwhile, start on another.

        Raises WorldError if the environment does not start, or if all servers of a config have failed.
        """
        failed: set[ServerAddress] = set()
        while True:
            worker = self._worker = await self._backend.assign(self, failed)
            try:
                if worker.started:
                    await asyncio.shield(worker.ready)
                else:
                    worker.started = True
                    await worker.start(self.number)
                self._backend.check(worker.about)
                await worker.call(self.number, NEW, (self._backend.served_name,))
                self.alive = worker.alive
            except WorldError:
                failed.add(worker.address)
                if worker.alive or (not self._backend.of_fleet and failed >= worker.directory.counts.keys()):
                    raise
            if self.alive:
                return
            failed.add(worker.address)
            self._leave()

    async def close(self, timeout_s: float) -> None:
        worker = self._worker
        if worker is None:
            return
        if self.alive:
            await super().close(timeout_s)
        elif worker.alive and worker.ready.done() and self.number in worker.instances:
            worker.post(self.number, DROP, (True,), {})
        self._leave()
        if not worker.alive:
            await asyncio.shield(worker.gone)

    async def _close(self) -> None:
        await self._send(DROP)

    def tidy(self) -> None:
        if self._worker is not None and not self.worn:
            self.worn = self._worker.directory.gives_up(self._worker.address)

    def _leave(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.directory.leave(worker.address)
            worker.leave(self.number)


class HttpBackend(Backend):
    """The connections of one pool, one per server."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        options = spec.placement_options
        websocket_limits.websockets()
        self.of_fleet = isinstance(options, FleetOptions)
        self.ping_s = PING_S
        if isinstance(options, HttpOptions):
            try:
                token = token_from(options.token_env, "token_env") or ""
            except ConfigError as error:
                raise ConfigError(f"environment {spec.name!r}: {error}") from None
            self.directory = ServerDirectory(token, [ServerAddress("server", url) for url in options.urls])
            self.ping_s, self.served_name = float(options.ping_s), public_name(spec)
        else:
            assert isinstance(options, FleetOptions)
            self.directory, self.served_name = options.directory, spec.name
        self._connections: dict[ServerAddress, ServerConnection] = {}

    def create(self, number: int) -> Instance:
        return ServerInstance(self, number)

    async def assign(self, instance: ServerInstance, avoid: set[ServerAddress]) -> ServerConnection:
        """The connection to the server for a new instance; it is opened by the first one."""
        address = await self.directory.choose(avoid)
        worker = self._connections.get(address)
        if worker is None or not worker.alive:
            worker = self._connections[address] = ServerConnection(self, address)
            self.directory.connected(address, worker)
            self._connections = {each.address: each for each in self._connections.values() if each.alive}
        worker.instances[instance.number] = instance.died
        return worker

    def check(self, about: Any) -> None:
        """Raises WorldError if a server of the config lends something else."""
        served = about.get("environment") if isinstance(about, dict) else None
        if not self.of_fleet and served != self.served_name:
            raise WorldError(
                f"{self.spec.name}: the server of its pool serves {served!r}, not {self.served_name!r}: mend the pool's url"
            )
