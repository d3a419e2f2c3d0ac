"""What a session uses, read from /proc and from its folder: memory, descriptors and files, whatever it does to hide them.

Each function works through a descriptor of /proc or of a folder, and takes no path that the session could make too long.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from dataclasses import dataclass, field

from ..interpreter.removal import open_folder

_PAGE = os.sysconf("SC_PAGE_SIZE")
_MB = 1 << 20
SOCKET_BYTES = 212_992
"""What the kernel holds at most in the buffer of one socket by default. The filter refuses larger buffers."""


MAX_MAPS = 4 << 20
"""Bytes of the list of a process's mappings. An interpreter has some hundred mappings, of 100 bytes each in the list."""


class Hidden(Exception):
    """A process that lives does not let its descriptors or mappings be read, as after executing a file without read rights."""


def cpu_ns(pid: int) -> int:
    """Returns the CPU time of all threads of a process, -1 if it is gone. Costs one system call."""
    try:
        return time.clock_gettime_ns((~pid << 3) | 2)
    except OSError:
        return -1


class Proc:
    """Reads /proc through a descriptor, which stays valid when the root changes."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def read(self, path: str) -> bytes:
        """Returns a short file."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            return os.read(fd, 1 << 14)
        finally:
            os.close(fd)

    def pids(self) -> list[int]:
        return [int(name) for name in os.listdir(self.fd) if name.isdigit()]

    def state(self, pid: int) -> bytes:
        """Returns the letter of the process's state, such as T for stopped; empty if it is gone."""
        try:
            return self.read(f"{pid}/stat").rpartition(b")")[2].split()[0]
        except (OSError, IndexError):
            return b""

    def session_of(self, pid: int) -> int:
        """Returns the id of the process's session in the kernel's sense (setsid)."""
        return int(self.read(f"{pid}/stat").rpartition(b")")[2].split()[3])

    def pid_namespace(self, pid: int) -> str:
        return os.readlink(f"{pid}/ns/pid", dir_fd=self.fd)

    def private_mb(self, pid: int) -> float:
        """Returns the resident memory of a process without files and shared memory. Pages shared after a fork count in full."""
        _, resident, shared, *_ = map(int, self.read(f"{pid}/statm").split())
        return (resident - shared) * _PAGE / _MB

    def proportional_mb(self, pid: int) -> float:
        """Returns the memory of a process in which a page shared by n processes counts as 1/n. Dearer than `private_mb`."""
        text = self.read(f"{pid}/smaps_rollup")
        return sum(int(kib) for kib in re.findall(rb"^(?:Pss_Anon|Pss_Shmem|SwapPss):\s+(\d+)", text, re.MULTILINE)) / 1024

    def is_alive(self, pid: int) -> bool:
        """Whether the process has memory: one that has ended and waits to be reaped has none."""
        try:
            return not self.read(f"{pid}/statm").startswith(b"0 ")
        except OSError:
            return False

    def mappings(self, pid: int) -> list[bytes]:
        """Returns the lines of maps that name a deleted file. Raises Hidden, also if there are too many mappings to read."""
        text = b""
        try:
            with open(os.open(f"{pid}/maps", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.fd), "rb", buffering=0) as file:
                while part := file.read(1 << 16):
                    text += part
                    if len(text) > MAX_MAPS:
                        raise Hidden
        except OSError:
            if self.is_alive(pid):
                raise Hidden from None
        return [line for line in text.splitlines() if line.endswith(b" (deleted)")]

    def descriptors(self, pid: int, seen: SessionFiles) -> None:
        """Adds the descriptors of a process to `seen`. Raises Hidden."""
        try:
            names = os.listdir(fd := os.open(f"{pid}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd))
        except OSError:
            if self.is_alive(pid):
                raise Hidden from None
            return
        try:
            for name in names:
                with contextlib.suppress(OSError):  # closed meanwhile
                    status = os.stat(name, dir_fd=fd)
                    if stat.S_ISSOCK(status.st_mode):
                        seen.sockets.add(status.st_ino)
                        if seen.device >= 0:
                            seen.in_flight |= self.has_files_in_flight(f"{pid}/fdinfo/{name}")
                    elif stat.S_ISREG(status.st_mode) and status.st_nlink == 0 and status.st_dev == seen.device:
                        seen.add(status)
        finally:
            os.close(fd)

    def has_files_in_flight(self, path: str) -> bool:
        """Whether descriptors wait in a socket: the files behind them are open, but no process has them."""
        match = re.search(rb"^scm_fds:\s+(\d+)", self.read(path), re.MULTILINE)
        return match is not None and int(match[1]) > 0


@dataclass
class SessionFiles:
    """The files of a session: those in its folder, and those that it has deleted but keeps open or mapped."""

    device: int = -1  # of the folder; -1 if only sockets matter
    size: int = 0
    count: int = 0  # of names in the folder
    inodes: set[int] = field(default_factory=set)  # the bytes of a file count once, however many links and descriptors it has
    sockets: set[int] = field(default_factory=set)
    in_flight: bool = False

    def add(self, found: os.stat_result) -> None:
        if found.st_ino not in self.inodes:
            self.inodes.add(found.st_ino)
            self.size += found.st_blocks * 512

    def add_mapped(self, lines: list[bytes], home: bytes, largest: int) -> None:
        """Adds deleted files that are mapped but not open. Their size cannot be read: each counts as the largest possible."""
        for line in lines:
            _, _, _, _, inode, path = line.split(maxsplit=5)
            if path.startswith(home) and int(inode) not in self.inodes:
                self.inodes.add(int(inode))
                self.size += largest

    def add_folder(self, home: str, max_size: int, max_count: int) -> None:
        """Walks the folder and stops when a limit is exceeded. The session must be stopped: the way up is the entry `..`.

        Folders without rights get them; the depth of folders is bounded by neither the stack, nor PATH_MAX, nor descriptors."""
        folder = open_folder(home, None)
        try:
            self.device = os.fstat(folder).st_dev
            levels = [self._scan(folder, max_count)]
            while levels and self.size <= max_size and self.count <= max_count:
                if levels[-1]:
                    inner = open_folder(levels[-1].pop(), folder)
                    levels.append(self._scan(inner, max_count))
                else:
                    levels.pop()
                    if not levels:
                        return
                    inner = os.open("..", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
                os.close(folder)
                folder = inner
        finally:
            os.close(folder)

    def _scan(self, folder: int, max_count: int) -> list[str]:
        """Adds the entries of one folder and returns the names of its folders."""
        inner = []
        with os.scandir(folder) as entries:
            for entry in entries:
                self.count += 1
                self.add(entry.stat(follow_symlinks=False))
                if entry.is_dir(follow_symlinks=False):
                    inner.append(entry.name)
                if self.count > max_count:
                    break
        return inner
