"""The warden: the process the host starts. It makes the server's namespaces and cgroup, watches, and tidies up.

In comes the host's config as one JSON argument with the number of the control socket; out goes a sentence over that socket
when the tier cannot be had. It lives in the host's world, unlike the server below it: when the host or the server ends,
however that happens, it ends the other, kills what is left, and removes folders and cgroups. It never touches a session's
socket.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from typing import Any

from . import cgroup, jail, kernel
from .server import Server


def _map_self(uid: int, gid: int) -> None:
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def open_namespaces() -> tuple[int, int] | None:
    """A PID namespace for the server; as root directly, otherwise inside a new user namespace. Gives the sessions' user ids."""
    uids = jail.own_uids()
    if uids is not None:
        try:
            kernel.unshare(kernel.NEW_PID)
        except OSError:  # root without the right to: be nobody, and try as any user would
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        else:
            return uids
    uid, gid = os.getuid(), os.getgid()
    kernel.unshare(kernel.NEW_USER | kernel.NEW_PID)
    _map_self(uid, gid)
    return None


def fork_server(control: socket.socket, config: dict[str, Any], walls: jail.Walls) -> int:
    """The server as a child; its failure to get ready goes to the host as a sentence."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        server = Server(control, config, walls)
        try:
            server.prepare()
        except OSError as error:
            server.send({"op": "down", "error": str(error)})
            os._exit(1)
        server.serve()
        code = 0
    except BrokenPipeError:
        code = 0  # the host is gone
    finally:
        if code:
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
        os._exit(code)


def watch(host: int, server: int) -> None:
    """Until the host or the server ends. The host is watched as a process: a parent-death signal would follow its thread."""
    ends = select.poll()
    mine = os.pidfd_open(server)
    ends.register(mine, select.POLLIN)
    theirs = None
    with contextlib.suppress(OSError):
        theirs = os.pidfd_open(host)
        ends.register(theirs, select.POLLIN)
    while os.getppid() == host and not ends.poll(None if theirs is not None else 1000):
        continue
    with contextlib.suppress(ProcessLookupError):
        os.kill(server, signal.SIGKILL)


def end_children() -> None:
    """Kill and reap until nobody is left: orphans of the server come to us."""
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
    os.setsid()  # a Ctrl-C at the terminal is for the host
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limits = config["limits"]
    kept = {name: limits[name] for name in ("memory_mb", "disk_mb", "inodes", "processes", "cpu_s", "files")}
    walls = jail.Walls(tier=config["tier"], **kept)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    try:
        kernel.machine()
        if config["cgroup"] and walls.tier != "process":
            # Above RLIMIT_AS and the tmpfs together, so that a memory bomb meets MemoryError before the kernel's killer.
            walls.cgroups = cgroup.find(limits["memory_mb"] + limits["disk_mb"] + 64, limits["processes"])
        if walls.tier == "namespace":
            walls.uids = open_namespaces()
        else:
            walls.uids = jail.own_uids() if walls.tier == "landlock" else None
            walls.directory = tempfile.mkdtemp(prefix="agentfly-sandbox-")
            os.chmod(walls.directory, 0o711)
        server = fork_server(control, config, walls)
    except OSError as error:
        control.send(json.dumps({"op": "down", "error": str(error)}).encode())
        server = 0
    control.close()
    if server:
        watch(config["host"], server)
    end_children()
    tidy(walls)


def tidy(walls: jail.Walls) -> None:
    if walls.directory:
        shutil.rmtree(walls.directory, ignore_errors=True)
    if walls.cgroups:
        deadline = time.monotonic() + 5  # the kernel empties a group a moment after its last process
        while not walls.cgroups.remove_all() and time.monotonic() < deadline:
            time.sleep(0.005)


if __name__ == "__main__":
    main()
