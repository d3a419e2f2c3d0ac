"""Starts the ranks of a run on this machine, watches them, and restarts all of them if one is lost.

    supervisor --- socket --- rank 0      the trainer; its exit status is that of the command
               --- socket --- rank 1..    followers

A rank sends a byte every second, and rank 0 the run's folder once it is known. A rank that was killed, that failed, or that is
silent for SILENT_S without using the CPU is lost: a process group cannot go on without it. All ranks are then killed at once
and started again with --resume, at most `fault.restarts` times. An error that a restart would repeat (exit status 2, or rank
0's own 1) ends the run.

The supervisor receives the signals of the terminal and passes them on to rank 0, which finishes its update, saves and ends the
others. If the supervisor dies, the kernel kills its ranks (Linux), and elsewhere a rank ends when its socket is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

SOCKET = "AGENTFLY_SUPERVISOR"
"""The environment variable with the number of a rank's socket, and the id of its supervisor."""
RANK_LOST = 75
"""Exit status of a rank that has lost another one (EX_TEMPFAIL)."""
BEAT_S, SILENT_S, SILENT_UNSEEN_S = 1.0, 10.0, 60.0
"""Seconds between two signs of life; of silence until a rank is lost, with and without a look at its CPU time."""
END_S = 5.0
"""Seconds that rank 0 has to end by itself after another rank has failed."""
LEAVE_S = 30.0
"""Seconds that the other ranks have to end after rank 0."""
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
_PR_SET_PDEATHSIG = 1

_socket: socket.socket | None = None


# ---- in a rank -------------------------------------------------------------------------------------------------------------


def report_to_supervisor() -> None:
    """In a rank that a supervisor has started: send signs of life, and end with the supervisor. Does nothing elsewhere."""
    global _socket
    number, _, parent = os.environ.pop(SOCKET, "").partition(":")
    if not number:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it ended before the line above
        os._exit(RANK_LOST)
    _socket = socket.socket(fileno=int(number))
    threading.Thread(target=_beat, args=(_socket,), name="agentfly-beat", daemon=True).start()
    threading.Thread(target=_end_with, args=(_socket,), name="agentfly-supervised", daemon=True).start()


def report_directory(path: Path) -> None:
    """In rank 0: tell the supervisor which folder to resume."""
    if _socket is not None:
        with contextlib.suppress(OSError):
            _socket.sendall(b"\n" + os.fsencode(path.absolute()) + b"\n")


def _beat(channel: socket.socket) -> None:
    while True:
        try:
            channel.sendall(b".")
        except OSError:
            return  # the supervisor is gone: `_end_with` sees it, too
        time.sleep(BEAT_S)


def _end_with(channel: socket.socket) -> None:
    with contextlib.suppress(OSError):
        channel.recv(1)
    os._exit(RANK_LOST)


# ---- the supervisor --------------------------------------------------------------------------------------------------------


class Rank:
    """One process."""

    def __init__(self, number: int, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self.number, self.process, self.channel = number, process, channel
        self.heard = time.monotonic()
        self._cpu = (0.0, self.heard)
        self._line = bytearray()

    def read(self) -> Path | None:
        """Take what the rank has sent. Returns the run's folder if that is in it."""
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
        """Returns how the process ended in a way that a restart may mend, or that it is frozen; None otherwise."""
        status = self.process.poll()
        if status is None:
            return "is frozen" if self._is_frozen() else None
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with status {status}" if status == RANK_LOST or (status == 1 and self.number) else None

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
        """End the process and what it has started, and wait for its end."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.channel.close()


def supervise(arguments: Sequence[str], ranks: int, restarts: int, threads: int | None = None) -> int:
    """Run `agentfly` with these arguments on so many ranks. Returns the exit status of rank 0; 1 after too many restarts."""
    stop = _Forwarder()
    directory: Path | None = None
    with stop.handling():
        for attempt in range(restarts + 1):
            group = start_ranks(arguments if directory is None else resuming(arguments, directory), ranks, threads)
            stop.rank = group[0]
            try:
                why, directory = _watch(group, directory)
            finally:
                status = group[0].process.poll()
                for rank in group:
                    rank.kill()
            if why is None or stop.received:
                return (2 if why is None else 1) if status is None else status if status >= 0 else 128 - status
            if attempt < restarts:
                _tell(f"{why}: all ranks are started again from the last checkpoint (restart {attempt + 1} of {restarts})")
    _tell(f"{why}; the run was restarted {restarts} times (fault.restarts) and is given up")
    return 1


def _tell(sentence: str) -> None:
    print(f"supervisor: {sentence}", file=sys.stderr, flush=True)


def _watch(group: list[Rank], directory: Path | None) -> tuple[str | None, Path | None]:
    """Wait until the run ends. Returns why it must be restarted, or None, and the run's folder."""
    with selectors.DefaultSelector() as selector:
        for rank in group:
            selector.register(rank.channel, selectors.EVENT_READ, rank)
        while True:
            for key, _ in selector.select(0.2):
                told = key.data.read()
                directory = told or directory
                if key.data.process.poll() is not None:
                    selector.unregister(key.fileobj)
            own = group[0].process.poll()
            if own is not None and own >= 0 and own != RANK_LOST:  # rank 0 has ended by itself
                if own == 0:
                    _leave(group)
                    return None, directory
                return _why_failed(group), directory
            if any(rank.process.poll() == 2 for rank in group[1:]):  # a mistake of the user, which that rank has reported
                return None, directory
            if lost := [(rank, why) for rank in group if (why := rank.why_lost()) is not None]:
                # A process that was killed is the cause; the others have lost it.
                rank, why = min(lost, key=lambda item: (item[0].process.poll() == RANK_LOST, item[0].number))
                if rank.number and (rank.process.poll() or 0) > 0 and group[0].process.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):  # it may have lost rank 0, which is about to end
                        group[0].process.wait(END_S)
                        continue
                return f"rank {rank.number} {why}", directory


def _leave(group: list[Rank]) -> None:
    """Wait for the other ranks of a run that has ended well."""
    deadline = time.monotonic() + LEAVE_S
    while any(rank.process.poll() is None for rank in group) and time.monotonic() < deadline:
        time.sleep(0.05)


def _why_failed(group: list[Rank]) -> str | None:
    """Returns that another rank was killed, if that is why rank 0 failed. None for an error of rank 0."""
    time.sleep(0.5)  # the system may not have reported it yet
    killed = [rank for rank in group[1:] if (status := rank.process.poll()) is not None and status < 0]
    return f"rank {killed[0].number} {killed[0].why_lost()}" if killed and group[0].process.poll() == 1 else None


def start_ranks(arguments: Sequence[str], ranks: int, threads: int | None) -> list[Rank]:
    """Start the processes. Each is the leader of a session: signals of the terminal reach the supervisor only."""
    environ = {
        **os.environ,
        "WORLD_SIZE": f"{ranks}",
        "LOCAL_WORLD_SIZE": f"{ranks}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{_free_port()}",
    }
    if sys.platform == "linux":  # gloo takes the interface of the host's name, which may not resolve
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if threads is None:  # as many as cores, over all ranks
        environ.setdefault("OMP_NUM_THREADS", f"{max(1, _cores() // ranks)}")
    group: list[Rank] = []
    try:
        for number in range(ranks):
            ours, theirs = socket.socketpair()
            with theirs:
                place = {"RANK": f"{number}", "LOCAL_RANK": f"{number}", SOCKET: f"{theirs.fileno()}:{os.getpid()}"}
                process = subprocess.Popen(
                    [sys.executable, "-m", "agentfly", *arguments],
                    env={**environ, **place},
                    pass_fds=[theirs.fileno()],
                    stdin=None if number == 0 else subprocess.DEVNULL,
                    start_new_session=True,
                )
            ours.setblocking(False)
            group.append(Rank(number, process, ours))
    except BaseException:
        for rank in group:
            rank.kill()
        raise
    return group


def resuming(arguments: Sequence[str], directory: Path) -> list[str]:
    """Returns the arguments of `agentfly train` with --resume and this folder."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--resume":
            next(words, None)
        elif not word.startswith("--resume="):
            kept.append(word)
    return [*kept, "--resume", str(directory)]


def cpu_seconds(process: int) -> float | None:
    """Returns the CPU time of a process and its threads; None if the system does not tell."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


class _Forwarder:
    """Passes signals on to rank 0."""

    def __init__(self) -> None:
        self.rank: Rank | None = None
        self.received = False

    @contextmanager
    def handling(self) -> Iterator[None]:
        former: dict[Any, Any] = {}
        for name in SIGNALS:
            if hasattr(signal, name):
                former[getattr(signal, name)] = signal.signal(getattr(signal, name), self._handle)
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        if self.rank is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.rank.process.pid, number)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
