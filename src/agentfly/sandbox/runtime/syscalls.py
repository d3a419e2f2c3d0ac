"""The system calls of the sandbox, through ctypes: no external program, no compiled extension.

Every function either does what its name says or raises OSError with the name of the call. Linux on x86_64 and aarch64 only.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform

NEW_NS, NEW_CGROUP, NEW_UTS, NEW_IPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEW_USER, NEW_PID, NEW_NET = 0x10000000, 0x20000000, 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE, _AT_EMPTY_PATH = -100, 0x8000, 0x1000
_ATTR_IDMAP = 0x100000

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_SECUREBITS, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 28, 36, 38

# name: (x86_64, aarch64)
_NUMBERS = {
    "pivot_root": (155, 41),
    "sched_setattr": (314, 274),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "mount_setattr": (442, 442),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
}
# PyDLL keeps the interpreter's lock: no call here blocks, and a forked child touches fewer pages.
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.unshare.argtypes = (ctypes.c_int,)
_libc.setns.argtypes = (ctypes.c_int, ctypes.c_int)
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
_libc.prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)
_libc.fork.argtypes = ()
_libc.capset.argtypes = (ctypes.c_void_p, ctypes.c_void_p)


@functools.cache
def machine() -> str:
    """Returns `x86_64` or `aarch64`. Raises OSError on any other machine."""
    name = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    if platform.system() != "Linux" or name not in ("x86_64", "aarch64"):
        raise OSError(f"the sandbox needs Linux on x86_64 or aarch64, this is {platform.system()} on {name}")
    return name


def number(name: str) -> int:
    return _NUMBERS[name][0 if machine() == "x86_64" else 1]


def _check(name: str, result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def syscall(name: str, *arguments: object) -> int:
    wide = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return _check(name, int(_libc.syscall(ctypes.c_long(number(name)), *wide)))


def unshare(flags: int) -> None:
    _check("unshare", _libc.unshare(flags))


def setns(fd: int, kind: int) -> None:
    _check("setns", _libc.setns(fd, kind))


def fork() -> int:
    """Forks without the hooks that `os.fork` runs for modules. They touch a hundred pages of the child and repair what threads
    break (locks, the list of threads), and the fork server has one thread. It runs the few that it needs itself."""
    return _check("fork", _libc.fork())


def sethostname(name: str) -> None:
    raw = name.encode()
    _check("sethostname", _libc.sethostname(ctypes.c_char_p(raw), ctypes.c_size_t(len(raw))))


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [os.fsencode(text) if text is not None else None for text in (source, target, kind, options)]
    mount_raw(texts[0], texts[1] or b"", texts[2], flags, texts[3])


def mount_raw(source: bytes | None, target: bytes, kind: bytes | None, flags: int, options: bytes | None = None) -> None:
    if _libc.mount(source, target, kind, flags, options) < 0:
        _check(f"mount {(kind or b'').decode()} on {os.fsdecode(target)}", -1)


def detach(target: str) -> None:
    _check(f"umount {target}", _libc.umount2(ctypes.c_char_p(os.fsencode(target)), ctypes.c_int(MNT_DETACH)))


def pivot_root(new: str, old: str) -> None:
    syscall("pivot_root", ctypes.c_char_p(os.fsencode(new)), ctypes.c_char_p(os.fsencode(old)))


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns", ctypes.c_uint64),
    )


def restrict_mount(target: str, flags: int) -> None:
    """Adds MS_RDONLY, MS_NOSUID, MS_NODEV or MS_NOEXEC to a mount and to all below it (before Linux 5.12: to it alone)."""
    attributes = _MountAttributes(set=flags)  # the four flags have the same bits in both interfaces
    try:
        syscall("mount_setattr", _AT_FDCWD, ctypes.c_char_p(os.fsencode(target)), _AT_RECURSIVE, ctypes.byref(attributes), 32)
    except OSError as error:
        if error.errno != 38:
            raise
        present = os.statvfs(target).f_flag & (MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC | 1024 | 2048)
        present = present & 15 | (1 << 10 if present & 1024 else 0) | (1 << 11 if present & 2048 else 0)
        mount(None, target, None, MS_REMOUNT | MS_BIND | present | flags)


def bind(source: str, target: str, flags: int) -> None:
    mount(source, target, None, MS_BIND | MS_REC)
    restrict_mount(target, flags)


def bind_as(source: str, target: str, userns: int) -> None:
    """Binds a folder with other owners: `userns` is a descriptor of the user namespace that maps the ids on disk to them."""
    fd = syscall("open_tree", _AT_FDCWD, ctypes.c_char_p(os.fsencode(source)), 1 | os.O_CLOEXEC)
    try:
        attributes = _MountAttributes(set=_ATTR_IDMAP, userns=userns)
        syscall("mount_setattr", fd, ctypes.c_char_p(b""), _AT_EMPTY_PATH, ctypes.byref(attributes), 32)
        syscall("move_mount", fd, ctypes.c_char_p(b""), _AT_FDCWD, ctypes.c_char_p(os.fsencode(target)), 4)
    finally:
        os.close(fd)


def prctl(option: int, first: int = 0, second: object = None) -> None:
    if _libc.prctl(option, first, second, 0, 0) < 0:
        _check(f"prctl({option})", -1)


class _Schedule(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_uint32), ("policy", ctypes.c_uint32), ("flags", ctypes.c_uint64), ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32), ("runtime", ctypes.c_uint64), ("deadline", ctypes.c_uint64), ("period", ctypes.c_uint64),
    )  # fmt: skip


def set_slice(pid: int, nanoseconds: int) -> None:
    """Sets how long a process runs at a stretch, at the same share of the CPU. From Linux 6.12 on, a process that wakes with a
    shorter slice preempts one with a longer slice, so a call to one session need not wait for another session that spins."""
    attributes = _Schedule(48, 0, 0, os.getpriority(os.PRIO_PROCESS, pid), 0, nanoseconds, 0, 0)
    syscall("sched_setattr", pid, ctypes.byref(attributes), 0)


class _CapHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


_NO_CAPS = (_CapHeader(0x20080522, 0), (ctypes.c_uint32 * 6)())
_NO_CAPS_AT = ctypes.addressof(_NO_CAPS[0]), ctypes.addressof(_NO_CAPS[1])


def empty_bounding_set() -> None:
    """Stops executed programs from gaining capabilities. Without the right to do this, there are none to drop."""
    for capability in range(last_capability() + 1):
        if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0 and ctypes.get_errno() == errno.EPERM:
            return


def drop_capabilities() -> None:
    """Empties all capability sets, and stops uid 0 from refilling them. A new user namespace has a full bounding set;
    PR_SET_NO_NEW_PRIVS makes it useless, because an executed program gains nothing that its caller lacks."""
    if _libc.prctl(PR_SET_SECUREBITS, 0x2F, 0, 0, 0) < 0 and ctypes.get_errno() != errno.EPERM:
        _check("prctl(PR_SET_SECUREBITS)", -1)  # noroot, no setuid fixup, keep-caps locked off; EPERM: has no capability
    if _libc.capset(*_NO_CAPS_AT) < 0:
        _check("capset", -1)


def last_capability() -> int:
    try:
        with open("/proc/sys/kernel/cap_last_cap") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 40
