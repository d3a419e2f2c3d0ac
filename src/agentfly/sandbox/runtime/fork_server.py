"""The fork server: holds a preloaded interpreter, forks a session for each NEW command, and reports how sessions ended.

It obeys `protocol` commands on the control socket; end of file there ends everything. Its environment comes from the trainer
without secrets, and a session keeps no descriptor but its own socket.

Every object that a child touches between the fork and its first cell costs a page to copy. So all that is the same for all
sessions is made before the fork (`SessionProcess`, the filter, the limits), and a cgroup is made while the session before it
starts.
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
import signal
import socket
import sys
from _signal import SIG_DFL, SIGCHLD, set_wakeup_fd  # type: ignore[import-not-found] # without the enums of `signal`
from _signal import signal as set_handler
from collections.abc import Callable
from typing import Any, NoReturn

from ..interpreter.cells import CellReply, pack_reply
from . import isolation, landlock, syscalls, watchdog, workspace
from .protocol import COMMAND, INTERRUPT, KILL, NEW, QUICK, SLOW
from .session_process import SessionProcess

RETRY_S = 0.2
QUICK_NS, SLOW_NS = 500_000, 50_000_000
PRELOAD = (
    "ast", "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "heapq",
    "itertools", "math", "operator", "random", "re", "statistics", "string", "subprocess", "textwrap", "time", "typing",
)  # fmt: skip


class ForkServer:
    def __init__(self, control: socket.socket, config: dict[str, Any], plan: isolation.IsolationPlan) -> None:
        self.control, self.config, self.plan = control, config, plan
        self.pids: dict[int, int] = {}  # session id -> pid
        self.sessions: dict[int, int] = {}  # pid -> session id
        self.reasons: dict[int, tuple[str, str | None]] = {}  # session id -> why the watchdog killed it, and which limit
        self.groups: dict[int, str] = {}  # session id -> name of its cgroup
        self.spare: tuple[str, tuple[int, ...]] | None = None  # the cgroup of the next session, and its join descriptors
        self.group_count = 0
        self.leftover: list[str] = []  # cgroups that could not be removed yet
        self.hooks: list[Callable[[], object]] = [
            random.seed
        ]  # run in each child; without it all sessions draw the same numbers
        self.namespaces = plan.tier == "namespace"
        self.own_pid_namespace = -1
        self.proc_fd: int | None = None
        self.watchdog: watchdog.Watchdog | None = None

    # ---- getting ready ----

    def prepare(self) -> None:
        """Preloads modules, then leaves the machine's file system. An OSError here means that this tier does not work."""
        sys.path += [path for path in self.config["site"] if path not in sys.path]
        for name in PRELOAD:
            importlib.import_module(name)
        self.preload(self.config["preload"])
        paths = isolation.visible_paths(
            [*(path for path in self.config["site"] if os.path.isdir(path)), *self.config["visible"]]
        )
        if self.namespaces:
            self.own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
            syscalls.unshare(syscalls.NEW_NS | syscalls.NEW_NET | syscalls.NEW_UTS | syscalls.NEW_IPC)
            syscalls.sethostname("sandbox")
            self.plan.below_tmp = isolation.below_tmp(paths)  # before the root changes
            self.plan.proc = isolation.build_root(paths, self.plan.workspace.trees if self.plan.workspace else "")
            if self.plan.proc:
                self.proc_fd = os.open("/proc", os.O_RDONLY | os.O_CLOEXEC)
            self.plan.proc_options = b"" if self.plan.workspace else self.find_proc_options()
            if self.plan.workspace:
                workspace.hide_command_line()
                workspace.probe(self.plan.workspace, self.plan.uid(0))
        else:
            self.proc_fd = os.open("/proc", os.O_RDONLY | os.O_CLOEXEC)
            self.plan.read = paths
            self.plan.lone = self.plan.tier == "landlock" and landlock.abi() < landlock.SCOPED_ABI
            if self.plan.tier == "landlock" and not landlock.abi():
                raise OSError("this kernel has no Landlock")
            if not all(map(_open_to_all, paths)):  # for example a Python below /root, which the session's user could not read
                self.plan.uids = None
            if self.plan.tier == "landlock" and self.config["mounts"]:
                self.plan.mounts = isolation.open_mounts(self.plan)
            self.plan.user_processes = self.count_processes()
        with contextlib.suppress(OSError):  # only a matter of latency
            syscalls.set_slice(0, QUICK_NS)  # sessions inherit it
        self.measure()
        if self.plan.cgroups is None or (self.plan.directory and not self.plan.mounts):
            self.watchdog = watchdog.Watchdog(self.plan, self.proc_fd, self.base_mb, [self.control])
        isolation.prepare(self.plan)
        self.enter: Callable[[isolation.IsolationPlan, int], None] = getattr(isolation, f"enter_{self.plan.tier}")
        self.inside = SessionProcess(self.config["limits"]["output_chars"], self.config["limits"]["files"])
        self.spare = self.make_group()
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        gc.collect()
        gc.freeze()
        gc.disable()

    def preload(self, names: list[str]) -> None:
        """Imports the modules that are installed, and records the fork hooks they register: `syscalls.fork` runs none."""
        register = os.register_at_fork

        def record(**hooks: Any) -> None:
            if "after_in_child" in hooks:
                self.hooks.append(hooks["after_in_child"])
            register(**hooks)  # sessions that call os.fork need them as well

        os.register_at_fork = record
        try:
            for name in names:
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)
        finally:
            os.register_at_fork = register
        if "numpy.random" in sys.modules:
            self.hooks.append(numpy_seeder())

    def measure(self) -> None:
        """Measures this process: a session starts with its size, and is charged for growth only."""
        if self.proc_fd is not None:
            with open(os.open("self/statm", os.O_RDONLY, dir_fd=self.proc_fd)) as file:
                size, resident, shared, *_ = map(int, file.read().split())
            self.plan.base_size = size * os.sysconf("SC_PAGE_SIZE")
            self.base_mb = (resident - shared) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
        else:
            self.plan.base_size, self.base_mb = 256 << 20, 16.0

    def count_processes(self) -> int:
        """Returns how many processes this user has, which RLIMIT_NPROC counts as well."""
        count = 0
        for name in os.listdir(self.proc_fd):
            with contextlib.suppress(OSError):
                count += name.isdigit() and os.stat(name, dir_fd=self.proc_fd).st_uid == os.getuid()
        return count

    def find_proc_options(self) -> bytes:
        """Returns mount options for /proc. `subset=pid` hides everything but processes; kernels before 5.8 do not know it."""
        for options in (b"subset=pid", b""):
            pid = os.fork()
            if pid == 0:
                try:
                    syscalls.unshare(syscalls.NEW_NS)
                    syscalls.mount_raw(b"proc", b"/proc", b"proc", syscalls.MS_RDONLY, options)
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
        if self.watchdog:
            poller.register(self.watchdog.link.fileno(), select.POLLIN)
        self.send({"op": "up", **self.facts()})
        while True:
            ready = poller.poll(RETRY_S * 1000 if self.leftover else None)
            self.hear_watchdog()  # first: it says why it killed a session before `reap` finds that session dead
            for fd, _ in ready:
                if fd == wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake, 4096)
                    self.reap()
                elif fd == self.control.fileno() and not self.command():
                    return
            if self.leftover:
                leftover, self.leftover = self.leftover, []
                for group in leftover:
                    self.remove_group(group)

    def hear_watchdog(self) -> None:
        for message in self.watchdog.messages() if self.watchdog else ():
            if message["op"] == "offender":
                self.reasons[message["id"]] = message["why"], message["limit"]
            elif message["op"] == "user_processes":
                # Room for what all sessions may start: one must not use up the processes of another.
                self.plan.user_processes = message["count"] + self.plan.processes * len(self.pids)
            else:
                self.send(message)

    def facts(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "cgroup": plan.cgroups is not None,
            "own_uid": plan.uids is not None,
            "proc": plan.proc,
            "landlock": landlock.abi(),
            "scoped": not plan.lone,
            "mounts": plan.mounts,
            **(workspace.facts(plan.workspace) if plan.workspace else {}),
        }

    def send(self, message: dict[str, Any]) -> None:
        self.control.send(json.dumps(message).encode())

    def send_exit(self, session: int, **facts: object) -> None:
        nothing = {"code": 0, "cpu_s": 0, "oom": False, "why": None, "limit": None, "error": None}
        self.send({"op": "exit", "id": session, **nothing, **facts})

    def command(self) -> bool:
        data, ancillary, _, _ = self.control.recvmsg(4096, socket.CMSG_SPACE(4))
        if not data:
            return False
        op, session = COMMAND.unpack_from(data)
        if op == NEW and not ancillary:
            self.send_exit(session, error="the fork server has no descriptor left")
        elif op == NEW:
            if self.plan.workspace:
                self.plan.workspace.tree = os.fsdecode(data[COMMAND.size :])
            self.start(session, int.from_bytes(ancillary[0][2], sys.byteorder))
        elif op == INTERRUPT:
            if session in self.pids:
                with contextlib.suppress(OSError):
                    os.killpg(self.pids[session], signal.SIGINT)  # the group: programs that the cell waits for too
            self.send({"op": "interrupted", "id": session})
        elif op == KILL and session in self.pids:
            self.kill(self.pids[session])
        elif op in (SLOW, QUICK) and session in self.pids:
            with contextlib.suppress(OSError):  # the session has just ended, or this kernel has no time slices
                syscalls.set_slice(self.pids[session], SLOW_NS if op == SLOW else QUICK_NS)
        return True

    def make_group(self) -> tuple[str, tuple[int, ...]] | None:
        if self.plan.cgroups is None:
            return None
        self.group_count += 1
        name = f"s{self.group_count}"
        return name, self.plan.cgroups.make(name)

    def start(self, session: int, fd: int) -> None:
        pid = None
        try:
            group, self.spare = self.spare or self.make_group(), None
            if group is not None:
                self.groups[session], self.plan.join_fds = group
            if self.namespaces:
                syscalls.unshare(syscalls.NEW_PID)  # the next child is process 1 of a new namespace: one fork, not two
            try:
                pid = syscalls.fork()
                if pid == 0:
                    self.become(session, fd)
            finally:
                if self.namespaces and pid != 0:
                    syscalls.setns(self.own_pid_namespace, syscalls.NEW_PID)
        except OSError as error:
            self.discard(session, 0)
            self.send_exit(session, error=str(error))
        finally:
            os.close(fd)
            for descriptor in self.plan.join_fds:
                os.close(descriptor)
            self.plan.join_fds = ()
        if pid:
            self.pids[session], self.sessions[pid] = pid, session
            if self.watchdog:
                self.watchdog.tell(watchdog.BEGIN, session, pid)
            with contextlib.suppress(OSError):  # the next session tries again, and reports the error
                self.spare = self.make_group()

    def become(self, session: int, fd: int) -> NoReturn:
        """In the forked child: isolates the process, then runs the session until it ends."""
        code = 1
        try:
            set_wakeup_fd(-1)
            set_handler(SIGCHLD, SIG_DFL)
            try:
                self.enter(self.plan, session)
                for hook in self.hooks:
                    hook()
                self.inside.open(fd)
                isolation.install_filter(self.plan)  # last: `open` still needs memfd_create
            except OSError as error:
                os.write(self.inside.channel if self.inside.pid else fd, pack_reply(CellReply(0, error=str(error))))
                os._exit(1)
            if self.plan.workspace and self.plan.cgroups:
                # No process of the workspace may reach the first one. The watchdog, where there is one, must read its files.
                syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
            gc.enable()
            self.inside.serve()
            code = 0
        except BaseException:  # noqa: BLE001 - no exception may unwind into the fork server's loop
            code = 1
        finally:
            os._exit(code)

    # ---- how sessions end ----

    def kill(self, leader: int) -> None:
        """Kills a session that has not been reaped. Without a PID namespace, which ends with its first process, the processes
        of a session are a process group: the filter lets none leave it, and no child forked meanwhile escapes the signal."""
        with contextlib.suppress(OSError):
            os.kill(leader, signal.SIGKILL)
        if not self.namespaces:
            with contextlib.suppress(OSError):  # the leader has not yet made its group
                os.killpg(leader, signal.SIGKILL)

    def reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            session = self.sessions.pop(pid, None)
            if session is not None:
                self.kill(pid)  # what the leader left running. Before wait4: from then on its id may be another process's
            _, status, usage = os.wait4(pid, 0)
            if session is None:
                continue  # an orphan of a session: this process is their subreaper
            del self.pids[session]
            oom = False
            if self.plan.cgroups and session in self.groups:
                with contextlib.suppress(OSError):
                    oom = self.plan.cgroups.ran_out_of_memory(self.groups[session])
            self.discard(session, pid)
            code, cpu_s = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
            why, limit = self.reasons.pop(session, (None, None))
            self.send_exit(session, code=code, cpu_s=cpu_s, oom=oom, why=why, limit=limit)

    def discard(self, session: int, pid: int) -> None:
        """Removes the session's cgroup and directory. A directory on disk is removed by the watchdog, at its own pace."""
        group = self.groups.pop(session, "")
        if group:
            self.remove_group(group)
        if self.plan.mounts:
            home = f"{self.plan.directory}/s{session}"
            with contextlib.suppress(OSError):  # the session may have failed before it made the directory or the mount
                syscalls.detach(home)
            with contextlib.suppress(OSError):
                os.rmdir(home)
        if self.watchdog:
            self.watchdog.tell(watchdog.END, session, pid)

    def remove_group(self, name: str) -> None:
        """Removes a cgroup. What the kernel still holds busy is tried again."""
        if self.plan.cgroups is not None and not self.plan.cgroups.remove(name):
            self.leftover.append(name)


def numpy_seeder() -> Callable[[], object]:
    """Returns a hook that seeds numpy's global generator in each session. It writes to the generator's state directly if that
    has the layout of numpy 1.17 and later: calling `seed` would touch many more pages."""
    numpy_random = sys.modules["numpy.random"]
    generator = numpy_random.mtrand._rand._bit_generator
    numpy_random.seed(0)  # puts the generator at the end of its state, so that the first draw mixes all of it
    key = generator.state["state"]["key"].tobytes() if generator.state["bit_generator"] == "MT19937" else b""
    address = generator.ctypes.state_address
    if len(key) == 2496 and ctypes.string_at(address, len(key)) == key:
        return lambda: ctypes.memmove(address, os.urandom(2496), 2496)
    return lambda: numpy_random.seed(int.from_bytes(os.urandom(4)))


def _open_to_all(path: str) -> bool:
    """Whether every user can read the path."""
    path = os.path.realpath(path)
    while path != "/":
        path, seen = os.path.dirname(path), os.stat(path)
        if not seen.st_mode & (0o001 if os.path.isdir(path) else 0o004):
            return False
    return True
