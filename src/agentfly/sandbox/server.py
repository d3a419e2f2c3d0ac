"""The trainer's side of the sandbox: starts the supervisor, finds a tier that works, hands out sessions, learns how they ended.

The supervisor gets a new environment (of this process's only the path of the loader), so no secret can reach a session. One
event loop drives all sessions: no thread per session.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import resource
import site
import socket
import struct
import subprocess
import sys
import sysconfig
import warnings
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError, WorldError
from .interpreter.cells import CHUNK
from .interpreter.process import bootstrap
from .limits import TIERS, SandboxLimits, WorkspaceLayout
from .runtime.protocol import COMMAND, NEW
from .session import SLOW_S, SandboxSession
from .tiers import CURES, WORDS, no_loopback, not_stopped, workspace_notes

log = logging.getLogger(__name__)
SUPERVISOR = bootstrap("agentfly_sandbox", "sandbox.runtime.supervisor")


def scrubbed_environment() -> dict[str, str]:
    """Returns the environment of the supervisor, which sessions inherit."""
    threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
    linker = {"LD_LIBRARY_PATH": os.environ["LD_LIBRARY_PATH"]} if "LD_LIBRARY_PATH" in os.environ else {}
    paths = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "MPLCONFIGDIR": "/tmp"}
    return {**paths, "LANG": "C.UTF-8", "MPLBACKEND": "Agg", "PYTHONDONTWRITEBYTECODE": "1", **threads, **linker}


def _package_folders() -> list[str]:
    """Returns the folders of this interpreter's packages, the user's site included."""
    site_folders = {
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        *site.getsitepackages(),
        site.getusersitepackages(),
    }
    return [path for path in dict.fromkeys(sys.path) if path in site_folders and os.path.isdir(path)]


class SandboxServer:
    """Made by `await SandboxServer.start(...)`. `await server.close()` ends every session and leaves nothing behind."""

    def __init__(self, tier: str, limits: SandboxLimits) -> None:
        self.tier, self.limits = tier, limits
        self.facts: dict[str, Any] = {}
        self.layout: WorkspaceLayout | None = None
        self.start_timeout_s = 60.0
        self.ended: str | None = None  # the reason, once the server has ended
        self._loop = asyncio.get_running_loop()
        self._sessions: dict[int, SandboxSession] = {}
        self._numbers = 0
        self._counts: Counter[str] = Counter()
        self._up: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._outgoing: deque[tuple[bytes, int | None]] = deque()
        self._recent: deque[tuple[float, SandboxSession, int]] = deque()  # (time when the cell counts as slow, session, cell)
        self._recent_timer: asyncio.TimerHandle | None = None
        self._errors = os.memfd_create("agentfly-sandbox-errors")

    @classmethod
    async def start(
        cls,
        tier: str | None = None,
        min_tier: str | None = None,
        limits: SandboxLimits | None = None,
        *,
        preload: Sequence[str] = ("numpy", "numpy.random", "numpy.linalg"),
        visible: Sequence[str] = (),
        cgroup: bool = True,
        mounts: bool = True,
        layout: WorkspaceLayout | None = None,
    ) -> SandboxServer:
        """Starts a server of the given tier, or of the strictest that works here and is not below `min_tier` (by default the
        given tier, or `namespace`). Raises ConfigError with what to enable if none works.

        `preload` names modules that all sessions share, if they are installed. `visible` adds paths that sessions may read.
        `cgroup=False` makes no cgroups, `mounts=False` no private mounts in the tier `landlock`: it then works as on a machine
        that forbids them. `layout` makes its sessions workspaces."""
        for name in (tier, min_tier):
            if name is not None and name not in TIERS:
                raise ConfigError(f"no sandbox tier is called {name!r}; known: {', '.join(reversed(TIERS))}")
        least = TIERS.index(min_tier or tier or "namespace")
        if tier is not None and TIERS.index(tier) < least:
            raise ConfigError(f"the sandbox tier {tier!r} is below min_tier {min_tier!r}: raise the one or lower the other")
        if not sys.platform.startswith("linux"):
            raise ConfigError("the sandbox needs Linux")
        candidates = [tier] if tier else [name for name in reversed(TIERS) if TIERS.index(name) >= max(least, 1)]
        failures = []
        for name in candidates:
            server = cls(name, limits or SandboxLimits())
            server.layout = layout
            try:
                server._spawn(preload, visible, cgroup, mounts)
                await server._launch()
            except WorldError as error:
                failures.append(f"the sandbox tier {name!r} cannot be had here ({error}): {CURES[name]}")
                continue
            if layout is not None and layout.network == "loopback" and (lack := no_loopback(name, server.facts)):
                await server.close()
                raise ConfigError(f"the sandbox tier {name!r}: {lack}")
            if name == "process":
                warnings.warn(f"sandbox tier {WORDS['process']}", stacklevel=2)
            return server
        raise ConfigError("; ".join(failures))

    async def session(self, tree: str = "") -> SandboxSession:
        """Starts a session; that of a workspace begins with this tree of the layout's folder, by default with an empty one.
        Raises WorldError if that fails."""
        if self.ended is not None:
            raise WorldError(f"the sandbox server has ended: {self.ended}")
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise WorldError(f"a sandbox session could not be started: {error}") from error
        ours.setblocking(False)
        self._numbers += 1
        self._counts["started"] += 1
        session = self._sessions[self._numbers] = SandboxSession(self, self._numbers, ours)
        self.command(NEW, session.number, theirs.detach(), tree)
        await session.started()
        return session

    def report(self) -> tuple[str, ...]:
        """Returns a sentence on the tier, and one for each thing that it does not stop."""
        notes = workspace_notes(self.tier, self.facts) if self.layout else ()
        return WORDS[self.tier], *not_stopped(self.tier, self.facts), *notes

    def stats(self) -> dict[str, int]:
        """Returns counts since the start, and the number of sessions alive now."""
        counts = {name: self._counts[name] for name in ("started", "cells", "timed_out", "ended")}
        return {"live": sum(session.alive for session in self._sessions.values()), **counts}

    async def close(self) -> None:
        """Ends every session, the fork server and the supervisor. Can be called again."""
        self._stop("it was closed")
        if self._process.returncode is None:
            try:
                await asyncio.to_thread(self._process.wait, 60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                await asyncio.to_thread(self._process.wait, 5)
        if self._errors >= 0:
            os.close(self._errors)
            self._errors = -1

    # ---- starting ----

    def _spawn(self, preload: Sequence[str], visible: Sequence[str], cgroup: bool, mounts: bool) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        config = {
            "fd": theirs.fileno(), "trainer": os.getpid(), "tier": self.tier, "limits": dataclasses.asdict(self.limits),
            "preload": list(preload), "site": _package_folders(),
            "visible": [os.path.abspath(path) for path in visible], "cgroup": cgroup, "mounts": mounts,
            "layout": dataclasses.asdict(self.layout) if self.layout else None,
        }  # fmt: skip
        _raise_open_files()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-X", "utf8", "-c", SUPERVISOR, json.dumps(config)],
                env=scrubbed_environment(), pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=self._errors, cwd="/",
            )  # fmt: skip
        self._control = ours
        ours.setblocking(False)
        self._loop.add_reader(ours.fileno(), self._on_control)

    async def _launch(self) -> None:
        try:
            self.facts = await asyncio.wait_for(asyncio.shield(self._up), self.start_timeout_s)
            probe = await self.session()  # the kernel may promise what does not work: only a session that answers counts
            result = await probe.run("6 * 7", timeout_s=self.start_timeout_s)
            if result.value != "42":
                raise WorldError(result.error or "the first cell gave no answer")
            await probe.close()
            self._counts.clear()
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                raise WorldError(f"the server did not start within {self.start_timeout_s:g} s") from error
            raise

    # ---- the control socket ----

    def count(self, name: str) -> None:
        self._counts[name] += 1

    def cell_started(self, session: SandboxSession, cell: int) -> None:
        """Calls `session.on_slow` in `SLOW_S`. All cells wait equally long, so one timer serves them all."""
        self._counts["cells"] += 1
        due = self._loop.time() + SLOW_S
        self._recent.append((due, session, cell))
        if self._recent_timer is None:
            self._recent_timer = self._loop.call_at(due, self._on_slow_cells)

    def _on_slow_cells(self) -> None:
        now = self._loop.time()
        while self._recent and self._recent[0][0] <= now:
            _, session, cell = self._recent.popleft()
            session.on_slow(cell)
        self._recent_timer = self._loop.call_at(self._recent[0][0], self._on_slow_cells) if self._recent else None

    def command(self, op: int, number: int, fd: int | None = None, tree: str = "") -> None:
        """Sends a command to the fork server. Takes ownership of `fd` and closes it."""
        if self.ended is not None:
            if fd is not None:
                os.close(fd)
            return
        self._outgoing.append((COMMAND.pack(op, number) + os.fsencode(tree), fd))
        if len(self._outgoing) == 1:
            self._on_writable()

    def _on_writable(self) -> None:
        while self._outgoing:
            data, fd = self._outgoing[0]
            try:
                if fd is None:
                    self._control.send(data)
                else:
                    self._control.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))])
            except BlockingIOError:
                self._loop.add_writer(self._control.fileno(), self._on_writable)
                return
            except OSError:
                self._stop(self._cause_of_death())
                return
            if fd is not None:
                os.close(fd)
            self._outgoing.popleft()
        self._loop.remove_writer(self._control.fileno())  # no effect if there is none

    def _on_control(self) -> None:
        for _ in range(64):  # bounded: other events of the loop get a turn
            try:
                data = self._control.recv(CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._stop(self._cause_of_death())
                return
            self._on_message(json.loads(data))

    def _on_message(self, message: dict[str, Any]) -> None:
        if message["op"] == "up":
            self._up.set_result(message)
        elif message["op"] == "down":
            self._stop(message["error"])
        elif message["op"] == "left":
            log.warning("the sandbox could not remove all that a session wrote: %s", message["why"])
        elif message["op"] == "interrupted":
            if message["id"] in self._sessions:
                self._sessions[message["id"]].on_signalled()
        elif message["op"] == "exit":
            session = self._sessions.pop(message["id"], None)
            if session is not None:
                self._counts["ended"] += 1
                session.on_exit(message)

    def _cause_of_death(self) -> str:
        """Returns the last line that the server wrote to stderr."""
        with contextlib.suppress(OSError):
            text = os.pread(self._errors, 1 << 16, 0).decode("utf-8", "replace").strip()
            if text:
                return f"the server died: {text.splitlines()[-1]}"
        return "the server died"

    def _stop(self, why: str) -> None:
        """Ends every session and closes the control socket, upon which the fork server ends."""
        if self.ended is not None:
            return
        self.ended = why
        if hasattr(self, "_control"):
            self._loop.remove_reader(self._control.fileno())
            self._loop.remove_writer(self._control.fileno())
            self._control.close()
        while self._outgoing:
            fd = self._outgoing.popleft()[1]
            if fd is not None:
                os.close(fd)
        for session in list(self._sessions.values()):
            session.on_exit({"why": f"the sandbox server has ended: {why}", "code": 0, "cpu_s": 0, "oom": False, "error": None})
        self._sessions.clear()
        self._recent.clear()
        if self._recent_timer is not None:
            self._recent_timer.cancel()
        if not self._up.done():
            self._up.set_exception(WorldError(why))


def _raise_open_files() -> None:
    """Raises the soft limit of descriptors, often 1,024: each session needs one here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else 1 << 20
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
