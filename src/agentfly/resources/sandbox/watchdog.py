"""Adds up what no limit of the kernel adds up: the memory and number of all processes of a session, and its files on disk.

Used where there is no cgroup (processes of one session together) and in the tiers without a private tmpfs (disk). It reads
/proc through a descriptor, which the server opened before it left the host's file system. It says which sessions to end,
and why.
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
        """Leader -> all processes of its session that can be seen, the leader first."""
        found = {leader: [leader] for leader in leaders}
        others = [pid for pid in self.pids() if pid not in found]
        if not self.own_namespaces:
            for pid in others:
                with contextlib.suppress(OSError, ValueError, IndexError):  # it may have ended meanwhile
                    session = int(self.read(f"{pid}/stat").rpartition(b")")[2].split()[3])
                    if session in found:
                        found[session].append(pid)
            return found
        spaces: dict[str, int] = {}
        if others:  # only then is it worth asking which namespace is whose
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
        """Pages that are this process's own: what it shares with the server is not its fault."""
        try:
            _, resident, shared, *_ = map(int, self.read(f"{pid}/statm").split())
        except (OSError, ValueError):
            return 0.0
        return (resident - shared) * _PAGE / _MB

    def offenders(self, leaders: Mapping[int, int], base_mb: float) -> dict[int, str]:
        """Session id -> the reason to end it. `leaders`: pid -> session id; `base_mb`: what a fresh session starts with."""
        guilty = {}
        for leader, pids in self.members(leaders).items():
            if len(pids) == 1 and self.own_namespaces:
                continue  # RLIMIT_AS holds for one process
            used = sum(max(0.0, self.resident_mb(pid) - base_mb) for pid in pids)
            if used > self.memory_mb:
                guilty[leaders[leader]] = f"its processes used more than {self.memory_mb} MB together"
            elif len(pids) > self.processes + 1:
                guilty[leaders[leader]] = f"it started more than {self.processes} processes"
        return guilty


def disk_use(directory: str) -> tuple[int, int]:
    """Bytes and entries below a directory, links not followed."""
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
            continue  # removed while we looked
    return size, count
