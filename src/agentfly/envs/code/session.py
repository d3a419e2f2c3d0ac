"""Where cells run: `open_session(tier)` gives a fresh Python session in a sandbox, and this file alone knows how it is had.

All sessions of one tier and event loop come from one fork server. It is started for the first session, ends when it has had
none for a while, and ends with the loop whatever happens. A tier that cannot be had here is a ConfigError that names the cure;
none weaker is taken in its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Protocol

from ...errors import ConfigError
from ...resources.sandbox import TIERS, CellResult, SandboxServer, SandboxSession

__all__ = ["CellResult", "Session", "open_session", "session"]
log = logging.getLogger(__name__)
IDLE_S = 10.0


class Session(Protocol):
    """One namespace of Python, which nobody else can see. What `run` gives back says whether the session is still `alive`."""

    async def run(self, code: str, timeout_s: float) -> CellResult: ...

    async def close(self) -> None: ...


class _Shared:
    """The server of one tier in one event loop, and the task that ends it."""

    def __init__(self, tier: str | None) -> None:
        self.tier = tier
        self.users = 0
        self.changed = asyncio.Event()
        self.ready: asyncio.Future[SandboxServer] = asyncio.get_running_loop().create_future()
        self.keeper = asyncio.create_task(self._keep(), name="agentfly-sandbox-server")

    @property
    def usable(self) -> bool:
        return not self.keeper.done() and not (self.ready.done() and self.ready.result().ended)

    async def _keep(self) -> None:
        try:
            server = await SandboxServer.start(self.tier)
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
        key = asyncio.get_running_loop(), self.tier
        if _shared.get(key) is self:
            del _shared[key]


_shared: dict[tuple[asyncio.AbstractEventLoop, str | None], _Shared] = {}


def check_tier(tier: str | None) -> None:
    if tier is not None and tier not in TIERS:
        raise ConfigError(f"no tier of sessions is called {tier!r}; there are {', '.join(reversed(TIERS))}")


async def open_session(tier: str | None = None) -> Session:
    """A fresh session of the named tier; without a name, of the strictest one."""
    check_tier(tier)
    key = asyncio.get_running_loop(), tier
    shared = _shared.get(key)
    if shared is None or not shared.usable:
        shared = _shared[key] = _Shared(tier)
    shared.users += 1
    try:
        server = await asyncio.shield(shared.ready)
        return _Lent(await server.session(), shared)
    except BaseException:
        shared.users -= 1
        raise


@contextlib.asynccontextmanager
async def session(tier: str | None = None) -> AsyncIterator[Session]:
    """A fresh session that is closed at the end of the block."""
    opened = await open_session(tier)
    try:
        yield opened
    finally:
        await opened.close()


class _Lent:
    """A session that is counted, so that its server knows when it is idle."""

    def __init__(self, inner: SandboxSession, shared: _Shared) -> None:
        self.inner, self.shared = inner, shared
        self.counted = True

    async def run(self, code: str, timeout_s: float) -> CellResult:
        return await self.inner.run(code, timeout_s)

    async def close(self) -> None:
        if self.counted:
            self.counted = False
            self.shared.users -= 1
            self.shared.changed.set()
        await self.inner.close()
