"""Fork servers that several users share: `borrow(settings)` returns the running server for these settings.

All users with the same settings in the same event loop share one server. It starts for the first of them, ends when it has had
no user for `IDLE_S`, and ends with the loop in any case. If the tier does not work here, `borrow` raises ConfigError with what
to enable; a weaker tier is never taken instead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from .limits import SandboxLimits, WorkspaceLayout
from .server import SandboxServer

log = logging.getLogger(__name__)
IDLE_S = 10.0
NUMERIC = ("numpy", "numpy.random", "numpy.linalg")
DEFAULT_LIMITS = SandboxLimits()


class SharedServer:
    """One server, the number of its users, and the task that ends it."""

    def __init__(self, key: tuple[Any, ...], start: Coroutine[Any, Any, SandboxServer]) -> None:
        self.key = key
        self.users = 0
        self.changed = asyncio.Event()
        self.ready: asyncio.Future[SandboxServer] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._run(start), name="agentfly-sandbox-server")

    @property
    def usable(self) -> bool:
        return not self.task.done() and not (self.ready.done() and self.ready.result().ended)

    def leave(self) -> None:
        """Ends one `borrow`."""
        self.users -= 1
        self.changed.set()

    async def _run(self, start: Coroutine[Any, Any, SandboxServer]) -> None:
        server: SandboxServer | None = None
        try:
            server = await start
            log.info("%s", " ".join(server.report()))
            self.ready.set_result(server)
            while server.ended is None:
                self.changed.clear()
                try:
                    # Not wait_for: in Python 3.11 it swallows a cancellation that arrives together with the event.
                    async with asyncio.timeout(IDLE_S):
                        await self.changed.wait()
                except TimeoutError:
                    if not self.users:
                        return
        except Exception as error:
            if self.ready.done():
                raise
            self.ready.set_exception(error)  # raised in each `borrow` that waits
            self.ready.exception()  # marks it as retrieved: all waiters may have been cancelled
        finally:
            self.ready.cancel()  # no effect unless the start was cancelled
            # The key holds the event loop: without this, the table would keep a closed loop alive.
            if SERVERS.get(self.key) is self:
                del SERVERS[self.key]
            if server is not None:
                await server.close()


SERVERS: dict[tuple[Any, ...], SharedServer] = {}


async def borrow(
    tier: str | None = None,
    min_tier: str | None = None,
    limits: SandboxLimits | None = None,
    *,
    preload: tuple[str, ...] = NUMERIC,
    visible: tuple[str, ...] = (),
    layout: WorkspaceLayout | None = None,
) -> tuple[SandboxServer, SharedServer]:
    """Returns the server for these settings and its `SharedServer`, whose `leave` the caller must call once."""
    limits = limits or DEFAULT_LIMITS
    key = (asyncio.get_running_loop(), tier, min_tier, limits, preload, visible, layout)
    shared = SERVERS.get(key)
    if shared is None or not shared.usable:
        start = SandboxServer.start(tier, min_tier, limits, preload=preload, visible=visible, layout=layout)
        shared = SERVERS[key] = SharedServer(key, start)
    shared.users += 1
    try:
        return await asyncio.shield(shared.ready), shared
    except BaseException:
        shared.leave()
        raise
