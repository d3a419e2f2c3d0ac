"""One rank's process: starts it, hears its signs of life, sees whether it is frozen. Also the program that does so on a node.

    supervisor --- TCP --- this file, run by path on another node --- socket --- rank

Run by path it is a keeper: `python -I process.py` with a ticket on standard input. It starts one rank, tells the supervisor
once a second that both live, and passes on what the rank prints and how it ended, as JSON lines. It kills the rank when the
connection ends. It imports the standard library alone, so a keeper takes little memory beside its rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import selectors
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
CONNECT_S, UNACKNOWLEDGED_S = 15.0, 20.0
"""Seconds that a keeper tries to reach the supervisor, and that what it sends may stay unacknowledged before it gives up."""
SIOCGIFADDR = 0x8915


class Rank(Protocol):
    """One rank as the supervisor sees it. `channel` can be read when the rank has sent something."""

    number: int
    channel: socket.socket

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
    with socket.create_server((address, 0)) as found:
        return int(found.getsockname()[1])


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
                found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def interface_variables(address: str) -> dict[str, str]:
    """The variables that let gloo and NCCL use the interface of this node's address.

    gloo would take that of the host's name, which may not resolve or may be loopback.
    """
    name = interface_of(address)
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}


# ---- the keeper of a rank on another node ----------------------------------------------------------------------------------


class _Keeper:
    """Starts the rank of a ticket and speaks for it. The rank belongs to the keeper's process group."""

    def __init__(self, ticket: Mapping[str, Any], connection: socket.socket) -> None:
        self._connection = connection
        environ = {**QUIET, **interface_variables(ticket["node"]), **os.environ, **ticket["environ"]}
        self._rank = start_rank(
            ticket["rank"],
            [sys.executable, "-m", "agentfly", *ticket["arguments"]],
            environ,
            cwd=ticket["folder"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self._rank.process.stdout is not None
        self._output = self._rank.process.stdout.fileno()
        os.set_blocking(self._output, False)

    def run(self) -> None:
        """Returns when the rank or the connection has ended."""
        last = 0.0
        try:
            with selectors.DefaultSelector() as selector:
                for source in (self._connection, self._rank.channel, self._output):
                    selector.register(source, selectors.EVENT_READ)
                while True:
                    for key, _ in selector.select(0.2):
                        if key.fileobj is self._connection:
                            return  # the supervisor sends nothing, so it is gone
                        if key.fileobj is self._rank.channel:
                            self._rank.read()
                        elif not self._pass_on():
                            selector.unregister(self._output)  # the rank has closed it
                    if self._rank.status is not None:
                        break
                    if time.monotonic() - last >= BEAT_S:
                        last = time.monotonic()
                        self._tell({"frozen": True} if self._rank.why_lost() == FROZEN else {"beat": True})
            while self._pass_on():
                pass
            self._tell({"ended": self._rank.status})
        except OSError:
            return  # the supervisor cannot be reached any more
        finally:
            self._rank.kill()

    def _pass_on(self) -> bool:
        """Tell what the rank has printed. Returns whether there was something."""
        try:
            data = os.read(self._output, 65536)
        except BlockingIOError:
            return False
        if data:
            self._tell({"said": data.decode("utf-8", "replace")})
        return bool(data)

    def _tell(self, message: Mapping[str, Any]) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")


def main() -> int:
    ticket = json.loads(sys.stdin.buffer.read())
    host, port = ticket["supervisor"]
    try:
        connection = socket.create_connection((host, port), CONNECT_S)
    except OSError as error:
        print(f"the supervisor at {host}:{port} cannot be reached ({error})")
        return 1
    with connection:
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNACKNOWLEDGED_S * 1000))
        connection.settimeout(UNACKNOWLEDGED_S)
        connection.sendall(json.dumps({"token": ticket["token"], "rank": ticket["rank"]}).encode() + b"\n")
        try:
            keeper = _Keeper(ticket, connection)
        except OSError as error:
            connection.sendall(json.dumps({"problem": f"the rank could not be started: {error}"}).encode() + b"\n")
            return 1
        keeper.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
