"""The supervisor: the process that the trainer starts. It makes the fork server's namespaces and cgroup, waits, and cleans up.

Its argument is the trainer's config in JSON, with the descriptor of the control socket; it answers there if the tier does not
work. Unlike the fork server it stays outside the isolation. When the trainer or the fork server ends, in whatever way, it ends
the other, kills what is left, and removes directories and cgroups. It never touches a session's socket.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
from typing import Any

from ..interpreter.removal import remove_tree
from . import cgroup, isolation, syscalls, workspace
from .fork_server import ForkServer

PREFIX = "agentfly-sandbox-"


def open_namespaces() -> tuple[int, int] | None:
    """Makes the PID namespace of the fork server: directly with root, otherwise inside a new user namespace.

    Returns the user ids of sessions, or None without root."""
    uids = isolation.own_uids()
    if uids is not None:
        try:
            syscalls.unshare(syscalls.NEW_PID)
        except OSError:  # root without CAP_SYS_ADMIN, as in many containers: continue as the user nobody
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
        else:
            return uids
    uid, gid = os.getuid(), os.getgid()
    syscalls.unshare(syscalls.NEW_USER | syscalls.NEW_PID)
    isolation.map_user(uid, gid)
    return None


def start_fork_server(control: socket.socket, config: dict[str, Any], plan: isolation.IsolationPlan, lock: int) -> int:
    """Forks the fork server and returns its pid. If it cannot get ready, it tells the trainer why."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("300")  # a machine that runs out of memory ends sessions, the largest processes here, before the trainer
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if lock >= 0:
            os.close(lock)  # held by the supervisor alone: its end means that nothing removes the directory any more
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)  # orphans of a session come to it and not to the supervisor
        server = ForkServer(control, config, plan)
        try:
            server.prepare()
        except OSError as error:
            server.send({"op": "down", "error": str(error)})
            os._exit(1)
        server.serve()
        code = 0
    except BrokenPipeError:
        code = 0  # the trainer is gone
    finally:
        if code:
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
        os._exit(code)


def watch(trainer: int, server: int) -> None:
    """Waits until the trainer or the fork server ends, then kills the fork server.

    Uses a pidfd of the trainer and no parent-death signal: that one is sent when the *thread* that started us ends."""
    ends = select.poll()
    mine = os.pidfd_open(server)
    ends.register(mine, select.POLLIN)
    theirs = None
    with contextlib.suppress(OSError):
        theirs = os.pidfd_open(trainer)
        ends.register(theirs, select.POLLIN)
    # The parent is checked too: the trainer may have died before pidfd_open, and its id may be taken.
    while os.getppid() == trainer and not ends.poll(None if theirs is not None else 1000):
        continue
    with contextlib.suppress(ProcessLookupError):
        os.kill(server, signal.SIGKILL)


def end_children() -> None:
    """Kills and reaps children until none is left. As a subreaper this process inherits the orphans of the fork server."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{int(name)}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
                if parent == os.getpid():
                    os.kill(int(name), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        time.sleep(0.002)


def main() -> None:
    config = json.loads(sys.argv[1])
    control = socket.socket(fileno=config["fd"])
    os.setsid()  # Ctrl-C at the terminal goes to the trainer alone
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limits = config["limits"]
    bounds = {name: limits[name] for name in ("memory_mb", "disk_mb", "inodes", "processes", "cpu_s", "files")}
    plan = isolation.IsolationPlan(tier=config["tier"], **bounds)
    if config["layout"] is not None:
        plan.workspace = workspace.WorkspaceMounts(
            config["layout"]["trees"], loopback=config["layout"]["network"] == "loopback"
        )
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    lock = -1
    try:
        syscalls.machine()
        if config["cgroup"] and plan.tier != "process":
            # Above RLIMIT_AS and the tmpfs together: a memory bomb gets a MemoryError before the OOM killer ends the session.
            plan.cgroups = cgroup.find(limits["memory_mb"] + limits["disk_mb"] + 64, limits["processes"])
        if plan.tier == "namespace":
            plan.uids = open_namespaces()
        else:
            plan.uids = isolation.own_uids() if plan.tier == "landlock" else None
            plan.directory, lock = make_directory()
        server = start_fork_server(control, config, plan, lock)
    except OSError as error:
        control.send(json.dumps({"op": "down", "error": str(error)}).encode())
        server = 0
    control.close()
    if server:
        watch(config["trainer"], server)
    end_children()
    clean_up(plan)


def make_directory() -> tuple[str, int]:
    """Makes the directory of the sessions' directories, and a descriptor that locks it. Removes those of supervisors that were
    killed: their lock is free."""
    for name in glob.glob(os.path.join(tempfile.gettempdir(), f"{PREFIX}*", "lock")):
        with contextlib.suppress(OSError):  # another user's, just removed, or in use
            old = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(old, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(os.path.dirname(name))
            finally:
                os.close(old)
    path = tempfile.mkdtemp(prefix=PREFIX)
    # Locked before it is named "lock": another supervisor must never find a lock that is not held yet.
    lock = os.open(f"{path}/new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(f"{path}/new", f"{path}/lock")
    os.chmod(path, 0o711)
    return path, lock


def clean_up(plan: isolation.IsolationPlan) -> None:
    left = remove_tree(plan.directory) if plan.directory else None
    if left:
        sys.stderr.write(f"the sandbox could not remove {left}\n")
    if plan.cgroups:
        deadline = time.monotonic() + 5  # the kernel empties a cgroup shortly after its last process ended
        while not plan.cgroups.remove_all() and time.monotonic() < deadline:
            time.sleep(0.005)
