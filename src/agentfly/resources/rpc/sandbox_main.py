"""The first thing a worker does in a sandbox or a container: a connection in, an environment that answers on it out.

Unlike `worker`, which takes over the trainer's whole import path, what is named in the first frame goes in front of the place's
own path: the interpreter and the packages are those of the place. It ends with its connection.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import sys

from .server import serve
from .worker_main import read_hello


def take(channel: socket.socket) -> None:
    """Read the first frame, then answer calls until the connection is closed. Does not return."""
    hello = read_hello(channel)
    os.environ.update(hello["environment"])
    os.environ["AGENTFLY_CHANNEL"] = str(channel.fileno())
    for path in reversed(hello["path"]):
        if path not in sys.path:
            sys.path.insert(0, path)
    serve(channel, hello)


def from_sandbox() -> None:
    """Called by the last cell of a sandbox session: its connection, the only socket that it has, becomes a worker's.

    What the environment prints is dropped: the session's outputs are files in memory, which nobody would empty.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fd = next(fd for fd in range(3, 4096) if _is_socket(fd))
    take(socket.socket(fileno=os.dup(fd)))


def _is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False
