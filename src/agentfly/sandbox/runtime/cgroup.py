"""A control group per session where that is allowed: cgroup v2, or the memory and pids hierarchies of v1.

`find` makes one parent group; a session's group is a directory in it with a limit of memory and of processes. The parents are
held by descriptor, so they stay reachable after the fork server has left the machine's file system.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass

_MB = 1 << 20


def _write(path: str, text: str, dir_fd: int | None = None) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


@dataclass
class Cgroups:
    """`parents` maps a hierarchy ("v2", "memory", "pids") to path and descriptor of the sandbox's own group in it."""

    parents: dict[str, tuple[str, int]]
    memory_mb: int
    processes: int

    def settings(self, kind: str) -> list[tuple[str, str, bool]]:
        """Returns (file, value, required). Limits of swap are optional: not every kernel counts it."""
        memory, processes = str(self.memory_mb * _MB), str(self.processes + 1)
        if kind == "memory":  # in this order: the kernel refuses a sum with swap below the limit of memory
            more = ("memory.memsw.limit_in_bytes", "memory.kmem.tcp.limit_in_bytes")  # v1 counts the sockets of a network apart
            return [("memory.limit_in_bytes", memory, True), *((file, memory, False) for file in more)]
        if kind == "pids":
            return [("pids.max", processes, True)]
        swap = [("memory.swap.max", "0", False), ("memory.oom.group", "1", False)]
        return [("memory.max", memory, True), *swap, ("pids.max", processes, True)]

    def make(self, name: str) -> tuple[int, ...]:
        """Makes a group with its limits. Returns descriptors of its process lists: a process that writes "0" to them joins."""
        join_fds: list[int] = []
        try:
            for kind, (_, fd) in self.parents.items():
                os.mkdir(name, dir_fd=fd)
                for file, value, needed in self.settings(kind):
                    with contextlib.nullcontext() if needed else contextlib.suppress(OSError):
                        _write(f"{name}/{file}", value, fd)
                join_fds.append(os.open(f"{name}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC, dir_fd=fd))
        except OSError:
            for descriptor in join_fds:
                os.close(descriptor)
            self.remove(name)
            raise
        return tuple(join_fds)

    def ran_out_of_memory(self, name: str) -> bool:
        """Whether the OOM killer ended a process of the group."""
        for kind, file in (("v2", "memory.events"), ("memory", "memory.oom_control")):
            if kind in self.parents:
                fd = os.open(f"{name}/{file}", os.O_RDONLY, dir_fd=self.parents[kind][1])
                try:
                    match = re.search(rb"^oom_kill (\d+)", os.read(fd, 4096), re.MULTILINE)
                finally:
                    os.close(fd)
                return match is not None and int(match[1]) > 0
        return False

    def remove(self, name: str) -> bool:
        """Returns False while the kernel still counts a process in the group: try again later."""
        for _, fd in self.parents.values():
            try:
                os.rmdir(name, dir_fd=fd)
            except FileNotFoundError:
                continue
            except OSError:
                return False
        return True

    def remove_all(self) -> bool:
        clean = True
        for path, _ in self.parents.values():
            clean &= _remove_tree(path)
        return clean

    def close(self) -> None:
        for _, fd in self.parents.values():
            os.close(fd)


def _remove_tree(path: str) -> bool:
    try:
        for entry in os.scandir(path):
            if entry.is_dir():
                os.rmdir(entry.path)
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _own_groups() -> dict[str, str]:
    """Maps each hierarchy to the directory of the group that this process is in."""
    mounted: dict[str, tuple[str, str]] = {}
    with open("/proc/self/mountinfo") as file:
        for line in file:
            left, _, right = line.partition(" - ")
            root, point = left.split()[3:5]
            kind, _, options = right.split()[:3]
            if kind == "cgroup2":
                mounted[""] = root, point
            elif kind == "cgroup":
                for controller in options.split(","):
                    mounted[controller] = root, point
    groups = {}
    with open("/proc/self/cgroup") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            for controller in controllers.split(","):
                if controller in mounted:
                    root, point = mounted[controller]
                    inner = "/" + os.path.relpath(path, root) if path.startswith(root) else path
                    groups[controller or "v2"] = os.path.normpath(point + "/" + inner)
    return groups


def _remove_stale(parent: str) -> None:
    """Removes the empty groups of fork servers whose supervisor was killed before it could clean up."""
    for name in os.listdir(parent):
        owner = re.fullmatch(r"agentfly-(\d+)", name)
        if owner and not os.path.exists(f"/proc/{owner[1]}"):
            _remove_tree(f"{parent}/{name}")


def _try_v2(own: str) -> str | None:
    """Makes a group where the controllers are already enabled for children and this user may write; returns its path or None.

    A group that holds processes cannot enable controllers for children, so the place is usually above this process's own
    group: one that was delegated to this user, or the root."""
    place = own
    while os.path.exists(f"{place}/cgroup.controllers"):  # up to the root of the hierarchy
        try:
            with open(f"{place}/cgroup.subtree_control") as file:
                enabled = {"memory", "pids"} <= set(file.read().split())
            if enabled:
                path = f"{place}/agentfly-{os.getpid()}"
                _remove_stale(place)
                os.mkdir(path)
                try:
                    _write(f"{path}/cgroup.subtree_control", "+memory +pids")
                except OSError:
                    os.rmdir(path)
                    raise
                return path
        except OSError:
            if place == own and not os.access(place, os.W_OK):
                return None
        place = os.path.dirname(place)
    return None


def find(memory_mb: int, processes: int) -> Cgroups | None:
    """Returns groups that work, which a probe process has shown by joining one; None where they are not allowed."""
    paths: dict[str, str] = {}
    try:
        own = _own_groups()
        if "memory" in own and "pids" in own:
            for kind in ("memory", "pids"):
                path = f"{own[kind]}/agentfly-{os.getpid()}"
                _remove_stale(own[kind])
                os.mkdir(path)
                paths[kind] = path
        elif "v2" in own and (path_v2 := _try_v2(own["v2"])):
            paths["v2"] = path_v2
        if not paths:
            return None
        groups = Cgroups(
            {kind: (path, os.open(path, os.O_RDONLY | os.O_CLOEXEC)) for kind, path in paths.items()}, memory_mb, processes
        )
        join_fds = groups.make("probe")
        pid = os.fork()
        if pid == 0:
            try:
                for descriptor in join_fds:
                    os.write(descriptor, b"0")
            except BaseException:  # noqa: BLE001 - a forked child must end here, whatever happens
                os._exit(1)
            os._exit(0)
        joined = os.waitpid(pid, 0)[1] == 0
        for descriptor in join_fds:
            os.close(descriptor)
        groups.remove("probe")
        if joined:
            return groups
        groups.close()
    except (OSError, ValueError):
        paths = dict(paths)
    for path in paths.values():
        _remove_tree(path)
    return None
