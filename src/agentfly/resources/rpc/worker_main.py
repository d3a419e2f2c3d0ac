"""The program of a worker process, run by path: `python -I worker_main.py CHANNEL LIFE PARENT [COMMAND]`.

    tie to the trainer --> read the hello from CHANNEL --> take over the trainer's import path --> instance_server.serve

Nothing of AgentFly or of any package is imported before the path is known. Two ties end the worker with the trainer:

LIFE, a pipe whose other end only the trainer holds. When it is closed, the kernel sends SIGKILL to the whole process group,
children of the environment included; code that hangs or holds the interpreter cannot prevent it.

The parent-death signal, in case a fork of the trainer keeps the pipe open. It arrives before the pipe is closed, so its handler
kills the group: if it ended this process alone, the children would be left.

On systems other than Linux, a thread waits on the pipe. `become_worker` is for a process of a sandbox or container.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import stat
import struct
import sys
import threading
from typing import Any, Never

PR_SET_PDEATHSIG = 1
F_SETSIG = 10


def tie_to(parent: int, life: int, lasting: bool = False) -> None:
    """`lasting`: the tie by the pipe holds on for the program that takes the place of this one."""
    if sys.platform == "linux":
        signal.signal(signal.SIGTERM, _kill_group)
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        # Open the pipe anew: all workers share it, and the signal belongs to the open file description.
        life = os.open(f"/proc/self/fd/{life}", os.O_RDONLY | os.O_NONBLOCK)
        os.set_inheritable(life, lasting)
        fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(life, F_SETSIG, int(signal.SIGKILL))
        fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    else:
        threading.Thread(target=_watch, args=(life,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)  # the trainer ended before the ties were made


def die(why: str) -> Never:
    """Print why, and end this process and its group at once."""
    print(why, file=sys.stderr, flush=True)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _kill_group(*_: object) -> None:
    os.killpg(0, signal.SIGKILL)


def _watch(life: int) -> None:
    with contextlib.suppress(OSError):
        os.read(life, 1)
    _kill_group()


def read_hello(channel: socket.socket) -> dict[str, Any]:
    """The first frame. It is JSON, because the codec can only be imported with the path that it names.

    The trainer sends nothing more before it is answered, so no byte of a second frame is read here.
    """
    data = b""
    while len(data) < 4 or len(data) < 4 + struct.unpack(">I", data[:4])[0]:
        part = channel.recv(65536)
        if not part:
            os._exit(1)
        data += part
    hello: dict[str, Any] = json.loads(data[4:])
    return hello


def become(command: list[str]) -> Never:
    """Run a program in the place of this one, tied to the trainer alike. If it cannot be started, the exit code is 127."""
    try:
        if sys.platform == "linux":
            os.execvp(command[0], command)
        else:
            import subprocess  # the thread of `tie_to` has to stay

            os._exit(subprocess.call(command))
    except OSError as error:
        print(f"{command[0]} cannot be started: {error}", file=sys.stderr, flush=True)
        os._exit(127)


def main() -> None:
    if command := sys.argv[4:]:
        tie_to(int(sys.argv[3]), int(sys.argv[2]), lasting=True)
        become(command)
    channel = socket.socket(fileno=int(sys.argv[1]))
    tie_to(int(sys.argv[3]), int(sys.argv[2]))
    hello = read_hello(channel)
    sys.path[:] = hello["path"]
    from agentfly.resources.rpc.instance_server import serve

    serve(channel, hello)


# ---- in a sandbox or container


def become_worker(channel: socket.socket) -> None:
    """Turn this process of a sandbox or container into a worker. Does not return.

    Unlike `main`, which takes over the trainer's whole import path, it puts the hello's path in front of the present
    one: the interpreter and the packages are those of the sandbox or the image.
    """
    hello = read_hello(channel)
    os.environ.update(hello["environment"])
    os.environ["AGENTFLY_CHANNEL"] = str(channel.fileno())
    for path in reversed(hello["path"]):
        if path not in sys.path:
            sys.path.insert(0, path)
    from agentfly.resources.rpc.instance_server import serve

    serve(channel, hello)


def from_sandbox() -> None:
    """Called by the last cell of a sandbox session. The session's connection, its only socket, becomes the worker's.

    What the environment prints is dropped: the session's outputs are files in memory that would grow without limit.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fd = next(fd for fd in range(3, 4096) if _is_socket(fd))
    become_worker(socket.socket(fileno=os.dup(fd)))


def _is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False


if __name__ == "__main__":
    main()
