"""Placement `hosts`: an environment on one of the environment hosts of a cluster. Needs `agentfly[serve]`.

The instances that a pool has on one host share one WebSocket connection (`rpc.host_server`). A new instance goes to the live
host with the fewest instances of this process. If a host is lost, the connection ends, and with it every instance on it: calls
in flight fail with a WorldError, and the pool starts other instances on the hosts that are left.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ...errors import ConfigError, WorldError
from ..directory import ServerAddress, ServerDirectory
from ..instance import Backend, Instance
from ..placements import HostsOptions
from ..rpc import websocket_limits
from ..rpc.frames import DROP, NEW, Reply
from ..spec import Spec, importable, ready_of, spec_of
from .http import CONNECT_S, HttpWorker, open_socket
from .remote import WorkerInstance

PING_S = 20.0
"""The driver notices a frozen host within seconds. The pings find a network that carries the driver's traffic alone."""
MAX_BATCH = 1 << 20
"""Frames that are sent in one tick of the event loop go into one WebSocket message, up to so many bytes."""


def on_hosts(spec: Spec, directory: ServerDirectory) -> Spec:
    """The spec of a pool whose instances live on hosts, where their own placement is that of `spec`.

    Placement `http` stays: its environments are on a server already. Raises ConfigError if a host could not import the
    environment.
    """
    if spec.placement in ("http", "hosts"):
        return spec
    who = f"environment {spec.name!r} on environment hosts (cluster.env_hosts)"
    if spec.max_growth_mb is not None:
        raise ConfigError(f"{who}: its growth is not measured there: remove max_growth_mb, and set max_uses")
    try:
        importable(spec)
    except ConfigError as error:
        raise ConfigError(f"{who}: {error}") from None
    changed: dict[str, Any] = {"per_process": 1, "pass_env": ()}
    if ready_of(spec) is not None:
        # The host makes the environment ready for the task before it resets it, and has the deadline of the reset itself.
        changed["reset_timeout_s"] = spec.reset_timeout_s + spec.call_timeout_s
    return spec_of(spec, placement="hosts", directory=directory, inside=spec, **changed)


class HostWorker(HttpWorker):
    """The connection of one pool to one host. `options` is the address of the host."""

    kind = "environment host"
    limits = None

    def __init__(self, spec: Spec, directory: ServerDirectory, host: ServerAddress) -> None:
        super().__init__(spec, host)
        self.directory, self.host, self.kind = directory, host, host.name
        self.started = False
        self._url = host.url
        self._outgoing: list[bytes] = []
        self._size = 0

    async def connect(self, number: int) -> None:
        timeout_s = min(CONNECT_S, self.spec.start_timeout_s)
        self._socket = await open_socket(self._url, self.directory.token, timeout_s, PING_S)
        self.read_from(self._messages())

    @property
    def ping_s(self) -> float:
        return PING_S

    def write(self, data: bytes) -> None:
        if self._size + len(data) > MAX_BATCH:
            self._flush()
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(data)
        self._size += len(data)

    def _flush(self) -> None:
        if self._outgoing:
            data = b"".join(self._outgoing)
            self._outgoing.clear()
            self._size = 0
            super().write(data)

    def unasked(self, reply: Reply) -> bool:
        """The host reports the end of an instance under its negative number."""
        died = self.instances.get(-reply.id)
        if died is None or reply.error is None:
            return False
        died(reply.error[1])
        return True

    async def terminate(self, wanted: bool) -> str:
        self.directory.disconnected(self.host, self)
        if self._socket is None:
            return f"before it started ({self._url})"
        self._socket.transport.abort()  # a frozen host would not answer a close frame, and the calls fail only after this
        return f"the connection ({self._ended_by or 'it is gone'}): {self._url}"


class HostInstance(WorkerInstance):
    """An instance on a host. Its number names it on the connection."""

    _worker: HostWorker | None = None

    def __init__(self, backend: HostsBackend, number: int) -> None:
        super().__init__(backend.spec, number)
        self._backend = backend

    async def start(self) -> None:
        """Start on the host with the fewest instances. If that host is lost meanwhile, start on another."""
        failed: set[ServerAddress] = set()
        while True:
            worker = self._worker = await self._backend.assign(self, failed)
            try:
                if worker.started:
                    await asyncio.shield(worker.ready)
                else:
                    worker.started = True
                    await worker.start(self.number)
                await worker.call(self.number, NEW, (self.spec.name,))
            except WorldError:
                if worker.alive:
                    raise  # the environment did not start; the host is well
                failed.add(worker.host)
                self._leave()
            else:
                self.alive = worker.alive
                if self.alive:
                    return
                failed.add(worker.host)
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
            self.worn = self._backend.directory.gives_up(self._worker.host)

    def _leave(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.directory.leave(worker.host)
            worker.leave(self.number)


class HostsBackend(Backend):
    """The connections of one pool, one per host."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        options = spec.in_place
        assert isinstance(options, HostsOptions)
        self.directory: ServerDirectory = options.directory
        self._workers: dict[ServerAddress, HostWorker] = {}
        websocket_limits.websockets()

    def create(self, number: int) -> Instance:
        return HostInstance(self, number)

    async def assign(self, instance: HostInstance, avoid: set[ServerAddress]) -> HostWorker:
        """The connection to the host for a new instance; it is opened by the first one."""
        host = await self.directory.choose(avoid)
        worker = self._workers.get(host)
        if worker is None or not worker.alive:
            worker = self._workers[host] = HostWorker(self.spec, self.directory, host)
            self.directory.connected(host, worker)
            self._workers = {known: each for known, each in self._workers.items() if each.alive}
        worker.instances[instance.number] = instance.died
        return worker
