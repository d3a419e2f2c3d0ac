"""Sandbox servers that many use: settings in, the running server for them out.

All who ask with the same settings in the same event loop share one fork server. It is started for the first of them, ends when
it has had no user for a while, and ends with the loop whatever happens. A tier that cannot be had here is a ConfigError that
names the cure; none weaker is taken in its place.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from .host import SandboxServer
from .limits import SandboxLimits

log = logging.getLogger(__name__)
IDLE_S = 10.0
NUMERIC = ("numpy", "numpy.random", "numpy.linalg")


class Shared:
    """One server, who counts on it, and the task that ends it."""

    def __init__(self, key: tuple[Any, ...], start: Callable[[], Any]) -> None:
        self.key = key
        self.users = 0
        self.changed = asyncio.Event()
        self.ready: asyncio.Future[SandboxServer] = asyncio.get_running_loop().create_future()
        self.keeper = asyncio.create_task(self._keep(start), name="agentfly-sandbox-server")

    @property
    def usable(self) -> bool:
        return not self.keeper.done() and not (self.ready.done() and self.ready.result().ended)

    def leave(self) -> None:
        self.users -= 1
        self.changed.set()

    async def _keep(self, start: Callable[[], Any]) -> None:
        try:
            server = await start()
        except asyncio.CancelledError:
            self.ready.cancel()
            self._forget()
            raise
        except Exception as error:  # noqa: BLE001 - it belongs to those who asked for a session
            self.ready.set_exception(error)
            self.ready.exception()  # seen, even where nobody waits any more
            self._forget()
            return
        log.info("%s", " ".join(server.report()))
        try:
            self.ready.set_result(server)
            while server.ended is None:
                self.changed.clear()
                try:
                    # Not wait_for: in Python 3.11 it swallows a cancellation that comes with the event.
                    async with asyncio.timeout(IDLE_S):
                        await self.changed.wait()
                except TimeoutError:
                    if not self.users:
                        return
        finally:
            self._forget()
            await server.close()

    def _forget(self) -> None:
        """A closed loop must not be kept alive by its entry in the table."""
        if SERVERS.get(self.key) is self:
            del SERVERS[self.key]


SERVERS: dict[tuple[Any, ...], Shared] = {}


async def borrow(
    tier: str | None = None,
    min_tier: str | None = None,
    limits: SandboxLimits | None = None,
    *,
    preload: tuple[str, ...] = NUMERIC,
    visible: tuple[str, ...] = (),
) -> tuple[SandboxServer, Shared]:
    """The server for these settings, counted; whoever borrows calls `leave` once."""
    key = (asyncio.get_running_loop(), tier, min_tier, limits, preload, visible)
    shared = SERVERS.get(key)
    if shared is None or not shared.usable:

        def start() -> Any:
            return SandboxServer.start(tier, min_tier, limits, preload=preload, visible=visible)

        shared = SERVERS[key] = Shared(key, start)
    shared.users += 1
    try:
        return await asyncio.shield(shared.ready), shared
    except BaseException:
        shared.leave()
        raise
