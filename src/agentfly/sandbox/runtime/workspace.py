"""What turns a session into a workspace: a file tree that it may change, terminals, a private network, and all of /proc.

    /.trees/NAME, read-only  ->  lower layer  \
    tmpfs of the session    ->  upper layer   >  overlay at /workspace        the other half of the tmpfs  ->  /tmp

The session changes its upper layer only, whose size and number of files the tmpfs limits. /.trees is unmounted before foreign
code runs, and both layers have no path then. Without an overlay the tree is copied into the tmpfs.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

from . import syscalls

WORK, TREES = "/workspace", "/.trees"
EMPTY = "empty"
"""The tree with which `probe` tries an overlay: it has one file, `file`."""
_OWN = syscalls.MS_NOSUID | syscalls.MS_NODEV
_SIOCSIFFLAGS, _IFF_UP, _IFF_RUNNING = 0x8914, 0x1, 0x40
LINKS = {"app": WORK, "testbed": WORK, "tests": "/tmp/tests", "logs": "/tmp/logs", "solution": "/tmp/solution"}
"""Names under which task formats know the tree and the places of their tests and logs."""
MASKED = (
    "interrupts", "kallsyms", "kcore", "key-users", "keys", "kmsg", "latency_stats", "modules", "sched_debug", "sysrq-trigger",
    "timer_list",
)  # fmt: skip
"""Files of /proc that tell of the machine or of its other users and that no program of a workspace needs."""


@dataclass
class WorkspaceMounts:
    """What the workspaces of a fork server have: `trees` is the folder of the trees, `tree` the name of the next one's."""

    trees: str
    loopback: bool = False  # each has a private network namespace
    terminals: bool = False
    tree: str = ""
    no_overlay: str = ""  # why trees are copied; empty if they are overlaid
    no_loopback: str = ""

    def source(self, trees: str) -> str:
        """Returns the path of the next workspace's tree in this folder; empty if it begins with an empty one."""
        return f"{trees}/{self.tree}" if self.tree else ""


def facts(own: WorkspaceMounts) -> dict[str, object]:
    return {"no_overlay": own.no_overlay, "no_loopback": own.no_loopback, "terminals": own.terminals}


def add_places(new: str, trees: str) -> None:
    """Adds to the root that a fork server builds at `new` where each session mounts what is its own."""
    if os.path.lexists(new + WORK):
        raise OSError(17, f"{WORK} is where a workspace has its tree, and this machine's Python or packages are there")
    for name in (WORK, TREES, "/dev/pts"):
        os.makedirs(new + name)
    for name, target in {**LINKS, "dev/ptmx": "pts/ptmx"}.items():
        if not os.path.lexists(f"{new}/{name}"):
            os.symlink(target, f"{new}/{name}")
    with open(f"{new}/etc/hosts", "w") as file:
        file.write("127.0.0.1 localhost sandbox\n::1 localhost\n")
    syscalls.bind(trees, new + TREES, syscalls.MS_RDONLY | _OWN)


def enter(own: WorkspaceMounts, uid: int | None) -> None:
    """Runs in the forked child that will be the session, after it has mounted its tmpfs on /tmp."""
    if own.loopback:
        raise_loopback()
    for name in ("tmp", "upper", "work", "lower"):
        os.mkdir(f"/tmp/{name}")
    lower = own.source(TREES)
    if lower and not own.no_overlay:
        if uid is not None:
            _bind_for(uid, lower, "/tmp/lower")
            lower = "/tmp/lower"
        # "userxattr" outside the first user namespace; there the kernel takes trusted.*, which no session can write.
        private = ",userxattr" if uid is None else ""
        _give("/tmp/upper", uid)
        options = f"lowerdir={lower},upperdir=/tmp/upper,workdir=/tmp/work{private}"
        syscalls.mount("overlay", WORK, "overlay", _OWN, options)
    else:
        copy_tree(lower, "/tmp/upper", uid)
        syscalls.bind("/tmp/upper", WORK, _OWN)
    _give("/tmp/tmp", uid)
    # Covers the tmpfs with one of its folders: no path leads to the layers any more.
    syscalls.bind("/tmp/tmp", "/tmp", _OWN)
    syscalls.detach(TREES)
    if own.terminals:
        _mount_terminals()


def _mount_terminals() -> None:
    flags = syscalls.MS_NOSUID | syscalls.MS_NOEXEC
    syscalls.mount("devpts", "/dev/pts", "devpts", flags, "newinstance,ptmxmode=0666,mode=620")


def mask_proc() -> None:
    """Puts an empty file in the place of the files of /proc that are `MASKED`."""
    for name in MASKED:
        if os.path.exists(f"/proc/{name}"):
            syscalls.mount("/dev/null", f"/proc/{name}", None, syscalls.MS_BIND)


def raise_loopback() -> None:
    """Brings up the interface lo of a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP | _IFF_RUNNING))


def _give(path: str, uid: int | None) -> None:
    os.chmod(path, 0o755)
    if uid is not None:
        os.chown(path, uid, uid)


def _bind_for(uid: int, source: str, target: str) -> None:
    """Binds a folder of root's so that `uid` owns it there."""
    ready, made = os.pipe2(os.O_CLOEXEC)
    done, go = os.pipe2(os.O_CLOEXEC)
    pid = syscalls.fork()
    if pid == 0:
        code = 1
        try:
            os.close(go)
            syscalls.unshare(syscalls.NEW_USER)
            os.write(made, b".")
            os.read(done, 1)  # until the parent has opened the namespace
            code = 0
        finally:
            os._exit(code)
    try:
        os.close(made)
        if not os.read(ready, 1):
            raise OSError(1, "no user namespace for the owner of a tree")
        # The /proc of the fork server is read-only, and the map must be written: a second one, seen by nothing else.
        syscalls.mount("proc", "/tmp/work", "proc", _OWN)
        try:
            for name in ("uid_map", "gid_map"):
                with open(f"/tmp/work/{pid}/{name}", "w") as file:
                    file.write(f"0 {uid} 1")
            userns = os.open(f"/tmp/work/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            syscalls.detach("/tmp/work")
        try:
            syscalls.bind_as(source, target, userns)
        finally:
            os.close(userns)
    finally:
        for descriptor in (ready, done, go):
            os.close(descriptor)
        os.waitpid(pid, 0)


def copy_tree(source: str, target: str, uid: int | None) -> None:
    """Copies a tree, or makes an empty one without a source. Links are copied as links."""
    if source:
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    else:
        os.makedirs(target, exist_ok=True)
    _give(target, uid)
    if uid is not None:
        for folder, folders, files in os.walk(target):
            for name in (*folders, *files):
                os.chown(f"{folder}/{name}", uid, uid, follow_symlinks=False)


def probe(own: WorkspaceMounts, uid: int | None) -> None:
    """Finds out by doing it what workspaces can have here, and notes what fails."""
    own.terminals = not _fails(_mount_terminals)
    own.no_overlay = _fails(lambda: _enter_and_write(WorkspaceMounts(own.trees, tree=EMPTY), uid))
    if own.loopback:
        own.no_loopback = _fails(_make_network)
        own.loopback = not own.no_loopback


def _make_network() -> None:
    syscalls.unshare(syscalls.NEW_NET)
    raise_loopback()


def _enter_and_write(own: WorkspaceMounts, uid: int | None) -> None:
    syscalls.mount("tmpfs", "/tmp", "tmpfs", _OWN)
    enter(own, uid)
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    with open(f"{WORK}/file", "a") as file:
        file.write("written")
    os.chmod(f"{WORK}/file", 0o700)  # only its owner may


def _fails(action: Callable[[], None]) -> str:
    """Runs an action in a child with mounts of its own. Returns why it failed, or an empty string."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        why = "it ended without an error"
        try:
            syscalls.unshare(syscalls.NEW_NS)
            action()
            why = ""
        except BaseException as error:  # noqa: BLE001 - a forked child must end here, whatever happens
            why = str(error) or type(error).__name__
        finally:
            os.write(writing, why.encode()[:500])
            os._exit(0)
    os.close(writing)
    try:
        return os.read(reading, 500).decode("utf-8", "replace")
    finally:
        os.close(reading)
        os.waitpid(pid, 0)


def hide_command_line() -> None:
    """Overwrites this process's arguments, which its sessions would show in /proc/1/cmdline."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end
    if 0 < end - start < 1 << 20:
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, b"sandbox", min(7, end - start))
