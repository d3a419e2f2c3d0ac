"""The watchdog: a process beside the fork server that adds up what no limit of the kernel adds up, and removes folders.

It is forked only where it is needed: without a cgroup (memory of several processes) and without private mounts (files on disk,
folders to remove). The fork server never waits for it, so a session that is slow to examine or to remove delays no other one.

    fork server -- BEGIN, END (session, pid) --> watchdog -- {"op": "offender" | "left" | "user_processes", ...} --> fork server

A session that has used no CPU time since its last check can have changed nothing, so a sweep costs one system call for each
process that idles. A check stops the processes of a session for as long as it reads its files: they cannot be moved meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ..interpreter.removal import removal_of
from . import syscalls
from .isolation import IsolationPlan
from .usage import SOCKET_BYTES, Hidden, Proc, SessionFiles, cpu_ns

SWEEP_S = 0.03
REST, LONG_REST, MAX_REST_S = 4, 40, 1.0
"""A sweep that took t seconds of CPU time is followed by `REST` * t seconds without one, `LONG_REST` * t if all sessions idled,
but by no more than `MAX_REST_S`: a session that exceeds a limit is stopped within that time."""
USED_NS = 200_000
"""A session is checked when its processes have used this much CPU time since its last check, or are others than then."""
REMOVE_S = 0.02
"""How long removal goes on before the watchdog looks for messages and sweeps again."""
RETRY_S = (0.05, 0.2, 1.0, 5.0)
"""When to try again to remove a folder that could not be removed. After the last attempt it is reported once."""
IN_FLIGHT_S = 0.02
FREE_SOCKETS = 4
BEGIN, END = range(2)
MESSAGE = struct.Struct(">BII")
_MB = 1 << 20


@dataclass
class Watched:
    """A session that runs."""

    number: int
    pid: int
    home: str
    namespace: str = ""
    pids: list[int] = field(default_factory=list)
    used: dict[int, int] = field(default_factory=dict)  # CPU time of each process at the last check


class Watchdog:
    """The fork server's end: starts the process and speaks with it."""

    def __init__(self, plan: IsolationPlan, proc_fd: int | None, base_mb: float, unwanted: list[socket.socket]) -> None:
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            _run(theirs, [self.link, *unwanted], plan, proc_fd, base_mb)
        theirs.close()
        self.link.setblocking(False)

    def tell(self, op: int, session: int, pid: int) -> None:
        self.link.setblocking(True)
        self.link.send(MESSAGE.pack(op, session, pid))
        self.link.setblocking(False)

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yields what the watchdog has said since the last call. Raises OSError if it has ended."""
        while True:
            try:
                data = self.link.recv(1 << 16)
            except BlockingIOError:
                return
            if not data:
                raise OSError("the watchdog has ended")
            yield json.loads(data)


def _run(
    link: socket.socket, unwanted: list[socket.socket], plan: IsolationPlan, proc_fd: int | None, base_mb: float
) -> NoReturn:
    code = 1
    try:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        for other in unwanted:
            other.close()  # the trainer must see the end of the control socket when the fork server ends
        WatchdogProcess(link, plan, Proc(proc_fd) if proc_fd is not None else None, base_mb).serve()
        code = 0
    finally:
        if code:
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
        os._exit(code)


class WatchdogProcess:
    """The loop of the process: messages first, then a sweep if it is due, then a slice of removal."""

    def __init__(self, link: socket.socket, plan: IsolationPlan, proc: Proc | None, base_mb: float) -> None:
        self.link, self.plan, self.proc, self.base_mb = link, plan, proc, base_mb
        self.sessions: dict[int, Watched] = {}
        self.leaders: dict[int | str, int] = {}  # pid of a leader, or its PID namespace -> session
        self.keys: dict[int, int | str] = {}  # pid -> such a key, for every process that the last sweep saw
        self.outbox: deque[bytes] = deque()
        self.folders: deque[tuple[str, int]] = deque()  # to remove: path, number of attempts so far
        self.retries: list[tuple[float, str, int]] = []  # (time, path, attempts)
        self.removal: tuple[Iterator[str | None], str, int] | None = None
        self.user_at = 0.0

    def serve(self) -> None:
        poller = select.poll()
        poller.register(self.link.fileno(), select.POLLIN)
        self.link.setblocking(False)
        sweep_at = time.monotonic()
        while True:
            busy = self.removal is not None or self.folders
            wait_s = 0.0 if busy else SWEEP_S if self.sessions or self.retries or self.outbox else None
            if wait_s:
                wait_s = min(wait_s, max(0.001, sweep_at - time.monotonic())) if self.sessions else wait_s
            poller.poll(None if wait_s is None else wait_s * 1000)
            if not self.receive():
                return
            self.deliver()
            now = time.monotonic()
            if self.proc is not None and now >= sweep_at:
                spent = time.thread_time()
                rest = REST if self.sweep() else LONG_REST
                spent = time.thread_time() - spent
                sweep_at = time.monotonic() + min(max(SWEEP_S, rest * spent), MAX_REST_S)
            self.remove()

    # ---- messages ----

    def receive(self) -> bool:
        """Obeys the messages of the fork server. Returns False if it has ended."""
        while True:
            try:
                data = self.link.recv(MESSAGE.size)
            except BlockingIOError:
                return True
            if not data:
                return False
            op, number, pid = MESSAGE.unpack(data)
            home = f"{self.plan.directory}/s{number}" if self.plan.directory else ""
            if op == BEGIN:
                self.sessions[number] = watched = Watched(number, pid, home)
                if self.plan.tier == "namespace" and self.proc is not None:
                    with contextlib.suppress(OSError):
                        watched.namespace = self.proc.pid_namespace(pid)
                self.leaders[watched.namespace or pid] = number
            else:
                ended = self.sessions.pop(number, None)
                if ended is not None:
                    self.leaders.pop(ended.namespace or pid, None)
                    self.end_members(ended)
                if home and not self.plan.mounts:
                    self.folders.append((home, 0))

    def say(self, op: str, **facts: object) -> None:
        self.outbox.append(json.dumps({"op": op, **facts}).encode())
        self.deliver()

    def deliver(self) -> None:
        """Sends what can be sent now: waiting for a fork server that waits for this process would never end."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self.outbox:
                self.link.send(self.outbox[0])
                self.outbox.popleft()

    # ---- processes ----

    def list_members(self) -> None:
        """Finds the processes of each session. A process never changes its session, so each is looked up once."""
        assert self.proc is not None
        for watched in self.sessions.values():
            watched.pids = [watched.pid]
        keys: dict[int, int | str] = {}
        for pid in self.proc.pids():
            key = self.keys.get(pid)
            if key is None:
                key = 0
                with contextlib.suppress(OSError, ValueError, IndexError):  # the process has ended meanwhile
                    key = self.proc.pid_namespace(pid) if self.plan.tier == "namespace" else self.proc.session_of(pid)
            keys[pid] = key
            owner = self.sessions.get(self.leaders.get(key, 0))
            if owner is not None and pid != owner.pid:
                owner.pids.append(pid)
        self.keys = keys

    def end_members(self, ended: Watched) -> None:
        """Kills what a session left running. In the tier `process` it may have left the process group, but not its session."""
        if self.plan.tier == "process" and self.proc is not None:
            for pid in self.proc.pids():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    if self.proc.session_of(pid) == ended.pid:
                        os.kill(pid, signal.SIGKILL)

    def kill(self, watched: Watched, why: str, limit: str | None) -> None:
        # Before the kill: the fork server must know why when it reaps.
        self.say("offender", id=watched.number, why=why, limit=limit)
        for pid in watched.pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    # ---- sweeps ----

    def sweep(self) -> bool:
        """Checks the sessions that have run. Returns whether there were any."""
        self.list_members()
        active = False
        for watched in list(self.sessions.values()):
            used = {pid: cpu_ns(pid) for pid in watched.pids}
            same = used.keys() == watched.used.keys() and -1 not in used.values()
            if same and sum(used.values()) - sum(watched.used.values()) < USED_NS:
                continue
            watched.used = used
            active = True
            try:
                verdict = self.judge(watched)
            except Hidden:  # the tier `process` claims nothing, and other users' programs may run there
                verdict = (None, "it hid its files from the watchdog") if self.plan.tier != "process" else None
            except OSError:
                watched.used = {}  # something has ended or moved meanwhile: the next sweep checks again
                continue
            if verdict is not None:
                limit, why = verdict
                self.kill(watched, why, limit)
        self.count_user_processes()
        return active

    def judge(self, watched: Watched) -> tuple[str | None, str] | None:
        """Returns the limit that the session has passed and why it must end, None if it is within its limits."""
        plan = self.plan
        if len(watched.pids) > plan.processes + 1:
            return "processes", f"it started more than {plan.processes} processes"
        files = SessionFiles()
        on_disk = bool(watched.home) and not plan.mounts
        if on_disk:
            with self.stopped(watched):
                files.add_folder(watched.home, plan.disk_mb * _MB, plan.inodes)
                maps = self.open_files(watched, files)
            files.add_mapped([line for lines in maps for line in lines], os.fsencode(watched.home) + b"/", plan.disk_mb * _MB)
            if files.size > plan.disk_mb * _MB or files.count > plan.inodes:
                return "disk", f"it wrote more than {plan.disk_mb} MB or {plan.inodes} files"
            if files.in_flight and self.still_in_flight(watched, files.device):
                return "disk", "it kept files open inside a socket"
        elif plan.cgroups is None:
            maps = self.open_files(watched, files)
        return self.judge_memory(watched, files, maps) if plan.cgroups is None else None

    def open_files(self, watched: Watched, files: SessionFiles) -> list[list[bytes]]:
        assert self.proc is not None
        for pid in watched.pids:
            self.proc.descriptors(pid, files)
        return [self.proc.mappings(pid) for pid in watched.pids]

    def still_in_flight(self, watched: Watched, device: int) -> bool:
        """Looks a second time: a process that passes a descriptor to another has it in flight for a moment."""
        time.sleep(IN_FLIGHT_S)
        files = SessionFiles(device)
        self.open_files(watched, files)
        return files.in_flight

    def judge_memory(self, watched: Watched, files: SessionFiles, maps: list[list[bytes]]) -> tuple[str, str] | None:
        assert self.proc is not None
        if self.plan.tier != "process" and any(b" /dev/zero (deleted)" in line for lines in maps for line in lines):
            # The filter refuses anonymous shared memory. The old way to it, mapping /dev/zero, cannot be told apart there.
            return "memory", "it mapped /dev/zero as shared memory, which cannot be counted here"
        buffers = max(0, len(files.sockets) - FREE_SOCKETS) * SOCKET_BYTES / _MB
        shared = 0.0 if self.plan.tier != "process" else _shared_mb(maps)
        used = buffers + shared
        for pid in watched.pids:
            with contextlib.suppress(OSError, ValueError):
                used += max(0.0, self.proc.private_mb(pid) - self.base_mb)
        if used <= self.plan.memory_mb:
            return None
        # Pages that processes of the session share after a fork were counted for each of them: now count exactly.
        used = buffers - self.base_mb
        for pid in watched.pids:
            try:
                used += self.proc.proportional_mb(pid)
            except PermissionError:
                used += max(0.0, self.proc.private_mb(pid))
            except (OSError, ValueError):
                continue
        if used <= self.plan.memory_mb:
            return None
        return "memory", f"its processes used more than {self.plan.memory_mb} MB together"

    @contextlib.contextmanager
    def stopped(self, watched: Watched) -> Iterator[None]:
        """Stops all processes of a session: the filter keeps them in one process group."""
        assert self.proc is not None
        with contextlib.suppress(OSError):
            os.killpg(watched.pid, signal.SIGSTOP)
        try:
            for pid in watched.pids:
                for _ in range(20):
                    if self.proc.state(pid) != b"R":
                        break
                    time.sleep(0.0001)
            yield
        finally:
            with contextlib.suppress(OSError):
                os.killpg(watched.pid, signal.SIGCONT)

    def count_user_processes(self) -> None:
        """RLIMIT_NPROC counts all processes of a user: the fork server must know how many there are outside its sessions."""
        if self.plan.uids is not None or self.plan.tier == "namespace" or time.monotonic() < self.user_at:
            return
        assert self.proc is not None
        self.user_at = time.monotonic() + 1
        count, me = 0, os.getuid()
        for pid in self.keys:
            with contextlib.suppress(OSError):
                count += os.stat(str(pid), dir_fd=self.proc.fd).st_uid == me
        self.say("user_processes", count=count)

    # ---- removal ----

    def remove(self) -> None:
        """Removes folders of ended sessions for at most `REMOVE_S`."""
        now = time.monotonic()
        for entry in [entry for entry in self.retries if entry[0] <= now]:
            self.retries.remove(entry)
            self.folders.append(entry[1:])
        while self.removal is not None or self.folders:
            if self.removal is None:
                path, attempts = self.folders.popleft()
                self.removal = removal_of(path), path, attempts
            steps, path, attempts = self.removal
            left = None
            for left in steps:
                if left is not None:
                    break
                if time.monotonic() - now > REMOVE_S:
                    return
            self.removal = None
            if left is not None and attempts < len(RETRY_S):
                self.retries.append((time.monotonic() + RETRY_S[attempts], path, attempts + 1))
            elif left is not None:
                self.say("left", why=left)


def _shared_mb(maps: list[list[bytes]]) -> float:
    """Returns the size of anonymous shared memory that processes have mapped, each piece once."""
    sizes: dict[bytes, int] = {}
    for lines in maps:
        for line in lines:
            if b" /dev/zero (deleted)" in line:
                span, _, _, _, inode, _ = line.split(maxsplit=5)
                first, last = (int(part, 16) for part in span.split(b"-"))
                sizes[inode] = max(sizes.get(inode, 0), last - first)
    return sum(sizes.values()) / _MB
