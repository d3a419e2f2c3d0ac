"""The host's side of the server: starts it, finds the tier that works, hands out sessions, and knows how each of them ended.

The server is a subprocess with an environment of its own (nothing of this process's environment but the path of the
loader), so no secret can reach a session. One event loop drives everything: no thread per session. Where no tier at or
above `min_tier` works, `start` raises ConfigError with what to enable; it never falls below in silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
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
from pathlib import Path
from typing import Any

from ...errors import ConfigError, WorldError
from .limits import TIERS, SandboxLimits
from .protocol import CHUNK, COMMAND, NEW
from .session import SLOW_S, SandboxSession
from .tiers import CURES, WORDS, not_stopped

_HERE = str(Path(__file__).parent)
# The package under a name of its own, so that neither `agentfly` nor anything it imports is loaded into the server.
_BOOT = (
    "import sys, importlib.util as u\n"
    f"s = u.spec_from_file_location('agentfly_sandbox', {_HERE + '/__init__.py'!r}, submodule_search_locations=[{_HERE!r}])\n"
    "m = sys.modules['agentfly_sandbox'] = u.module_from_spec(s)\n"
    "s.loader.exec_module(m)\n"
    "from agentfly_sandbox.supervisor import main\n"
    "main()\n"
)


def scrubbed_environment() -> dict[str, str]:
    """All that a session will ever see of an environment."""
    threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
    kept = {"LD_LIBRARY_PATH": os.environ["LD_LIBRARY_PATH"]} if "LD_LIBRARY_PATH" in os.environ else {}
    paths = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "MPLCONFIGDIR": "/tmp"}
    return {**paths, "LANG": "C.UTF-8", "MPLBACKEND": "Agg", "PYTHONDONTWRITEBYTECODE": "1", **threads, **kept}


def _package_folders() -> list[str]:
    """Where this interpreter has its packages, the user's own site included."""
    known = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages(), site.getusersitepackages()}
    return [path for path in dict.fromkeys(sys.path) if path in known and os.path.isdir(path)]


class SandboxServer:
    """Made by `await SandboxServer.start(...)`; `await server.close()` ends every session and leaves nothing behind."""

    def __init__(self, tier: str, limits: SandboxLimits) -> None:
        self.tier, self.limits = tier, limits
        self.facts: dict[str, Any] = {}
        self.start_timeout_s = 60.0
        self.ended: str | None = None
        self._loop = asyncio.get_running_loop()
        self._sessions: dict[int, SandboxSession] = {}
        self._numbers = 0
        self._counts: Counter[str] = Counter()
        self._up: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._outgoing: deque[tuple[bytes, int | None]] = deque()
        self._young: deque[tuple[float, SandboxSession, int]] = deque()  # cells by when they will have taken long
        self._young_timer: asyncio.TimerHandle | None = None
        self._blocked = False
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
    ) -> SandboxServer:
        """A server of the given tier, or of the best that works here and is not below `min_tier` (`namespace`, or the tier
        that is typed out). `preload`: modules every session shares when they are installed. `visible`: more paths that
        sessions may read. `cgroup=False`: do not even try to make cgroups."""
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
            try:
                server._spawn(preload, visible, cgroup)
                await server._launch()
            except WorldError as error:
                failures.append(f"the sandbox tier {name!r} cannot be had here ({error}): {CURES[name]}")
                continue
            if name == "process":
                warnings.warn(f"sandbox tier {WORDS['process']}", stacklevel=2)
            return server
        raise ConfigError("; ".join(failures))

    async def session(self) -> SandboxSession:
        """A fresh session, ready for its first cell. WorldError when it cannot be had."""
        if self.ended is not None:
            raise WorldError(f"the sandbox server has ended: {self.ended}")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        self._numbers += 1
        self._counts["started"] += 1
        session = self._sessions[self._numbers] = SandboxSession(self, self._numbers, ours)
        self.command(NEW, session.number, theirs.detach())
        await session.started()
        return session

    def report(self) -> tuple[str, ...]:
        """Which tier this is, and one sentence for each thing it does not stop."""
        return WORDS[self.tier], *not_stopped(self.tier, self.facts)

    def stats(self) -> dict[str, int]:
        """Counts since the start, and the sessions alive now."""
        names = ("started", "cells", "timed_out", "ended")
        return {
            "live": sum(session.alive for session in self._sessions.values()),
            **{name: self._counts[name] for name in names},
        }

    async def close(self) -> None:
        """End every session, the server and its warden. Any number of times."""
        self._stop("it was closed")
        if self._process.returncode is None:
            try:
                await asyncio.to_thread(self._process.wait, 20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                await asyncio.to_thread(self._process.wait, 5)
        if self._errors >= 0:
            os.close(self._errors)
            self._errors = -1

    # ---- starting ----

    def _spawn(self, preload: Sequence[str], visible: Sequence[str], cgroup: bool) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        config = {
            "fd": theirs.fileno(), "host": os.getpid(), "tier": self.tier, "limits": dataclasses.asdict(self.limits),
            "preload": list(preload), "site": _package_folders(),
            "visible": [os.path.abspath(path) for path in visible], "cgroup": cgroup,
        }  # fmt: skip
        _raise_open_files()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-X", "utf8", "-c", _BOOT, json.dumps(config)],
                env=scrubbed_environment(), pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=self._errors, cwd="/",
            )  # fmt: skip
        self._control = ours
        ours.setblocking(False)
        self._loop.add_reader(ours.fileno(), self._on_control)

    async def _launch(self) -> None:
        try:
            self.facts = await asyncio.wait_for(asyncio.shield(self._up), self.start_timeout_s)
            probe = await self.session()  # the tier is what really works, not what the kernel promises
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

    def begins(self, session: SandboxSession, cell: int) -> None:
        """A cell starts; the session is told if it still runs after `SLOW_S`. All wait equally long, so one timer does."""
        self._counts["cells"] += 1
        due = self._loop.time() + SLOW_S
        self._young.append((due, session, cell))
        if self._young_timer is None:
            self._young_timer = self._loop.call_at(due, self._on_grown)

    def _on_grown(self) -> None:
        now = self._loop.time()
        while self._young and self._young[0][0] <= now:
            _, session, cell = self._young.popleft()
            session.on_slow(cell)
        self._young_timer = self._loop.call_at(self._young[0][0], self._on_grown) if self._young else None

    def command(self, op: int, number: int, fd: int | None = None) -> None:
        """Tell the server; `fd` is given away."""
        if self.ended is not None:
            if fd is not None:
                os.close(fd)
            return
        self._outgoing.append((COMMAND.pack(op, number), fd))
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
                self._blocked = True
                self._loop.add_writer(self._control.fileno(), self._on_writable)
                return
            except OSError:
                self._stop(self._last_words())
                return
            if fd is not None:
                os.close(fd)
            self._outgoing.popleft()
        if self._blocked:
            self._blocked = False
            self._loop.remove_writer(self._control.fileno())

    def _on_control(self) -> None:
        for _ in range(64):  # then the others get a turn
            try:
                data = self._control.recv(CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._stop(self._last_words())
                return
            self._on_message(json.loads(data))

    def _on_message(self, message: dict[str, Any]) -> None:
        if message["op"] == "up":
            self._up.set_result(message)
        elif message["op"] == "down":
            self._stop(message["error"])
        elif message["op"] == "int":
            if message["id"] in self._sessions:
                self._sessions[message["id"]].on_signalled()
        elif message["op"] == "exit":
            session = self._sessions.pop(message["id"], None)
            if session is not None:
                self._counts["ended"] += 1
                session.on_exit(message)

    def _last_words(self) -> str:
        """The last line the server wrote before it died."""
        with contextlib.suppress(OSError):
            text = os.pread(self._errors, 1 << 16, 0).decode("utf-8", "replace").strip()
            if text:
                return f"the server died: {text.splitlines()[-1]}"
        return "the server died"

    def _stop(self, why: str) -> None:
        """No more commands; every session has ended. Closing our end of the control socket is what ends the server."""
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
        self._young.clear()
        if self._young_timer is not None:
            self._young_timer.cancel()
        if not self._up.done():
            self._up.set_exception(WorldError(why))


def _raise_open_files() -> None:
    """A session costs one descriptor here; the soft limit is often 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else 1 << 20
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
