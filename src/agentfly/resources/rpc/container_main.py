"""The program of a container: `python3 -I keeper.py '{"path": [...], ...}'`. It is run by path and imports nothing of AgentFly.

It forks the worker and stands between it and the outside: bytes from its standard input go to the worker, the worker's bytes to
its standard output, what the environment prints to its standard error. When its standard input ends, which it does with the
trainer however that ends, it kills the worker and itself, whatever the worker is doing; as process 1 of its container it takes
all the others along. When the worker ends, its last line says how.

Under an engine that puts up no walls of its own (enroot) the config names them, and it puts them up before it forks: namespaces
without a network, limits, no capabilities. A wall that cannot be had is one sentence and exit code 3, never skipped.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import random
import resource
import select
import signal
import socket
import sys
import time
from typing import Any

NEW_IPC, NEW_USER, NEW_PID, NEW_NET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
LIMIT = 1 << 20
READABLE = select.POLLIN | select.POLLHUP | select.POLLERR
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP = 1, 38, 24


def main() -> None:
    config = json.loads(sys.argv[1])
    walls = config.get("walls")
    if walls is not None:
        try:
            fence(walls)
        except OSError as error:
            word = f"the container cannot be walled off here: {error}; allow user namespaces (user.max_user_namespaces)"
            print(word, file=sys.stderr)
            sys.exit(3)
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        work(theirs, config, walls)
    theirs.close()
    carry(ours.fileno(), pid)
    end(pid)
    with contextlib.suppress(ChildProcessError):
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        print(f"the environment's process ended: {how}", file=sys.stderr, flush=True)
    os._exit(1)


def carry(worker: int, pid: int) -> None:
    """Bytes both ways until the worker ends; when the outside does, everything does. One thread: a process that has made a
    PID namespace may start no other, and no side waits for the other to read."""
    inward, outward = bytearray(), bytearray()
    for fd in (0, 1, worker):
        os.set_blocking(fd, False)
    while True:
        events = {0: 0, 1: 0, worker: 0}
        events[0] |= select.POLLIN if len(inward) < LIMIT else 0
        events[worker] |= select.POLLIN if len(outward) < LIMIT else 0
        events[worker] |= select.POLLOUT if inward else 0
        events[1] |= select.POLLOUT if outward else 0
        poller = select.poll()
        for fd, wanted in events.items():
            if wanted or fd != 1:
                poller.register(fd, wanted)
        ready = dict(poller.poll())
        there = not ready.get(1, 0) & select.POLLOUT or push(1, outward)
        if not there or (ready.get(0, 0) & READABLE and not move(0, inward)):  # the outside is gone
            end(pid)
            os._exit(0)
        if ready.get(worker, 0) & select.POLLOUT and not push(worker, inward):
            inward.clear()  # it has ended; what it said before comes now
        if ready.get(worker, 0) & READABLE and not move(worker, outward):
            flush(outward)
            return


def push(fd: int, buffer: bytearray) -> bool:
    """Write once; False where nobody reads any more."""
    try:
        del buffer[: os.write(fd, buffer)]
    except BlockingIOError:
        return True
    except OSError:
        return False
    return True


def move(fd: int, buffer: bytearray) -> bool:
    """Read once; False at the end."""
    try:
        data = os.read(fd, 1 << 16)
    except BlockingIOError:
        return True
    except OSError:
        return False
    buffer += data
    return bool(data)


def flush(outward: bytearray) -> None:
    """The worker's last words; whoever does not take them in time does without."""
    until = time.monotonic() + 5
    while outward and time.monotonic() < until and push(1, outward):
        time.sleep(0.005 if outward else 0)


def end(pid: int) -> None:
    """The worker, and its group where it leads one. It is not reaped yet: the number is still its own."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def work(channel: socket.socket, config: dict[str, Any], walls: dict[str, Any] | None) -> None:
    """In the child: be the worker. Does not return."""
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)
        if walls is not None:
            confine(walls)
        sys.path[:0] = config["path"]
        from agentfly.resources.rpc.sandbox_main import take

        take(channel)
    except BaseException as error:  # noqa: BLE001 - a forked child must end here, and say why
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def fence(walls: dict[str, Any]) -> None:
    """Namespaces of the worker's own; it is process 1 of the new one, so that nothing of it stays."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_USER | NEW_PID | NEW_IPC | (NEW_NET if walls["network"] == "none" else 0)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"unshare: {os.strerror(code)}")


def confine(walls: dict[str, Any]) -> None:
    """Limits and privileges of this process and all it starts."""
    memory = walls["memory_mb"] << 20
    for which, value in ((resource.RLIMIT_DATA, memory), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))
    resource.setrlimit(resource.RLIMIT_NPROC, (walls["processes"], walls["processes"]))  # of its own user namespace
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, random.sample(cpus, min(len(cpus), math.ceil(walls["cpus"]))))
    libc = ctypes.CDLL(None)
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if libc.capset(header, none) != 0:
        raise OSError("capset: the capabilities could not be given up")


if __name__ == "__main__":
    main()
