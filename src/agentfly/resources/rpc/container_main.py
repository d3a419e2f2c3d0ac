"""The entry point of a container, run by path: `python3 -I container_main.py '{"path": [...], ...}'`.

It forks the worker and stays between it and the trainer:

    trainer ==stdin==> relay ==socket==> worker           the worker's prints go to the container's standard error
    trainer <=stdout== relay <=socket==  worker

When standard input ends, which it does however the trainer ends, it kills the worker and exits; as process 1 of the container
it takes every other process along. When the worker ends, the last line of standard error says how. Nothing of AgentFly is
imported before the fork.

If the engine sets no limits (enroot), the config names them, and they are set before the worker starts: namespaces without a
network, resource limits, no capabilities. A limit that cannot be set is one sentence and exit code 3.
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
MAX_BUFFER = 1 << 20
FLUSH_S = 5.0
READABLE = select.POLLIN | select.POLLHUP | select.POLLERR
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP = 1, 38, 24


def main() -> None:
    config = json.loads(sys.argv[1])
    limits = config.get("limits")
    if limits is not None:
        try:
            isolate(limits)
        except OSError as error:
            sentence = f"the container cannot be isolated here: {error}; allow user namespaces (user.max_user_namespaces)"
            print(sentence, file=sys.stderr)
            sys.exit(3)
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        run_worker(theirs, config, limits)
    theirs.close()
    relay(ours.fileno(), pid)
    kill(pid)
    with contextlib.suppress(ChildProcessError):
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        print(f"the environment's process ended: {how}", file=sys.stderr, flush=True)
    os._exit(1)


def relay(worker: int, pid: int) -> None:
    """Copy bytes both ways until the worker ends. If the trainer ends first, kill the worker and exit.

    One thread with non-blocking descriptors: a process that has created a PID namespace may start no thread, and neither side
    may block because the other does not read.
    """
    inward, outward = bytearray(), bytearray()
    for fd in (0, 1, worker):
        os.set_blocking(fd, False)
    while True:
        events = {0: 0, 1: 0, worker: 0}
        events[0] |= select.POLLIN if len(inward) < MAX_BUFFER else 0
        events[worker] |= select.POLLIN if len(outward) < MAX_BUFFER else 0
        events[worker] |= select.POLLOUT if inward else 0
        events[1] |= select.POLLOUT if outward else 0
        poller = select.poll()
        for fd, wanted in events.items():
            if wanted or fd != 1:
                poller.register(fd, wanted)
        ready = dict(poller.poll())
        is_read = not ready.get(1, 0) & select.POLLOUT or write_some(1, outward)
        if not is_read or (ready.get(0, 0) & READABLE and not read_some(0, inward)):  # the trainer is gone
            kill(pid)
            os._exit(0)
        if ready.get(worker, 0) & select.POLLOUT and not write_some(worker, inward):
            inward.clear()  # the worker has ended; its last output is read below
        if ready.get(worker, 0) & READABLE and not read_some(worker, outward):
            flush(outward)
            return


def write_some(fd: int, buffer: bytearray) -> bool:
    """Write once. False if the other end is closed."""
    try:
        del buffer[: os.write(fd, buffer)]
    except BlockingIOError:
        return True
    except OSError:
        return False
    return True


def read_some(fd: int, buffer: bytearray) -> bool:
    """Read once. False at the end."""
    try:
        data = os.read(fd, 1 << 16)
    except BlockingIOError:
        return True
    except OSError:
        return False
    buffer += data
    return bool(data)


def flush(outward: bytearray) -> None:
    """Write the worker's last output, for at most FLUSH_S."""
    until = time.monotonic() + FLUSH_S
    while outward and time.monotonic() < until and write_some(1, outward):
        time.sleep(0.005 if outward else 0)


def kill(pid: int) -> None:
    """SIGKILL to the worker and to the group that it leads. It is not reaped yet, so the number is still its own."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def run_worker(channel: socket.socket, config: dict[str, Any], limits: dict[str, Any] | None) -> None:
    """In the child: become the worker. Does not return."""
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)
        if limits is not None:
            set_limits(limits)
        sys.path[:0] = config["path"]
        sys.path += config["packages"]
        from agentfly.resources.rpc.worker_main import become_worker

        become_worker(channel)
    except BaseException as error:  # noqa: BLE001 - a forked child must end here, and say why
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def isolate(limits: dict[str, Any]) -> None:
    """Create namespaces for the worker. It is process 1 of the new PID namespace, so its processes end with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_USER | NEW_PID | NEW_IPC | (NEW_NET if limits["network"] == "none" else 0)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"unshare: {os.strerror(code)}")


def set_limits(limits: dict[str, Any]) -> None:
    """Set resource limits and drop all privileges, for this process and those that it starts."""
    memory = limits["memory_mb"] << 20
    for which, value in ((resource.RLIMIT_DATA, memory), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))
    resource.setrlimit(resource.RLIMIT_NPROC, (limits["processes"], limits["processes"]))  # counted in its user namespace
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, random.sample(cpus, min(len(cpus), math.ceil(limits["cpus"]))))
    libc = ctypes.CDLL(None)
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if libc.capset(header, none) != 0:
        raise OSError("capset: the capabilities could not be dropped")


if __name__ == "__main__":
    main()
