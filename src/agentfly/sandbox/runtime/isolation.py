"""How a process isolates itself. `build_root` makes the read-only root that all sessions of a fork server share; `enter_*` runs
in each forked session, one function per tier.

The order of the lines matters, and a comment gives the reason. What cannot be applied raises OSError; nothing is skipped.
`install_filter` comes after `enter_*`, when the session has opened its output files.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from dataclasses import dataclass, field

from . import landlock, seccomp, syscalls, workspace
from .cgroup import Cgroups

DEVICES = ("null", "zero", "full", "random", "urandom")
_RO = syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV
_MB = 1 << 20
BELOW_TMP = "/.below-tmp"
"""Where the new root keeps visible paths below /tmp: the private /tmp of a session would hide them."""


@dataclass
class IsolationPlan:
    """What the supervisor and the fork server prepared, and every session applies to itself."""

    tier: str
    memory_mb: int
    disk_mb: int
    inodes: int
    processes: int
    cpu_s: int
    files: int
    uids: tuple[int, int] | None = None  # (first, count) of user ids for sessions; None without root
    cgroups: Cgroups | None = None
    proc: bool = False  # whether /proc can be mounted
    proc_options: bytes = b""
    read: list[str] = field(default_factory=list)  # landlock: paths that sessions may read
    base_size: int = 0  # bytes of address space that a session starts with
    user_processes: int = 0  # processes of this user outside the sandbox, which RLIMIT_NPROC counts as well
    directory: str = ""  # holds the sessions' directories; empty with a private /tmp
    mounts: bool = False  # whether each of these directories is a private tmpfs
    below_tmp: list[str] = field(default_factory=list)  # visible paths that the private /tmp would hide
    join_fds: tuple[int, ...] = ()  # descriptors through which the next session joins its cgroup
    tmp_options: bytes = b""
    limits: list[tuple[int, int]] = field(default_factory=list)  # rlimits that would hinder the fork server itself
    lone: bool = False  # landlock: this kernel does not restrict signals to outside, so the filter must
    workspace: workspace.WorkspaceMounts | None = None  # what sessions have if they are workspaces
    filter: seccomp.Program | None = None  # the same for all sessions unless it holds the id of its process

    def uid(self, session: int) -> int | None:
        return None if self.uids is None else self.uids[0] + session % self.uids[1]


def own_uids() -> tuple[int, int] | None:
    """Returns (first, count) of a range of user ids that no account uses, or None without root."""
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
    """Returns what a session may read: the system's programs and libraries, this interpreter and its packages."""
    wanted = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/fonts", "/etc/ld.so.cache"]
    wanted += ["/etc/localtime", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/nix/store", sys.prefix, sys.base_prefix, *site]
    return [path for path in dict.fromkeys(wanted) if path not in ("", "/") and os.path.exists(path)]


def tops(paths: list[str]) -> list[str]:
    """Returns the real paths, without those inside another one."""
    real = sorted({os.path.realpath(path) for path in paths})
    return [path for path in real if not any(path.startswith(other + "/") for other in real)]


def below_tmp(paths: list[str]) -> list[str]:
    """Returns the visible paths below /tmp, for example a virtual environment made there."""
    return [path for path in tops(paths) if path.startswith("/tmp/")]


def build_root(paths: list[str], trees: str = "") -> bool:
    """Replaces the root by a read-only one with only `paths` in it. Returns whether /proc could be mounted.

    Stops sessions from reading or changing any other file of the machine: there is no path to it, whatever their user id."""
    # Private: without it, mounts made here would appear outside.
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    outer = tops(paths)
    free = [place for place in ("/mnt", "/media", "/srv", "/opt", "/tmp", "/var") if os.path.isdir(place)]
    new = next(place for place in free if not any(f"{path}/".startswith(f"{place}/") for path in outer))
    syscalls.mount("tmpfs", new, "tmpfs", syscalls.MS_NOSUID, "mode=755,size=4m,nr_inodes=4096")
    for path in outer:
        _expose(path, new + path, _RO)
    for number, path in enumerate(below_tmp(paths)):
        _expose(path, f"{new}{BELOW_TMP}/{number}", _RO)
    for path in paths:
        if not os.path.lexists(new + path):  # a symbolic link outside, to a path that is inside
            os.makedirs(os.path.dirname(new + path), exist_ok=True)
            os.symlink(os.path.realpath(path), new + path)
    for name in ("dev", "proc", "tmp", "etc", "var", "run"):
        os.makedirs(f"{new}/{name}", exist_ok=True)
    for name in DEVICES:
        _expose(f"/dev/{name}", f"{new}/dev/{name}", syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NOEXEC)
    links = {"dev/fd": "/proc/self/fd", "dev/stdin": "/proc/self/fd/0", "dev/stdout": "/proc/self/fd/1"}
    for name, target in {**links, "dev/stderr": "/proc/self/fd/2", "dev/shm": "/tmp", "var/tmp": "/tmp"}.items():
        os.symlink(target, f"{new}/{name}")
    if trees:
        workspace.add_places(new, trees)
    for name, text in {"passwd": "nobody:x:65534:65534::/tmp:/bin/sh\n", "group": "nogroup:x:65534:\n"}.items():
        with open(f"{new}/etc/{name}", "w") as file:
            file.write(text)
    try:
        syscalls.mount("proc", f"{new}/proc", "proc", _RO | syscalls.MS_NOEXEC)
        proc = True
    except OSError:
        proc = False  # in a container that masks parts of /proc; sessions work without
    # pivot_root and not chroot: the old root is unmounted, so no descriptor or ".." leads back to it.
    os.chdir(new)
    syscalls.pivot_root(".", ".")
    syscalls.detach(".")
    os.chdir("/")
    syscalls.restrict_mount("/", syscalls.MS_RDONLY)
    return proc


def _expose(source: str, target: str, flags: int) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "x"):
            pass
    syscalls.bind(source, target, flags)


def _open_path(path: str) -> None:
    """Makes a directory and its parents, readable by every user whatever the umask."""
    made = "/"
    for part in path.strip("/").split("/"):
        made = os.path.join(made, part)
        if not os.path.isdir(made):
            os.mkdir(made)
            os.chmod(made, 0o755)


def enter_namespace(plan: IsolationPlan, session: int) -> None:
    """Runs in the forked child, which is process 1 of its PID namespace: it sees no other process and can signal none."""
    os.setsid()  # leaves the fork server's group, which kill(0, SIGKILL) would reach
    join_cgroup(plan)
    # No mounts or System V memory shared with other sessions. The cgroup namespace begins after the process has joined its
    # group: with the mount option nsdelegate, systemd's default, a process cannot join a group outside its cgroup namespace.
    private_network = syscalls.NEW_NET if plan.workspace and plan.workspace.loopback else 0
    syscalls.unshare(syscalls.NEW_NS | syscalls.NEW_IPC | syscalls.NEW_CGROUP | private_network)
    uid = plan.uid(session)
    options = plan.tmp_options if uid is None else b"%b,uid=%d,gid=%d" % (plan.tmp_options, uid, uid)
    syscalls.mount_raw(b"tmpfs", b"/tmp", b"tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, options)
    if plan.workspace:
        workspace.enter(plan.workspace, uid)
    for number, path in enumerate(plan.below_tmp):
        mounted = f"{BELOW_TMP}/{number}"
        if os.path.isdir(mounted):
            _open_path(path)
        else:
            _open_path(os.path.dirname(path))
            with open(path, "x"):
                pass
        syscalls.bind(mounted, path, _RO)
    if plan.proc:
        syscalls.mount_raw(b"proc", b"/proc", b"proc", _RO | syscalls.MS_NOEXEC, plan.proc_options)
        if plan.workspace:
            workspace.mask_proc()
    if uid is not None:
        _become(uid)
    try:
        # Stops the session from undoing the mounts above: they belong to the fork server's user namespace, and no capability
        # in the new one applies to them. The new one maps no user ids, so no process in it can become root, and RLIMIT_NPROC
        # counts the processes of this session alone.
        syscalls.unshare(syscalls.NEW_USER)
    except OSError:
        if uid is None:
            raise  # with root, the session has a user id that owns nothing, which stops the same
    os.chdir("/tmp")
    _drop_rights(plan, plan.processes)


def join_cgroup(plan: IsolationPlan) -> None:
    """Joins the session's cgroup, which bounds the memory and number of all processes of the session together."""
    for descriptor in plan.join_fds:
        os.write(descriptor, b"0")


def open_mounts(plan: IsolationPlan) -> bool:
    """Enters a mount namespace in which the directory of each session can be a tmpfs, whose size and number of files the kernel
    limits. Returns False where that is forbidden. Without root it takes a user namespace; the user stays the same in it."""

    def enter() -> None:
        uid, gid = os.geteuid(), os.getegid()
        syscalls.unshare(syscalls.NEW_NS | (syscalls.NEW_USER if uid else 0))
        if uid:
            map_user(uid, gid, uid, gid)
        syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)

    pid = os.fork()
    if pid == 0:  # a process that has tried in vain would be left in a useless namespace
        try:
            enter()
            syscalls.mount("tmpfs", plan.directory, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "size=4k")
        except BaseException:  # noqa: BLE001 - a forked child must end here, whatever happens
            os._exit(1)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        return False
    enter()
    return True


def map_user(uid: int, gid: int, inside_uid: int = 0, inside_gid: int = 0) -> None:
    """Gives this process's user an id in the user namespace that it has just made."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{inside_uid} {uid} 1"), ("gid_map", f"{inside_gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def enter_landlock(plan: IsolationPlan, session: int) -> None:
    """Runs in the forked child. Landlock hides no path, but opens only those of the rules, in this process and its children."""
    home = _enter_directory(plan, session)
    read = [*plan.read, "/dev/null"]
    landlock.restrict(read, [home], [f"/dev/{name}" for name in DEVICES])
    _drop_rights(plan, plan.processes if plan.uids else plan.user_processes + plan.processes)


def enter_process(plan: IsolationPlan, session: int) -> None:
    """Runs in the forked child. Limits resources and stops nothing else."""
    _enter_directory(plan, session)
    _limit(plan, plan.processes if plan.uids else plan.user_processes + plan.processes)
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)


def prepare(plan: IsolationPlan) -> None:
    """Does once, in the fork server, what sessions inherit: limits that do not hinder it, no groups, no new privileges."""
    plan.tmp_options = f"size={plan.disk_mb}m,nr_inodes={plan.inodes},mode=700".encode()
    if plan.uids is not None:
        os.setgroups([])
    if plan.tier != "process":
        syscalls.empty_bounding_set()
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)  # set-user-id programs run without their privileges
    common = {
        resource.RLIMIT_FSIZE: plan.disk_mb * _MB,
        resource.RLIMIT_CORE: 1,  # less than any core; with 0 the kernel still runs a `core_pattern` that is a pipe
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_NICE: 0,
        resource.RLIMIT_RTPRIO: 0,
        resource.RLIMIT_SIGPENDING: 1024,  # queued signals and timers, which all processes of a user share
        resource.RLIMIT_STACK: 8 * _MB,
    }
    for which, value in common.items():
        resource.setrlimit(which, (_allowed(which, value),) * 2)
    own = {
        resource.RLIMIT_AS: plan.base_size + plan.memory_mb * _MB,
        resource.RLIMIT_CPU: plan.cpu_s,
        resource.RLIMIT_NOFILE: plan.files,
    }
    plan.limits = [(which, _allowed(which, value)) for which, value in own.items()]
    if plan.tier != "process" and not plan.lone:
        plan.filter = _filter(plan)


def _allowed(which: int, value: int) -> int:
    hard = resource.getrlimit(which)[1]
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


def install_filter(plan: IsolationPlan) -> None:
    """Installs the system call filter. Comes last: making the output files needs a call that it refuses."""
    if plan.tier == "process":
        return
    if plan.filter is None or plan.lone:
        plan.filter = _filter(plan)
    seccomp.install(plan.filter)


def _filter(plan: IsolationPlan) -> seccomp.Program:
    counted = plan.cgroups is not None
    own = plan.workspace is not None
    if plan.tier == "namespace":
        sockets = plan.workspace is not None and plan.workspace.loopback
        return seccomp.program(shared_memory=counted, workspace=own, sockets=sockets)
    lone = os.getpid() if plan.lone else None
    return seccomp.program(lone_pid=lone, keep_session=True, shared_memory=counted, preallocate=plan.mounts, workspace=own)


def _enter_directory(plan: IsolationPlan, session: int) -> str:
    os.setsid()  # the watchdog knows a session's processes by this id, and the filter refuses another setsid
    join_cgroup(plan)
    home = f"{plan.directory}/s{session}"
    os.mkdir(home, 0o700)
    uid = plan.uid(session) if plan.tier != "process" else None
    if plan.mounts:
        options = plan.tmp_options if uid is None else b"%b,uid=%d,gid=%d" % (plan.tmp_options, uid, uid)
        syscalls.mount_raw(b"tmpfs", home.encode(), b"tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, options)
    elif uid is not None:
        os.chown(home, uid, uid)
    if uid is not None:
        _become(uid)
    os.chdir(home)
    os.environ.update(HOME=home, TMPDIR=home, MPLCONFIGDIR=home)
    if plan.workspace:
        workspace.copy_tree(plan.workspace.source(plan.workspace.trees), f"{home}/work", None)
    return home


def _become(uid: int) -> None:
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)  # changing the user made /proc/self belong to root


def _drop_rights(plan: IsolationPlan, processes: int) -> None:
    """Sets limits, drops capabilities, and dies with the fork server. The death signal is last: a change of user clears it."""
    _limit(plan, processes)
    syscalls.drop_capabilities()
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)


def _limit(plan: IsolationPlan, processes: int) -> None:
    for which, value in plan.limits:
        resource.setrlimit(which, (value, value))
    processes = _allowed(resource.RLIMIT_NPROC, processes)
    resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
