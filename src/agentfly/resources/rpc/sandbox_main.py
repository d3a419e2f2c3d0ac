"""How a process inside a sandbox or a container becomes a worker.

Unlike `worker_main`, which takes over the trainer's whole import path, it puts the hello's path in front of the present one:
the interpreter and the packages are those of the sandbox or the image. The worker ends with its connection.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import sys

from .server import serve
from .worker_main import read_hello


def become_worker(channel: socket.socket) -> None:
    """Read the hello, then answer calls until the connection is closed. Does not return."""
    hello = read_hello(channel)
    os.environ.update(hello["environment"])
    os.environ["AGENTFLY_CHANNEL"] = str(channel.fileno())
    for path in reversed(hello["path"]):
        if path not in sys.path:
            sys.path.insert(0, path)
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
