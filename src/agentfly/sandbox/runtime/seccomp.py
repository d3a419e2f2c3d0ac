"""The system call filter of a session, assembled as classic BPF.

It refuses calls by name with EPERM: those that reach into other processes, the kernel, mounts, namespaces, the network, or
memory that no limit counts. Calls newer than the table get ENOSYS, so that libraries fall back; so does `clone3`, whose flags a
filter cannot read. A few calls are refused by argument. A foreign architecture (32-bit calls on a 64-bit kernel) kills the
process.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

from .syscalls import PR_SET_SECCOMP, machine, prctl

# name: (x86_64, aarch64), -1 where the machine does not have it
DENIED: dict[str, tuple[int, int]] = {
    # mounts, namespaces, roots: would undo the read-only root, or reach files by handle
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "statmount": (457, 457), "listmount": (458, 458),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262), "fanotify_mark": (301, 263), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89),
    # other processes: their memory, descriptors and scheduling
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440),
    "process_mrelease": (448, 448), "kcmp": (312, 272), "pidfd_getfd": (438, 438), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "ioprio_set": (251, 30), "mbind": (237, 235), "set_mempolicy": (238, 237), "set_mempolicy_home_node": (450, 450),
    # the kernel: modules, clocks, keys, and interfaces with a history of exploits (bpf, io_uring, userfaultfd)
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "create_module": (174, -1), "get_kernel_syms": (177, -1),
    "query_module": (178, -1), "reboot": (169, 142), "syslog": (103, 116), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171), "sethostname": (170, 161),
    "setdomainname": (171, 162), "nfsservctl": (180, 42), "vhangup": (153, 58), "lookup_dcookie": (212, 18), "iopl": (172, -1),
    "ioperm": (173, -1), "modify_ldt": (154, -1), "uselib": (134, -1), "ustat": (136, -1), "sysfs": (139, -1),
    "_sysctl": (156, -1), "personality": (135, 92), "seccomp": (317, 277), "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446), "lsm_set_self_attr": (460, 460),
    "vmsplice": (278, 75),
    # memory and queues that no rlimit counts
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195),
    "msgget": (68, 186), "msgctl": (71, 187), "msgrcv": (70, 188), "msgsnd": (69, 189), "semget": (64, 190),
    "semctl": (66, 191),
    "semtimedop": (220, 192), "semop": (65, 193), "mq_open": (240, 180), "mq_unlink": (241, 181),
    # what sessions share with the machine: its asynchronous I/O contexts, event queues that no limit counts, all its dirty
    # pages, and the cache of files that others read
    "io_setup": (206, 0), "io_destroy": (207, 1), "io_submit": (209, 2), "io_cancel": (210, 3), "io_getevents": (208, 4),
    "io_pgetevents": (333, 292), "inotify_init": (253, -1), "inotify_init1": (294, 26), "inotify_add_watch": (254, 27),
    "inotify_rm_watch": (255, 28), "sync": (162, 81), "syncfs": (306, 267), "cachestat": (451, 451),
    # the network: a session has pipes and socket pairs only, unless its network namespace is private
    "bind": (49, 200), "listen": (50, 201), "accept": (43, 202), "accept4": (288, 242), "connect": (42, 203),
}  # fmt: skip
_NETWORK = ("bind", "listen", "accept", "accept4", "connect")
# Without a private root: Landlock does not check these calls, and they would work on every file that the user owns.
METADATA: dict[str, tuple[int, int]] = {
    "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, -1),
    "fchown": (93, 55),
    "lchown": (94, -1), "fchownat": (260, 54), "utime": (132, -1), "utimes": (235, -1), "futimesat": (261, -1),
    "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16), "mincore": (27, 232),
}  # fmt: skip
CLONE3 = 435
NEWEST = 462
_ARGUMENT_CALLS = {
    "clone": (56, 220), "socketpair": (53, 199), "ioctl": (16, 29), "kill": (62, 129), "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "setsid": (112, 157),
    "setpgid": (109, 154), "prlimit64": (302, 261), "setpriority": (141, 140), "sched_setaffinity": (203, 122),
    "mmap": (9, 222), "fcntl": (72, 25), "fallocate": (285, 47), "setsockopt": (54, 208),
    "flock": (73, 32), "fadvise64": (221, 223), "preadv2": (327, 286), "socket": (41, 198),
}  # fmt: skip
_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS, _EOPNOTSUPP = 1, 38, 95
_LD, _JA, _JEQ, _JGE, _JSET, _AND, _RET = 0x20, 0x05, 0x15, 0x35, 0x45, 0x54, 0x06
_CLONE_REFUSED = 0x7E020000 | 0x8000  # every CLONE_NEW* and CLONE_PARENT
_CLONE_FILES, _CLONE_THREAD = 0x400, 0x10000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_FIOSETOWN, _SIOCSPGRP = 0x8901, 0x8902
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX = 8, 10, 15
_F_SETLEASE, _F_NOTIFY = 1024, 1026
_SO_SNDBUF, _SO_RCVBUF = 7, 8
_FADV_DONTNEED, _RWF_NOWAIT = 4, 8
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 0x1, 0x20, 0x40000


class Program(ctypes.Structure):
    """What the kernel takes: the number of instructions and their address."""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def _op(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("<HBBI", code, yes, no, value)


def _argument(index: int) -> bytes:
    return _op(_LD, 16 + 8 * index)


def _refuse_values(*values: int, place: int = 1) -> list[bytes]:
    """Returns the rule of a call whose argument at this place must be none of these."""
    tests = [_op(_JEQ, value, len(values) - number, 0) for number, value in enumerate(values)]
    return [_argument(place), *tests, _op(_RET, _ALLOW), _op(_RET, _ERRNO | _EPERM)]


def _tree(pieces: list[tuple[int, list[bytes]]]) -> list[bytes]:
    """Returns a binary search over sorted pieces (first call number, instructions from there on) for the loaded number.

    The kernel runs a new filter once per system call that exists, so a linear chain would cost the square of their number."""
    if len(pieces) == 1:
        return pieces[0][1]
    half = len(pieces) // 2
    below, above = _tree(pieces[:half]), _tree(pieces[half:])
    if len(below) < 256:
        return [_op(_JGE, pieces[half][0], len(below), 0), *below, *above]
    return [_op(_JGE, pieces[half][0], 0, 1), _op(_JA, len(below)), *below, *above]


def _rules_of_private_network() -> dict[str, list[bytes]]:
    """Allows stream and datagram sockets of the families unix, IPv4 and IPv6."""
    refuse, allow = _op(_RET, _ERRNO | _EPERM), _op(_RET, _ALLOW)
    kinds = [_argument(1), _op(_AND, 0xF), _op(_JEQ, 1, 1, 0), _op(_JEQ, 2, 0, 1), allow, refuse]
    families = [_op(_JEQ, 1, 3, 0), _op(_JEQ, 2, 2, 0), _op(_JEQ, 10, 1, 0), refuse]
    return {"socket": [_argument(0), *families, *kinds], "socketpair": [_argument(0), _op(_JEQ, 1, 1, 0), refuse, *kinds]}


def assemble(
    arch: str,
    lone_pid: int | None = None,
    keep_session: bool = False,
    shared_memory: bool = True,
    preallocate: bool = True,
    workspace: bool = False,
    sockets: bool = False,
) -> bytes:
    """Returns the filter as bytes.

    `lone_pid` allows signals to this process only; needed where neither a PID namespace nor a Landlock scope stops signals to
    others. `keep_session` is for the tier without namespaces. It refuses setsid and setpgid, because the watchdog knows a
    session's processes by that id; limits and priority of other processes; signals by way of a descriptor's owner; and modes,
    owners and times of files. `shared_memory=False` refuses anonymous shared memory, which stays allocated when no process has
    it in its resident set, so only a cgroup can count it, and larger socket buffers. `preallocate=False` refuses fallocate,
    which fills a disk faster than a watchdog can look; the C library then writes zeros. `workspace` refuses to change limits
    and CPUs of other processes: the first process of a workspace serves the trainer. `sockets` is for sessions with a private
    network namespace."""
    column = 0 if arch == "x86_64" else 1
    refuse, allow, unknown = _op(_RET, _ERRNO | _EPERM), _op(_RET, _ALLOW), _op(_RET, _ERRNO | _ENOSYS)
    rules: dict[str, list[bytes]] = {
        # A thread that unshares its descriptor table could keep files open that the process's list in /proc does not show.
        "clone": [
            _argument(0), _op(_JSET, _CLONE_REFUSED, 3, 0), _op(_JSET, _CLONE_THREAD, 0, 1), _op(_JSET, _CLONE_FILES, 0, 1),
            allow, refuse,
        ],
        "ioctl": _refuse_values(_TIOCSTI, _TIOCLINUX),
        # A lease or a lock on a file that can be read would make programs of the machine wait. A filter cannot tell whose file
        # it is; with ENOSYS libraries fall back to other locks, as `SessionProcess` does.
        "fcntl": _refuse_values(_F_SETLEASE, _F_NOTIFY),
        "flock": [unknown],
        # What the machine has read stays in its cache, and a session cannot ask what is there.
        "fadvise64": _refuse_values(_FADV_DONTNEED, place=3),
        "preadv2": [_argument(5), _op(_JSET, _RWF_NOWAIT, 0, 1), refuse, allow],
        # Stream pairs only: a datagram socket of a pair could still send to an abstract socket outside.
        "socketpair": [
            _argument(0), _op(_JEQ, 1, 0, 3), _argument(1), _op(_AND, 0xF), _op(_JEQ, 1, 1, 0), refuse, allow,
        ],
        # Huge pages are reserved by the administrator, and neither the resident set nor a memory cgroup counts them.
        "mmap": [_argument(3), _op(_JSET, _MAP_HUGETLB, 0, 1), refuse, allow],
        "socket": [refuse],
    }  # fmt: skip
    if not shared_memory:
        rules["mmap"] = [
            _argument(3), _op(_JSET, _MAP_HUGETLB, 2, 0), _op(_JSET, _MAP_ANONYMOUS, 0, 2), _op(_JSET, _MAP_SHARED, 0, 1),
            refuse, allow,
        ]  # fmt: skip
        rules["setsockopt"] = _refuse_values(_SO_SNDBUF, _SO_RCVBUF, place=2)
    if not preallocate:
        rules["fallocate"] = [_op(_RET, _ERRNO | _EOPNOTSUPP)]
    if sockets:
        rules |= _rules_of_private_network()
    only_itself = [_argument(0), _op(_JEQ, 0, 1, 0), refuse, allow]
    if workspace:
        rules |= {"prlimit64": only_itself, "sched_setaffinity": only_itself, "setpriority": [refuse]}
    if keep_session:
        rules |= {"setsid": [refuse], "setpgid": [refuse], "setpriority": [refuse]}
        rules |= {"prlimit64": only_itself, "sched_setaffinity": only_itself}
        rules["fcntl"] = _refuse_values(_F_SETLEASE, _F_NOTIFY, _F_SETOWN, _F_SETSIG, _F_SETOWN_EX)
        rules["ioctl"] = _refuse_values(_TIOCSTI, _TIOCLINUX, _FIOSETOWN, _SIOCSPGRP)
    if lone_pid is not None:
        for name in ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"):
            rules[name] = [_argument(0), _op(_JEQ, lone_pid, 1, 0), refuse, allow]
        rules |= {"tkill": [refuse], "pidfd_send_signal": [refuse]}
    verdicts = {CLONE3: [unknown]}
    verdicts |= {_ARGUMENT_CALLS[name][column]: rule for name, rule in rules.items()}
    denied = [numbers for name, numbers in DENIED.items() if not (sockets and name in _NETWORK)]
    for numbers in (*denied, *(METADATA.values() if keep_session else ())):
        verdicts[numbers[column]] = [refuse]
    pieces: list[tuple[int, list[bytes]]] = []
    for call in range(NEWEST + 1):
        verdict = verdicts.get(call, [allow])
        if not pieces or pieces[-1][1] != verdict:
            pieces.append((call, verdict))
    pieces.append((NEWEST + 1, [unknown]))  # x32 calls have a high bit set, so they get ENOSYS too
    head = [_op(_LD, 4), _op(_JEQ, _ARCH[arch], 1, 0), _op(_RET, _KILL), _op(_LD, 0)]
    return b"".join(head + _tree(pieces))


def program(**options: Any) -> Program:
    """Returns the filter of this machine. The options are those of `assemble`."""
    code = assemble(machine(), **options)
    return Program(len(code) // 8, code)


def install(filter_program: Program) -> None:
    """Installs the filter in this process and all that it starts, irrevocably. Needs PR_SET_NO_NEW_PRIVS."""
    prctl(PR_SET_SECCOMP, 2, ctypes.addressof(filter_program))
