"""Where cells run: `open_session(tier)` opens a Python session. Only this file knows how each kind of session is made.

    namespace, landlock, process     a fork of this machine's sandbox server, shared by all sessions of one tier and loop
    docker:IMAGE, enroot:NAME        a plain session in a separate container
    remote:URL                       a session of `agentfly envs serve code`, which reports its tier

Options of a container or a server (`memory_mb`, `token_env`, ...) are those of the placements of the same kind. A tier that
does not work here raises ConfigError with what to enable. A weaker tier is never taken instead, and none below `min_tier`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import weakref
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from ...errors import ConfigError, WorldError
from ...plugins import resolve
from ...resources.placements import read_placement
from ...resources.spec import Spec
from ...sandbox.limits import TIERS, CellResult
from ...sandbox.server import SandboxServer
from ...sandbox.session import SandboxSession
from ...sandbox.shared_server import SharedServer, borrow
from ...sandbox.tiers import FAR, ORDER, WORDS, is_below, least_local, not_stopped

__all__ = ["CellResult", "CodeSession", "check_tier", "open_session", "session"]
log = logging.getLogger(__name__)
SLACK_S = 30.0
"""How long a container or server may take beyond a cell's limit, to interrupt the cell and to answer."""
OVERRUN_S = 1.0
"""How far a reward may exceed its time limit: the wait for an interrupted cell, and the wait for sessions to close."""
_closing: set[asyncio.Task[None]] = set()  # keeps the tasks alive: the loop has only weak references
_REQUIRED = {"docker": "image", "enroot": "image", "remote": "url"}


class CodeSession(Protocol):
    """One private Python namespace. The result of `run` says whether the session is still `alive`."""

    tier: str

    async def run(self, code: str, timeout_s: float) -> CellResult: ...

    async def close(self) -> None: ...

    def report(self) -> tuple[str, ...]: ...


def check_tier(
    tier: str | None, min_tier: str | None = None, place: Mapping[str, Any] | None = None
) -> tuple[str | None, dict[str, Any]]:
    """Returns the tier's name and the checked options of its place. Starts nothing. Raises ConfigError."""
    name, _, rest = (tier or "").partition(":")
    if tier is not None and (name not in (*TIERS, *FAR) or (rest and name not in FAR)):
        raise ConfigError(f"no tier of sessions is called {tier!r}; there are {', '.join((*reversed(TIERS), *FAR))}")
    if min_tier is not None and min_tier not in ORDER:
        raise ConfigError(f"min_tier must be one of {', '.join(reversed(ORDER))}, not {min_tier!r}")
    if min_tier is not None and name in ORDER and is_below(name, min_tier):
        raise ConfigError(f"the sandbox tier {name!r} is below min_tier {min_tier!r}: raise the one or lower the other")
    options = dict(place or {})
    if name not in FAR:
        if options:
            raise ConfigError(f"place is for the tiers {', '.join(FAR)}; the tier {name or 'namespace'!r} has none: remove it")
        return (tier and name), {}
    if rest:
        if _REQUIRED[name] in options:
            raise ConfigError(f"{_REQUIRED[name]} is named twice, in the tier {tier!r} and in place")
        options[_REQUIRED[name]] = rest
    if _REQUIRED[name] not in options:
        raise ConfigError(f"the tier {name!r} needs more: write {name}:{_REQUIRED[name].upper()}")
    if "limit_s" in options or "engine" in options:
        raise ConfigError(
            "limit_s and engine are not options of an interpreter's place: it has limit_s, and the tier is the engine"
        )
    if name != "remote":
        options["engine"] = name
    read_placement("http" if name == "remote" else "container", options, f"the tier {name!r}")
    return name, options


async def open_session(
    tier: str | None = None, min_tier: str | None = None, place: Mapping[str, Any] | None = None
) -> CodeSession:
    """Opens a session of this tier; by default of the strictest one."""
    name, options = check_tier(tier, min_tier, place)
    if name in FAR:
        return await _open_remote(name, min_tier, options)
    least = None if min_tier is None else least_local(min_tier, TIERS)
    server, shared = await borrow(name, least)
    try:
        return _SandboxedSession(await server.session(), server, shared)
    except BaseException:
        shared.leave()
        raise


@contextlib.asynccontextmanager
async def session(
    tier: str | None = None, min_tier: str | None = None, place: Mapping[str, Any] | None = None
) -> AsyncIterator[CodeSession]:
    """Opens a session and closes it at the end of the block. A session that takes longer than half of `OVERRUN_S` to end, for
    example one full of processes, has been killed and ends in the background."""
    opened = await open_session(tier, min_tier, place)
    try:
        yield opened
    finally:
        closing = asyncio.create_task(opened.close())
        _closing.add(closing)
        closing.add_done_callback(_closing.discard)
        await asyncio.wait([closing], timeout=OVERRUN_S / 2)
        if closing.done():
            closing.result()


class _SandboxedSession:
    """A session of this machine's sandbox, counted as a user of its server, which ends when it has none."""

    def __init__(self, inner: SandboxSession, server: SandboxServer, shared: SharedServer) -> None:
        self.inner, self.shared = inner, shared
        self.tier, self.report = server.tier, server.report
        self.counted = True

    async def run(self, code: str, timeout_s: float) -> CellResult:
        return await self.inner.run(code, timeout_s)

    async def close(self) -> None:
        if self.counted:
            self.counted = False
            self.shared.leave()
        await self.inner.close()


# ---- in a container, or on another machine ----

_backends: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, str], Any]] = weakref.WeakKeyDictionary()
_numbers = itertools.count(1)


def _backend(tier: str, options: dict[str, Any]) -> Any:
    """Returns the backend of this place and loop. The first call logs what the tier stops and does not stop."""
    from ...resources.instance import backend_of

    backends = _backends.setdefault(asyncio.get_running_loop(), {})
    key = tier, json.dumps(options, sort_keys=True)
    if key not in backends:
        interpreter = resolve("envs", "code")  # by name: `env` imports this file
        if tier == "remote":
            spec = Spec(name="code", make=interpreter, placement="http", place=options)
        else:
            inner = {"tier": "process"}  # the container isolates it
            spec = Spec(name="code", make=interpreter, options=inner, placement="container", place=options)
        backends[key] = backend_of(spec)
        log.info("%s", " ".join((WORDS[tier], *not_stopped(tier, {}))))
    return backends[key]


async def _open_remote(tier: str, min_tier: str | None, options: dict[str, Any]) -> CodeSession:
    backend = _backend(tier, options)
    instance = backend.create(next(_numbers))
    try:
        async with asyncio.timeout(backend.spec.start_timeout_s):
            await instance.start()
            got, report = tier, (WORDS[tier], *not_stopped(tier, {}))
            if tier == "remote":
                got, theirs = await _server_tier(instance, min_tier)
                report += theirs
    except TimeoutError:
        await instance.close(10)
        raise WorldError(f"a session of the tier {tier!r} did not come up within {backend.spec.start_timeout_s:g} s") from None
    except BaseException:
        await instance.close(10)
        raise
    return _RemoteSession(instance, got, report, here=tier != "remote")


async def _server_tier(instance: Any, min_tier: str | None) -> tuple[str, tuple[str, ...]]:
    """Returns the tier and the report of a server's sessions. Raises ConfigError if they are weaker than `min_tier`."""
    about = await instance.call("about", (), {})
    theirs, report = (about.get("tier"), about.get("report")) if isinstance(about, dict) else (None, None)
    if theirs not in ORDER or not isinstance(report, list):
        raise WorldError("the server does not say which tier its sessions have")
    if min_tier is not None and is_below(theirs, min_tier):
        raise ConfigError(
            f"the server's tier {theirs!r} is below min_tier {min_tier!r}: start it with a stricter one, or lower it"
        )
    if theirs == "process":
        log.warning("the sessions of the server are plain processes there: its tier is 'process'")
    return theirs, tuple(f"There: {sentence}" for sentence in report)


class _RemoteSession:
    """A session in a container (`here`: on this machine) or on a server, in a separate instance."""

    def __init__(self, instance: Any, tier: str, report: tuple[str, ...], here: bool) -> None:
        self.instance, self.tier, self._report, self._here = instance, tier, report, here

    def report(self) -> tuple[str, ...]:
        return self._report

    async def run(self, code: str, timeout_s: float) -> CellResult:
        try:
            async with asyncio.timeout(timeout_s + SLACK_S):
                result = await self.instance.call("run", (code, timeout_s), {})
        except TimeoutError:
            self.instance.abandon()
            return _lost("it did not answer when its time was over", timed_out=True)
        except WorldError as error:
            self.instance.abandon()
            if not self._here:
                raise  # a server that is gone is the world's failure; a container may have died of the cell
            return _lost(str(error))
        except BaseException:
            self.instance.abandon()
            raise
        if not isinstance(result, CellResult):
            self.instance.abandon()
            raise WorldError("the remote session sent something that is not the result of a cell")
        return result

    async def close(self) -> None:
        await self.instance.close(10)


def _lost(why: str, timed_out: bool = False) -> CellResult:
    return CellResult(error=f"the session has ended and its variables are lost: {why}", timed_out=timed_out, alive=False)
