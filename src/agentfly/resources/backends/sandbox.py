"""Placement `sandbox`: any environment behind the walls that model-written code runs behind.

A sandbox session is forked as for code; its last cell turns it into a worker that speaks the wire's frames on the session's own
connection. So an instance has no network, a read-only system, a private /tmp, limits, and none of the trainer's variables but
those that `pass_env` names; the tier it got is logged with what it does not stop. All pools with the same options share a
fork server, which has AgentFly loaded already but never the environment: that is imported behind the walls.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat

from ...errors import ConfigError
from ..rpc.client import RemoteBackend, Worker, WorkerTransport
from ..rpc.frames import pack
from ..sandbox.limits import SandboxLimits
from ..sandbox.session import SandboxSession
from ..sandbox.shared_server import NUMERIC, SharedServer, borrow
from ..spec import Spec
from .bundle import bundle_of, hello_of
from .options import SandboxPlace

PRELOAD = (*NUMERIC, "asyncio", "agentfly.resources.rpc.sandbox_main")
WORDS_S = 2.0
"""How long a session that ended by itself may take to be reaped, which tells why."""


class SandboxTransport(WorkerTransport):
    thing = "sandbox"

    def __init__(self, spec: Spec, place: SandboxPlace) -> None:
        super().__init__(spec)
        self._place = place
        self._shared: SharedServer | None = None
        self._session: SandboxSession | None = None
        self._transport: asyncio.Transport | None = None

    async def open(self, worker: Worker, number: int) -> None:
        place = self._place
        bundle = bundle_of(self.spec, place.visible)
        limits = SandboxLimits(memory_mb=place.memory_mb, disk_mb=place.disk_mb, processes=place.processes, cpu_s=place.cpu_s)
        server, self._shared = await borrow(place.tier, place.min_tier, limits, preload=PRELOAD, visible=bundle.paths)
        self._session = session = await server.session()
        channel = session.hand_over(
            f"import sys\nsys.path[:0] = {json.dumps(list(bundle.imports))}\n"
            "from agentfly.resources.rpc.sandbox_main import from_sandbox\nfrom_sandbox()\n"
        )
        self._transport, _ = await asyncio.get_running_loop().create_connection(lambda: worker, sock=channel)
        self._transport.write(pack(hello_of(self.spec, bundle, number)))

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    async def terminate(self, asked: bool) -> str:
        how = "before it began"
        if self._transport is not None:
            self._transport.abort()
        if self._session is not None:
            if not asked:
                await self._session.wait_gone(WORDS_S)
            await self._session.close()
            how = f"({self._session.ended})"
        if self._shared is not None:
            self._shared.leave()
        return how


class SandboxBackend(RemoteBackend):
    def __init__(self, spec: Spec) -> None:
        place = spec.in_place
        if not isinstance(place, SandboxPlace):
            raise ConfigError(f"environment {spec.name!r}: placement 'sandbox' has no options to read")
        bundle = bundle_of(spec, place.visible)  # what could not be imported inside is refused before anything starts
        if os.geteuid() == 0 and place.tier != "process":
            _check_open(spec, bundle.paths)
        super().__init__(spec)
        self._place = place

    def transport(self) -> WorkerTransport:
        return SandboxTransport(self.spec, self._place)


def _check_open(spec: Spec, paths: tuple[str, ...]) -> None:
    """Root gives each sandbox a user of its own, who must be able to read what is shown to it."""
    for path in paths:
        mode = os.stat(path).st_mode
        wanted = 0o005 if stat.S_ISDIR(mode) else 0o004
        if mode & wanted != wanted:
            raise ConfigError(
                f"environment {spec.name!r}: as root, a sandbox has a user of its own, who may not read {path}: "
                f"chmod o+{'rx' if wanted == 0o005 else 'r'} {path}"
            )
