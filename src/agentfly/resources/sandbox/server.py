"""The fork server: a warden, and under it the process that forks sessions. Started by the host, not imported by it.

    host -- control socket --> server (process 1 of its own PID namespace) --> sessions, each with its own socket to the host
      `---- started --> warden, which waits for the host or the server to end, ends the other, and tidies up

Control messages are packets. In: five bytes, a command of `protocol` and the number of the session, to NEW its socket is
attached. Out: JSON: {"op": "up", ...} or {"op": "down", "error"} once, {"op": "int", "id"} when a signal has been sent,
{"op": "exit", "id", "code", "cpu_s", "oom", "why", "error"}. End of file on the control socket ends everything. The server's
environment is what the host gave it, which holds no secrets; sessions get no descriptor but their own socket.

Between the fork and the first cell every object that is touched costs a page to copy, so all that is the same for all
sessions is made before: their `Session`, the filter, the limits; a cgroup is made while the session before it starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import select
import shutil
import signal
import socket
import sys
import time
from _signal import SIG_DFL, SIGCHLD, set_wakeup_fd  # type: ignore[import-not-found] # without the enums of `signal`
from _signal import signal as set_handler
from collections.abc import Callable
from typing import Any, NoReturn

from . import jail, kernel, landlock
from .child import Session
from .protocol import COMMAND, INTERRUPT, KILL, LENGTH, NEW, QUICK, SLOW
from .watchdog import Watchdog, disk_use

SWEEP_S = 0.2
QUICK_NS, SLOW_NS = 500_000, 50_000_000
PRELOAD = ["ast", "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools"]
PRELOAD += [
    "heapq",
    "itertools",
    "math",
    "operator",
    "random",
    "re",
    "statistics",
    "string",
    "subprocess",
    "textwrap",
    "time",
    "typing",
]


class Server:
    def __init__(self, control: socket.socket, config: dict[str, Any], walls: jail.Walls) -> None:
        self.control, self.config, self.walls = control, config, walls
        self.pids: dict[int, int] = {}  # session id -> pid
        self.sessions: dict[int, int] = {}  # pid -> session id
        self.reasons: dict[int, str] = {}
        self.groups: dict[int, str] = {}  # session id -> the name of its cgroup
        self.spare: tuple[str, tuple[int, ...]] | None = None  # the next one, and the way into it
        self.group_count = 0
        self.rubbish: list[tuple[int, str]] = []
        self.hooks: list[Callable[[], object]] = [random.seed]  # or all sessions would draw the same numbers
        self.namespaces = walls.tier == "namespace"
        self.own_space = -1
        self.proc_fd: int | None = None
        self.watchdog: Watchdog | None = None

    # ---- getting ready ----

    def prepare(self) -> None:
        """Preload, then leave the host's world. Whatever fails here means: this tier cannot be had."""
        sys.path += [path for path in self.config["site"] if path not in sys.path]
        for name in PRELOAD:
            importlib.import_module(name)
        self.preload(self.config["preload"])
        paths = jail.visible_paths([*(path for path in self.config["site"] if os.path.isdir(path)), *self.config["visible"]])
        if self.namespaces:
            self.own_space = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
            kernel.unshare(kernel.NEW_NS | kernel.NEW_NET | kernel.NEW_UTS | kernel.NEW_IPC | kernel.NEW_CGROUP)
            kernel.sethostname("sandbox")
            self.walls.below_tmp = jail.below_tmp(paths)  # before the root is another one
            self.walls.proc = jail.build_root(paths)
            if self.walls.proc:
                self.proc_fd = os.open("/proc", os.O_RDONLY | os.O_CLOEXEC)
            self.walls.proc_options = self.find_proc_options()
        else:
            self.proc_fd = os.open("/proc", os.O_RDONLY | os.O_CLOEXEC)
            self.walls.read = paths
            jail.landlock_scopes = landlock.abi() >= landlock.SCOPED_ABI
            if self.walls.tier == "landlock" and not landlock.abi():
                raise OSError("this kernel has no Landlock")
            if not all(map(_open_to_all, paths)):  # a Python below /root: another user could not even start there
                self.walls.uids = None
        if not self.namespaces or not self.walls.cgroups:
            limits = self.config["limits"]
            self.watchdog = Watchdog(self.proc_fd, limits["memory_mb"], limits["processes"], self.namespaces)
        with contextlib.suppress(OSError):  # not allowed here: sessions are no less safe
            kernel.set_slice(0, QUICK_NS)  # sessions inherit it
        self.measure()
        jail.prepare(self.walls)
        self.enter: Callable[[jail.Walls, int], None] = getattr(jail, f"enter_{self.walls.tier}")
        self.inside = Session(self.config["limits"]["output_chars"], self.config["limits"]["files"])
        self.spare = self.make_group()
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        gc.collect()
        gc.freeze()
        gc.disable()

    def preload(self, names: list[str]) -> None:
        """Import what is there, and remember what it would have `os.fork` do in a child."""
        register = os.register_at_fork

        def heard(**hooks: Any) -> None:
            if "after_in_child" in hooks:
                self.hooks.append(hooks["after_in_child"])
            register(**hooks)  # for the forks of the sessions themselves

        os.register_at_fork = heard
        try:
            for name in names:
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)
        finally:
            os.register_at_fork = register
        if "numpy.random" in sys.modules:
            self.hooks.append(numpy_seeder())

    def measure(self) -> None:
        """How large this process is, which its sessions are not to be blamed for."""
        if self.proc_fd is not None:
            with open(os.open("self/statm", os.O_RDONLY, dir_fd=self.proc_fd)) as file:
                size, resident, shared, *_ = map(int, file.read().split())
            self.walls.base_size = size * os.sysconf("SC_PAGE_SIZE")
            self.base_mb = (resident - shared) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
        else:
            self.walls.base_size, self.base_mb = 256 << 20, 16.0

    def find_proc_options(self) -> bytes:
        """`subset=pid` shows a session its own processes and nothing of the machine; kernels before 5.8 do not know it."""
        for options in (b"subset=pid", b""):
            pid = os.fork()
            if pid == 0:
                try:
                    kernel.unshare(kernel.NEW_NS)
                    kernel.mount_raw(b"proc", b"/proc", b"proc", kernel.MS_RDONLY, options)
                except BaseException:  # noqa: BLE001 - a forked child must end here, whatever happens
                    os._exit(1)
                os._exit(0)
            if os.waitpid(pid, 0)[1] == 0:
                return options
        return b""

    # ---- the loop ----

    def serve(self) -> None:
        wake, signalled = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
        poller = select.poll()
        poller.register(self.control.fileno(), select.POLLIN)
        poller.register(wake, select.POLLIN)
        self.send({"op": "up", **self.facts()})
        sweep_at = time.monotonic() + SWEEP_S
        while True:
            ready = poller.poll(SWEEP_S * 1000 if self.watchdog or self.rubbish else None)
            for fd, _ in ready:
                if fd == wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake, 4096)
                    self.reap()
                elif not self.command():
                    return
            if self.rubbish or self.watchdog:
                now = time.monotonic()
                if now >= sweep_at:
                    self.sweep()
                    sweep_at = now + SWEEP_S + 20 * (time.monotonic() - now)  # never more than a twentieth of the time

    def facts(self) -> dict[str, Any]:
        walls = self.walls
        return {
            "cgroup": walls.cgroups is not None,
            "own_uid": walls.uids is not None,
            "proc": walls.proc,
            "landlock": landlock.abi(),
            "scoped": jail.landlock_scopes,
        }

    def send(self, message: dict[str, Any]) -> None:
        self.control.send(json.dumps(message).encode())

    def command(self) -> bool:
        data, ancillary, _, _ = self.control.recvmsg(4096, socket.CMSG_SPACE(4))
        if not data:
            return False
        op, session = COMMAND.unpack(data)
        if op == NEW:
            self.start(session, int.from_bytes(ancillary[0][2], sys.byteorder))
        elif op == INTERRUPT:
            if session in self.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pids[session], signal.SIGINT)  # the session leads its group: what it runs hears it too
            self.send({"op": "int", "id": session})
        elif op == KILL and session in self.pids:
            self.kill(session)
        elif op in (SLOW, QUICK) and session in self.pids:
            with contextlib.suppress(OSError):  # it has just ended, or this kernel has no such wish
                kernel.set_slice(self.pids[session], SLOW_NS if op == SLOW else QUICK_NS)
        return True

    def make_group(self) -> tuple[str, tuple[int, ...]] | None:
        if self.walls.cgroups is None:
            return None
        self.group_count += 1
        name = f"s{self.group_count}"
        return name, self.walls.cgroups.make(name)

    def start(self, session: int, fd: int) -> None:
        pid = None
        try:
            group, self.spare = self.spare or self.make_group(), None
            if group is not None:
                self.groups[session], self.walls.tickets = group
            if self.namespaces:
                kernel.unshare(kernel.NEW_PID)  # the next child is process 1 of a new namespace: one fork, not two
            try:
                pid = kernel.fork()
                if pid == 0:
                    self.become(session, fd)
            finally:
                if self.namespaces and pid != 0:
                    kernel.setns(self.own_space, kernel.NEW_PID)
        except OSError as error:
            self.discard(session)
            self.send({"op": "exit", "id": session, "code": 0, "cpu_s": 0, "oom": False, "why": None, "error": str(error)})
        finally:
            os.close(fd)
            for ticket in self.walls.tickets:
                os.close(ticket)
            self.walls.tickets = ()
        if pid:
            self.pids[session], self.sessions[pid] = pid, session
            with contextlib.suppress(OSError):  # then the next session will say so
                self.spare = self.make_group()

    def become(self, session: int, fd: int) -> NoReturn:
        """In the forked child: put up the walls, then be the session until it ends."""
        code = 1
        try:
            set_wakeup_fd(-1)
            set_handler(SIGCHLD, SIG_DFL)
            try:
                self.enter(self.walls, session)
                for hook in self.hooks:
                    hook()
                self.inside.open(fd)
                jail.lock(self.walls)
            except OSError as error:
                body = json.dumps({"id": 0, "error": str(error)}).encode()
                os.write(self.inside.channel if self.inside.pid else fd, LENGTH.pack(len(body)) + body)
                os._exit(1)
            gc.enable()
            self.inside.serve()
            code = 0
        except BaseException:  # noqa: BLE001 - nothing may return into the server's loop
            code = 1
        finally:
            os._exit(code)

    # ---- ends ----

    def kill(self, session: int) -> None:
        leader = self.pids[session]
        pids = [leader]
        if not self.namespaces and self.watchdog:
            pids = self.watchdog.members([leader])[leader]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            session = self.sessions.pop(pid, None)
            if session is None:
                continue  # an orphan of a session, handed to us
            if not self.namespaces:
                self.kill(session)  # the leader is gone; what it left behind goes now
            del self.pids[session]
            oom = False
            if self.walls.cgroups and session in self.groups:
                with contextlib.suppress(OSError):
                    oom = self.walls.cgroups.ran_out_of_memory(self.groups[session])
            self.discard(session)
            self.send(
                {
                    "op": "exit",
                    "id": session,
                    "code": os.waitstatus_to_exitcode(status),
                    "cpu_s": usage.ru_utime + usage.ru_stime,
                    "oom": oom,
                    "why": self.reasons.pop(session, None),
                    "error": None,
                }
            )

    def discard(self, session: int, group: str = "") -> None:
        """The session's directory and cgroup; what is still busy is tried again later."""
        group = group or self.groups.pop(session, "")
        gone = self.walls.cgroups is None or not group or self.walls.cgroups.remove(group)
        if self.walls.directory:
            home = f"{self.walls.directory}/s{session}"
            shutil.rmtree(home, ignore_errors=True)
            gone = gone and not os.path.exists(home)
        if not gone:
            self.rubbish.append((session, group))

    def sweep(self) -> None:
        rubbish, self.rubbish = self.rubbish, []
        for session, group in rubbish:
            self.discard(session, group)
        if not self.watchdog:
            return
        guilty = self.watchdog.offenders(self.sessions, self.base_mb)
        if self.walls.directory:
            limits = self.config["limits"]
            for session in self.pids:
                size, count = disk_use(f"{self.walls.directory}/s{session}")
                if size > limits["disk_mb"] << 20 or count > limits["inodes"]:
                    guilty[session] = f"it wrote more than {limits['disk_mb']} MB or {limits['inodes']} files"
            if self.walls.uids is None:
                me = os.getuid()
                pids = self.watchdog.pids()
                self.walls.user_processes = sum(_owner(pid, self.watchdog) == me for pid in pids)
        for session, why in guilty.items():
            self.reasons[session] = why
            self.kill(session)


def numpy_seeder() -> Callable[[], object]:
    """Gives numpy's global generator other numbers in each session. Where its state lies as it has since numpy 1.17, by writing
    to it: `seed` touches many pages more."""
    numpy_random = sys.modules["numpy.random"]
    generator = numpy_random.mtrand._rand._bit_generator
    numpy_random.seed(0)  # so that the first number makes new ones of the whole state
    key = generator.state["state"]["key"].tobytes() if generator.state["bit_generator"] == "MT19937" else b""
    address = generator.ctypes.state_address
    if len(key) == 2496 and ctypes.string_at(address, len(key)) == key:
        return lambda: ctypes.memmove(address, os.urandom(2496), 2496)
    return lambda: numpy_random.seed(int.from_bytes(os.urandom(4)))


def _open_to_all(path: str) -> bool:
    """May any user reach it?"""
    path = os.path.realpath(path)
    while path != "/":
        path, seen = os.path.dirname(path), os.stat(path)
        if not seen.st_mode & (0o001 if os.path.isdir(path) else 0o004):
            return False
    return True


def _owner(pid: int, watchdog: Watchdog) -> int | None:
    try:
        return os.stat(str(pid), dir_fd=watchdog.proc_fd).st_uid
    except OSError:
        return None
