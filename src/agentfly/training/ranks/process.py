"""One rank's process on this machine: starts it, hears its signs of life, sees whether it is frozen.

this process --- socket --- rank      the supervisor on its machine, `rank_parent` on another node
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

SOCKET = "AGENTFLY_SUPERVISOR"
"""The environment variable with the number of a rank's socket, and the id of the process that watches it."""
RANK_LOST = 75
"""Exit status of a rank that has lost another one (EX_TEMPFAIL)."""
BEAT_S, SILENT_S, SILENT_UNSEEN_S = 1.0, 8.0, 60.0
"""Seconds between two signs of life; of silence until a rank is lost, with and without a look at its CPU time."""
FROZEN = "is frozen"
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Variables of a rank, unless they are set: torch warns whenever a wait for rank 0's next command lasts some seconds."""
SIOCGIFADDR = 0x8915


class Rank(Protocol):
    """One rank as the supervisor sees it."""

    number: int

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; None while the process runs, and if it is lost with its node."""

    def read(self) -> Path | None:
        """Take what the rank has sent. Returns the run's folder if that is in it."""

    def why_lost(self) -> str | None:
        """Returns how the process ended in a way that a restart may mend, or that it is frozen; None otherwise."""

    def kill(self) -> None:
        """End the process and what it has started."""


class LocalRank:
    """A process of this machine."""

    def __init__(self, number: int, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self.number, self.process, self.channel = number, process, channel
        self.heard = time.monotonic()
        self._cpu = (0.0, self.heard)
        self._line = bytearray()

    @property
    def status(self) -> int | None:
        return self.process.poll()

    def read(self) -> Path | None:
        try:
            data = self.channel.recv(65536)
        except (BlockingIOError, ConnectionError):
            return None
        if not data:
            return None  # its end is closed
        self.heard = time.monotonic()
        self._line += data
        if self._line.count(b"\n") < 2:
            return None
        _, path, rest = bytes(self._line).split(b"\n", 2)
        self._line = bytearray(rest)
        return Path(os.fsdecode(path))

    def why_lost(self) -> str | None:
        status = self.status
        return (FROZEN if self._is_frozen() else None) if status is None else why_ended(status, self.number)

    def _is_frozen(self) -> bool:
        """Whether the process sent nothing and did nothing. A busy one is not frozen, also if its threads cannot run."""
        now = time.monotonic()
        used = cpu_seconds(self.process.pid)
        if used is None:
            return now - self.heard > SILENT_UNSEEN_S
        if used > self._cpu[0]:
            self._cpu = (used, now)
        return now - max(self.heard, self._cpu[1]) > SILENT_S

    def kill(self) -> None:
        """End the process and its process group, unless that is this process's own, and wait for its end."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(self.process.pid) == os.getpgrp():
                    self.process.kill()
                else:
                    os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.channel.close()


def why_ended(status: int, number: int) -> str | None:
    """Returns how a rank ended, if a restart may mend it; None if not."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}" if status == RANK_LOST or (status == 1 and number) else None


def start_rank(number: int, words: Sequence[str], environ: Mapping[str, str], **options: Any) -> LocalRank:
    """Start a rank that reports to this process. `options` are those of Popen. Raises OSError."""
    ours, theirs = socket.socketpair()
    with theirs:
        own = {SOCKET: f"{theirs.fileno()}:{os.getpid()}"}
        process = subprocess.Popen(words, env={**environ, **own}, pass_fds=[theirs.fileno()], **options)
    ours.setblocking(False)
    return LocalRank(number, process, ours)


def start_here(number: int, arguments: Sequence[str], environ: Mapping[str, str]) -> LocalRank:
    """Start a rank on this machine. It leads a session: signals of the terminal reach the supervisor only."""
    return start_rank(
        number,
        [sys.executable, "-m", "agentfly", *arguments],
        {**environ, "RANK": f"{number}"},
        stdin=None if number == 0 else subprocess.DEVNULL,
        start_new_session=True,
    )


def free_port(address: str = "127.0.0.1") -> int:
    """Returns a port of this machine that nothing listens on, below those that systems hand out.

    A rank listens there seconds later: a port of the system's own choice may be that of another connection by then.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server((address, port)):
            return port
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])


def cpu_seconds(process: int) -> float | None:
    """Returns the CPU time of a process and its threads; None if the system does not tell."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def interface_of(address: str) -> str | None:
    """Returns the network interface of this machine that has an IPv4 address; None if there is none."""
    if sys.platform != "linux":
        return None
    import fcntl

    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return None


def interface_variables(address: str) -> dict[str, str]:
    """The variables that let gloo and NCCL use the interface of this node's address.

    gloo would take that of the host's name, which may not resolve or may be loopback.
    """
    name = interface_of(address)
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
