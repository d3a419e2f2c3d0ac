"""The program of a worker process. It is started as a script, by path: `python -I worker.py CHANNEL LIFE PARENT`.

It ties its life to the trainer's before anything else, reads the first frame from the socket CHANNEL, takes over the
trainer's import path and hands over to `host`. Nothing of AgentFly is imported before that.

Two ties. A pipe LIFE whose other end only the trainer has: when that is closed, the kernel sends SIGKILL to the whole process
group, children of the environment included, and code that hangs or holds the interpreter cannot loosen it. And the
parent-death signal, in case a fork of the trainer keeps the pipe open: its handler kills the group too. (It must not kill this
process alone: it comes before the pipe is closed, and the children would be left.) Where the kernel cannot do that (not
Linux), a thread waits on the pipe.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import sys
import threading
from typing import Any

PR_SET_PDEATHSIG = 1
F_SETSIG = 10


def tie_to(parent: int, life: int) -> None:
    if sys.platform == "linux":
        signal.signal(signal.SIGTERM, _end)
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        life = os.open(
            f"/proc/self/fd/{life}", os.O_RDONLY | os.O_NONBLOCK
        )  # all workers share one pipe; the signal is set per opening
        fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(life, F_SETSIG, int(signal.SIGKILL))
        fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    else:
        threading.Thread(target=_watch, args=(life,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)  # it died before the ties were made


def _end(*_: object) -> None:
    os.killpg(0, signal.SIGKILL)


def _watch(life: int) -> None:
    with contextlib.suppress(OSError):
        os.read(life, 1)
    _end()


def read_hello(channel: socket.socket) -> dict[str, Any]:
    """The first frame; the trainer sends nothing more before it is answered."""
    data = b""
    while len(data) < 4 or len(data) < 4 + struct.unpack(">I", data[:4])[0]:
        part = channel.recv(65536)
        if not part:
            os._exit(1)
        data += part
    hello: dict[str, Any] = json.loads(data[4:])
    return hello


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    tie_to(int(sys.argv[3]), int(sys.argv[2]))
    hello = read_hello(channel)
    sys.path[:] = hello["path"]
    from agentfly.resources.rpc.server import serve

    serve(channel, hello)


if __name__ == "__main__":
    main()
