"""Where cells run: `open_session(tier)` gives a fresh Python session, and this file alone knows what kind it is.

A session runs cells one after the other in one namespace (`run`) and is closed once. A cell that does not end in time is
interrupted, which keeps the session where the code gives way (`alive`); otherwise it is gone, and its owner opens another.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any, Protocol

from ...errors import ConfigError, WorldError
from ...tools.python import PythonSession, _why

TIERS = ("process",)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """What one cell did. `value` is the last expression as Python writes it, `error` a short traceback; `alive` says whether
    the session, and with it every variable, is still there."""

    stdout: str = ""
    stderr: str = ""
    value: str | None = None
    error: str | None = None
    images: tuple[Any, ...] = ()
    timed_out: bool = False
    alive: bool = True


class Session(Protocol):
    """One namespace of Python. Nobody else can see it."""

    async def run(self, code: str, timeout_s: float) -> CellResult: ...

    async def close(self) -> None: ...


async def open_session(tier: str | None = None) -> Session:
    """A fresh session of the named tier; without a name, of the best tier there is."""
    if tier not in (None, *TIERS):
        raise ConfigError(f"no tier of sessions is called {tier!r}; there are {', '.join(TIERS)}")
    return ProcessSession()


class ProcessSession(PythonSession):
    """The session of the tool `python`, cell by cell: a process of its own, without walls."""

    async def run(self, code: str, timeout_s: float) -> CellResult:
        if self._lost:
            raise WorldError("the Python session has ended; open another")
        if self._link is None:
            self._link = await self._start()
        link, self.limit_s = self._link, timeout_s
        self._count += 1
        try:
            reply, in_time = await self._exchange(link, code)
        except BaseException:
            # Cancelled in the middle: whatever the session is doing, it is of no use any more.
            self._link, self._lost = None, True
            link.process.signal(signal.SIGKILL)
            await link.close()
            raise
        printed = link.printed()
        if reply is None:
            self._link, self._lost = None, True
            code_of_exit = await link.close()
            return CellResult(stdout=printed, error=_why(code_of_exit) if in_time else None, timed_out=not in_time, alive=False)
        late = bool(reply.get("interrupted"))
        return CellResult(stdout=printed, value=reply.get("value"), error=reply.get("error"), timed_out=late)
