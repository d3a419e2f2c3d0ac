"""Adds up what no limit of the kernel adds up: memory and number of all processes of a session, and its files on disk.

Needed without cgroups, and for disk use in the tiers without a private tmpfs. It reads /proc through a descriptor that the fork
server opened before it left the machine's file system.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping

_PAGE = os.sysconf("SC_PAGE_SIZE")
_MB = 1 << 20


class Watchdog:
    def __init__(self, proc_fd: int | None, memory_mb: int, processes: int, own_namespaces: bool) -> None:
        self.proc_fd = proc_fd
        self.memory_mb, self.processes = memory_mb, processes
        self.own_namespaces = own_namespaces

    def read(self, path: str) -> bytes:
        assert self.proc_fd is not None
        fd = os.open(path, os.O_RDONLY, dir_fd=self.proc_fd)
        try:
            return os.read(fd, 4096)
        finally:
            os.close(fd)

    def pids(self) -> list[int]:
        return [int(name) for name in os.listdir(self.proc_fd) if name.isdigit()] if self.proc_fd is not None else []

    def members(self, leaders: Iterable[int]) -> dict[int, list[int]]:
        """Maps each leader to all visible processes of its session, the leader first."""
        found = {leader: [leader] for leader in leaders}
        others = [pid for pid in self.pids() if pid not in found]
        if not self.own_namespaces:
            for pid in others:
                with contextlib.suppress(OSError, ValueError, IndexError):  # the process may have ended meanwhile
                    session = int(self.read(f"{pid}/stat").rpartition(b")")[2].split()[3])
                    if session in found:
                        found[session].append(pid)
            return found
        spaces: dict[str, int] = {}
        if others:  # without other processes there is nothing to attribute
            for leader in found:
                with contextlib.suppress(OSError):
                    spaces[os.readlink(f"{leader}/ns/pid", dir_fd=self.proc_fd)] = leader
        for pid in others:
            with contextlib.suppress(OSError):
                owner = spaces.get(os.readlink(f"{pid}/ns/pid", dir_fd=self.proc_fd))
                if owner is not None:
                    found[owner].append(pid)
        return found

    def resident_mb(self, pid: int) -> float:
        """Returns the memory of this process that it does not share with the fork server."""
        try:
            _, resident, shared, *_ = map(int, self.read(f"{pid}/statm").split())
        except (OSError, ValueError):
            return 0.0
        return (resident - shared) * _PAGE / _MB

    def offenders(self, leaders: Mapping[int, int], base_mb: float) -> dict[int, str]:
        """Maps the ids of sessions to end to the reason. `leaders` maps pids to session ids; a new session has `base_mb`."""
        found = {}
        for leader, pids in self.members(leaders).items():
            if len(pids) == 1 and self.own_namespaces:
                continue  # RLIMIT_AS bounds a single process
            used = sum(max(0.0, self.resident_mb(pid) - base_mb) for pid in pids)
            if used > self.memory_mb:
                found[leaders[leader]] = f"its processes used more than {self.memory_mb} MB together"
            elif len(pids) > self.processes + 1:
                found[leaders[leader]] = f"it started more than {self.processes} processes"
        return found


def disk_use(directory: str) -> tuple[int, int]:
    """Returns bytes and entries below a directory, without following links."""
    size = count = 0
    stack = [directory]
    while stack:
        try:
            with os.scandir(stack.pop()) as entries:
                for entry in entries:
                    count += 1
                    with contextlib.suppress(OSError):
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            stack.append(entry.path)
        except OSError:
            continue  # removed meanwhile
    return size, count
