"""Landlock: a process gives up all of the file system but a few paths, without privileges and without namespaces.

`restrict` is final and holds for all children. From ABI 4 on it also refuses network ports (the system call filter refuses
sockets anyway), and from ABI 6 on signals and abstract sockets of processes outside.
"""

from __future__ import annotations

import ctypes
import os
import stat

from .syscalls import syscall

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
_FILE_ONLY = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14  # and TRUNCATE
READ = EXECUTE | READ_FILE | READ_DIR
_NETWORK = 3
_SCOPES = 3  # abstract sockets, signals
SCOPED_ABI = 6


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def abi() -> int:
    """Returns the version of Landlock in this kernel, 0 without it."""
    try:
        return syscall("landlock_create_ruleset", None, 0, 1)
    except OSError:
        return 0


def _all_rights(version: int) -> int:
    rights = (1 << 13) - 1
    for since, bit in ((2, 13), (3, 14), (5, 15)):  # REFER, TRUNCATE, IOCTL_DEV
        if version >= since:
            rights |= 1 << bit
    return rights


def restrict(read: list[str], write: list[str], devices: list[str]) -> None:
    """Allows reading and executing below `read`, everything below `write`, and reading and writing `devices`; nothing else."""
    version = abi()
    handled = _all_rights(version)
    rules = _Ruleset(handled, _NETWORK if version >= 4 else 0, _SCOPES if version >= SCOPED_ABI else 0)
    size = 24 if version >= SCOPED_ABI else 16 if version >= 4 else 8
    ruleset = syscall("landlock_create_ruleset", ctypes.byref(rules), size, 0)
    try:
        for paths, rights in ((read, READ), (write, handled), (devices, READ_FILE | WRITE_FILE)):
            for path in paths:
                _allow(ruleset, path, rights & handled)
        syscall("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # a missing path needs no rule
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _FILE_ONLY
        rule = _Beneath(rights, fd)
        syscall("landlock_add_rule", ruleset, 1, ctypes.byref(rule), 0)
    finally:
        os.close(fd)
