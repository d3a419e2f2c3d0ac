"""The walls. `build_root` makes the read-only world all sessions of a server share; `enter_*` puts one forked process behind
them.

Order matters, and each line has its reason beside it. After `enter_*` only the system call filter (`lock`) is missing: it
comes last, because the session still has to open its output files. What cannot be put up raises OSError; nothing is skipped
in silence.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from dataclasses import dataclass, field

from . import kernel, landlock, seccomp
from .cgroup import Cgroups

DEVICES = ("null", "zero", "full", "random", "urandom")
_RO = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
_MB = 1 << 20
PUT_BY = "/.below-tmp"
"""Where the root keeps what the sessions' own /tmp would hide."""


@dataclass
class Walls:
    """What the server has found out and every session needs."""

    tier: str
    memory_mb: int
    disk_mb: int
    inodes: int
    processes: int
    cpu_s: int
    files: int
    uids: tuple[int, int] | None = None  # (first, count): only root can give each session its own
    cgroups: Cgroups | None = None
    proc: bool = False
    proc_options: bytes = b""
    read: list[str] = field(default_factory=list)
    base_size: int = 0  # bytes of address space before a session does anything
    user_processes: int = 0
    directory: str = ""
    below_tmp: list[str] = field(default_factory=list)  # visible paths that the session's own /tmp would hide
    tickets: tuple[int, ...] = ()  # descriptors through which the next session joins its cgroup
    tmp_options: bytes = b""
    limits: list[tuple[int, int]] = field(default_factory=list)  # those that the server cannot take on itself

    def uid(self, session: int) -> int | None:
        return None if self.uids is None else self.uids[0] + session % self.uids[1]


def own_uids() -> tuple[int, int] | None:
    """A range of user ids for sessions, far from everybody's; None when we are not root."""
    if os.geteuid() != 0:
        return None
    with open("/proc/self/uid_map") as file:
        inside, _, count = map(int, file.readline().split())
    if inside + count > 0x70000000 + 1_000_000:
        return 0x70000000, 1_000_000
    if count >= 4096:
        return inside + count // 2, count // 2 - 1
    return 65534, 1


def visible_paths(site: list[str]) -> list[str]:
    """What a session may read: the system's programs and libraries, this interpreter and its packages; not the host's files."""
    wanted = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/fonts", "/etc/ld.so.cache"]
    wanted += ["/etc/localtime", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/nix/store", sys.prefix, sys.base_prefix, *site]
    return [path for path in dict.fromkeys(wanted) if path not in ("", "/") and os.path.exists(path)]


def tops(paths: list[str]) -> list[str]:
    """Where the paths really are, without those inside others."""
    real = sorted({os.path.realpath(path) for path in paths})
    return [path for path in real if not any(path.startswith(other + "/") for other in real)]


def below_tmp(paths: list[str]) -> list[str]:
    """The visible paths below /tmp (a virtual environment made there, say)."""
    return [path for path in tops(paths) if path.startswith("/tmp/")]


def build_root(paths: list[str]) -> bool:
    """Leave the host's file system for a new root with only `paths` in it. True when /proc could be mounted."""
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    outer = tops(paths)
    free = [place for place in ("/mnt", "/media", "/srv", "/opt", "/tmp", "/var") if os.path.isdir(place)]
    new = next(place for place in free if not any(f"{path}/".startswith(f"{place}/") for path in outer))
    kernel.mount("tmpfs", new, "tmpfs", kernel.MS_NOSUID, "mode=755,size=4m,nr_inodes=4096")
    for path in outer:
        _expose(path, new + path, _RO)
    for number, path in enumerate(below_tmp(paths)):
        _expose(path, f"{new}{PUT_BY}/{number}", _RO)
    for path in paths:
        if not os.path.lexists(new + path):  # a symbolic link on the host, to something that is in
            os.makedirs(os.path.dirname(new + path), exist_ok=True)
            os.symlink(os.path.realpath(path), new + path)
    for name in ("dev", "proc", "tmp", "etc", "var", "run"):
        os.makedirs(f"{new}/{name}", exist_ok=True)
    for name in DEVICES:
        _expose(f"/dev/{name}", f"{new}/dev/{name}", kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NOEXEC)
    links = {"dev/fd": "/proc/self/fd", "dev/stdin": "/proc/self/fd/0", "dev/stdout": "/proc/self/fd/1"}
    for name, target in {**links, "dev/stderr": "/proc/self/fd/2", "dev/shm": "/tmp", "var/tmp": "/tmp"}.items():
        os.symlink(target, f"{new}/{name}")
    for name, text in {"passwd": "nobody:x:65534:65534::/tmp:/bin/sh\n", "group": "nogroup:x:65534:\n"}.items():
        with open(f"{new}/etc/{name}", "w") as file:
            file.write(text)
    try:
        kernel.mount("proc", f"{new}/proc", "proc", _RO | kernel.MS_NOEXEC)
        proc = True
    except OSError:
        proc = False  # a container that masks parts of /proc: sessions do without
    os.chdir(new)
    kernel.pivot_root(".", ".")
    kernel.detach(".")
    os.chdir("/")
    kernel.restrict_mount("/", kernel.MS_RDONLY)
    return proc


def _expose(source: str, target: str, flags: int) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "x"):
            pass
    kernel.bind(source, target, flags)


def _open_path(path: str) -> None:
    """Make a directory and those above it, open to every session's user whatever the umask."""
    made = "/"
    for part in path.strip("/").split("/"):
        made = os.path.join(made, part)
        if not os.path.isdir(made):
            os.mkdir(made)
            os.chmod(made, 0o755)


def enter_namespace(walls: Walls, session: int) -> None:
    """Called in the fresh child, which is process 1 of its own PID namespace already."""
    os.setsid()  # or kill(0, SIGKILL) would reach the server
    join(walls)
    kernel.unshare(kernel.NEW_NS | kernel.NEW_IPC)
    uid = walls.uid(session)
    options = walls.tmp_options if uid is None else b"%b,uid=%d,gid=%d" % (walls.tmp_options, uid, uid)
    kernel.mount_raw(b"tmpfs", b"/tmp", b"tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    for number, path in enumerate(walls.below_tmp):
        kept = f"{PUT_BY}/{number}"
        if os.path.isdir(kept):
            _open_path(path)
        else:
            _open_path(os.path.dirname(path))
            with open(path, "x"):
                pass
        kernel.bind(kept, path, _RO)
    if walls.proc:
        kernel.mount_raw(b"proc", b"/proc", b"proc", _RO | kernel.MS_NOEXEC, walls.proc_options)
    if uid is not None:
        _become(uid)
    try:
        # The mounts above belong to the server's user namespace: from inside the session's own they cannot be undone. It has no
        # mapping, so nobody in it can be root, and RLIMIT_NPROC counts this session's processes alone.
        kernel.unshare(kernel.NEW_USER)
    except OSError:
        if uid is None:
            raise  # root gave the session a user of its own, which serves as well
    os.chdir("/tmp")
    _give_up(walls, walls.processes)


def join(walls: Walls) -> None:
    """Into the session's cgroup: what is forked from now on follows."""
    for ticket in walls.tickets:
        os.write(ticket, b"0")


def enter_landlock(walls: Walls, session: int) -> None:
    home = _own_directory(walls, session)
    read = [*walls.read, "/dev/null"]
    landlock.restrict(read, [home], [f"/dev/{name}" for name in DEVICES])
    _give_up(walls, walls.processes if walls.uids else walls.user_processes + walls.processes)


def enter_process(walls: Walls, session: int) -> None:
    _own_directory(walls, session)
    _limit(walls, walls.processes if walls.uids else walls.user_processes + walls.processes)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)


def prepare(walls: Walls) -> None:
    """What the server can do once for all its sessions: limits that do not hinder itself, groups, and no way to new rights."""
    walls.tmp_options = f"size={walls.disk_mb}m,nr_inodes={walls.inodes},mode=700".encode()
    if walls.uids is not None:
        os.setgroups([])
    if walls.tier != "process":
        kernel.empty_bounding_set()
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    common = {
        resource.RLIMIT_FSIZE: walls.disk_mb * _MB,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_NICE: 0,
        resource.RLIMIT_RTPRIO: 0,
        resource.RLIMIT_STACK: 8 * _MB,
    }
    for which, value in common.items():
        resource.setrlimit(which, (_allowed(which, value),) * 2)
    own = {
        resource.RLIMIT_AS: walls.base_size + walls.memory_mb * _MB,
        resource.RLIMIT_CPU: walls.cpu_s,
        resource.RLIMIT_NOFILE: walls.files,
    }
    walls.limits = [(which, _allowed(which, value)) for which, value in own.items()]


def _allowed(which: int, value: int) -> int:
    hard = resource.getrlimit(which)[1]
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


def lock(walls: Walls) -> None:
    """The last wall: the system call filter."""
    if walls.tier == "namespace":
        seccomp.install(_namespace_filter)
    elif walls.tier == "landlock":
        lone = None if landlock_scopes else os.getpid()
        seccomp.install(seccomp.program(lone, keep_session=True))


_namespace_filter = seccomp.program()
landlock_scopes = False  # set by the server: the kernel fences signals


def _own_directory(walls: Walls, session: int) -> str:
    os.setsid()
    join(walls)
    home = f"{walls.directory}/s{session}"
    os.mkdir(home, 0o700)
    uid = walls.uid(session)
    if uid is not None and walls.tier != "process":
        os.chown(home, uid, uid)
        _become(uid)
    os.chdir(home)
    os.environ.update(HOME=home, TMPDIR=home, MPLCONFIGDIR=home)
    return home


def _become(uid: int) -> None:
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # changing users made /proc/self root's


def _give_up(walls: Walls, processes: int) -> None:
    """Limits, privileges, and the wish to outlive the server; in this order, a changed user would clear the last."""
    _limit(walls, processes)
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)


def _limit(walls: Walls, processes: int) -> None:
    for which, value in walls.limits:
        resource.setrlimit(which, (value, value))
    processes = _allowed(resource.RLIMIT_NPROC, processes)
    resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
