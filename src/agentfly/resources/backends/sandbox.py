"""Placement `sandbox`: an environment behind the walls that model-written code runs behind.

A sandbox session is forked as for code. Its last cell turns it into a worker that speaks frames on the session's connection. An
instance therefore has no network, a read-only system, a private /tmp, limits, and of the trainer's variables only those that
`pass_env` names. The tier is logged with what it does not stop. Pools with the same options share a fork server, which has
AgentFly loaded but never the environment: that is imported behind the walls.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat

from ...errors import ConfigError
from ...sandbox.interpreter.cells import read_reply
from ...sandbox.limits import SandboxLimits
from ...sandbox.session import SandboxSession
from ...sandbox.shared_server import NUMERIC, SharedServer, borrow
from ..placements import SandboxOptions
from ..rpc.client import Worker
from ..rpc.frames import HEADER, HELLO_ID, SANDBOXED, Reply, pack_hello
from .bundle import bundle_of, hello_of
from .remote import RemoteBackend

PRELOAD = (*NUMERIC, "asyncio", "msgpack", "agentfly.resources.rpc.instance_server", "agentfly.resources.rpc.worker_main")
MAX_FAILURE = 6 * (SandboxLimits().output_chars + 100)
REAP_S = 2.0
"""How long to wait until a session that ended by itself is reaped, which tells why it ended."""


class SandboxWorker(Worker):
    kind = "sandbox"
    limits = SANDBOXED

    _shared: SharedServer | None = None
    _session: SandboxSession | None = None
    _failure = b""

    async def connect(self, number: int) -> None:
        options: SandboxOptions = self.options
        bundle = bundle_of(self.spec, options.visible)
        limits = SandboxLimits(
            memory_mb=options.memory_mb, disk_mb=options.disk_mb, processes=options.processes, cpu_s=options.cpu_s
        )
        server, self._shared = await borrow(options.tier, options.min_tier, limits, preload=PRELOAD, visible=bundle.paths)
        self._session = await server.session()
        channel = self._session.hand_over(
            f"import sys\nsys.path[:0] = {json.dumps(list(bundle.imports))}\n"
            "from agentfly.resources.rpc.worker_main import from_sandbox\nfrom_sandbox()\n"
        )
        await asyncio.get_running_loop().create_connection(lambda: self, sock=channel)
        self.write(pack_hello(hello_of(self.spec, bundle, number)))

    def data_received(self, data: bytes) -> None:
        # If the cell fails before it becomes a worker, the session answers as it does for any cell. The number of that cell is
        # 0, and no frame of a worker begins with a zero byte.
        hello = self._calls.get(HELLO_ID)
        if hello is None or hello.done() or not (self._failure or data[HEADER.size : HEADER.size + 1] == b"\0"):
            super().data_received(data)
            return
        self._failure += data
        try:
            reply = read_reply(self._failure, MAX_FAILURE, MAX_FAILURE)
            if reply is None:
                return
            why = reply.error or "its first cell ended"
        except ValueError:
            why = "its first answer cannot be read"
        self._failure = b""
        hello.set_result(Reply(HELLO_ID, None, ["WorldError", why[-500:]]))

    async def terminate(self, wanted: bool) -> str:
        how = "before it started"
        if self._session is not None:
            if not wanted:
                await self._session.wait_gone(REAP_S)
            await self._session.close()
            how = f"({self._session.ended})"
        if self._shared is not None:
            self._shared.leave()
        return how


class SandboxBackend(RemoteBackend):
    worker_class = SandboxWorker

    def check_usable(self) -> None:
        """If root starts a sandbox, the sandbox runs as another user, who must be able to read the environment's files."""
        paths = bundle_of(self.spec, self.options.visible).paths
        for path in paths if os.geteuid() == 0 and self.options.tier != "process" else ():
            mode = os.stat(path).st_mode
            wanted = 0o005 if stat.S_ISDIR(mode) else 0o004
            if mode & wanted != wanted:
                raise ConfigError(
                    f"a sandbox that root starts runs as another user, who may not read {path}: "
                    f"chmod o+{'rx' if wanted == 0o005 else 'r'} {path}"
                )
