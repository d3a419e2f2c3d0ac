"""Starts the ranks of a run, watches them, and restarts all of them if one is lost.

    supervisor --- socket --- rank 0      the trainer; its exit status is that of the command
               --- socket --- rank 1..    followers, on this machine
               --- fleet ---- parent --- rank 1..    followers on other nodes (cluster.address; `training.ranks.cluster_ranks`)

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
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Protocol

from ...config import Config
from ...errors import AgentFlyError, RankError
from ..stopping import handled_by
from .process import BEAT_S, QUIET, RANK_LOST, SOCKET, LocalRank, Rank, free_port, start_here

END_S = 5.0
"""Seconds that rank 0 has to end by itself after another rank has failed."""
CAUSE_S = 1.0
"""Seconds in which the rank that was killed is looked for, after rank 0 has failed because of it."""
LEAVE_S = 30.0
LOOK_S = 0.1
"""Seconds that the other ranks have to end after rank 0."""
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


class Starter(Protocol):
    """Starts all ranks of an attempt."""

    def start(self, arguments: Sequence[str]) -> list[Rank]:
        """Start `agentfly` with these arguments on every rank; rank 0 comes first.

        Raises ConfigError or EngineError if the ranks find no place, and RankError if one is lost before all have started.
        """

    def release(self) -> None:
        """Free what the attempt held. Its ranks have been killed."""


def supervise_run(arguments: Sequence[str], config: Config) -> int:
    """Run `agentfly` with these arguments on the ranks of a config. Returns the exit status; raises ConfigError."""
    if config.cluster.address is None:
        return supervise(arguments, config.learner.ranks, config.fault.restarts, config.run.threads)
    from .cluster_ranks import ClusterRanks

    with ClusterRanks.connect(config, _tell) as starter:
        return supervise(arguments, config.learner.ranks, config.fault.restarts, starter=starter)


def supervise(
    arguments: Sequence[str], ranks: int, restarts: int, threads: int | None = None, starter: Starter | None = None
) -> int:
    """Run `agentfly` with these arguments on so many ranks, by default of this machine.

    Returns the exit status of rank 0; 1 after too many restarts.
    """
    starter = starter or LocalRanks(ranks, threads)
    stop = _Forwarder()
    directory: Path | None = None
    with handled_by(stop.handle):
        for attempt in range(restarts + 1):
            group: list[Rank] = []
            status: int | None = None
            why: str | None
            try:
                with stop.starting():
                    group = starter.start(arguments if directory is None else resuming(arguments, directory))
                    stop.rank = group[0]
                why, directory = _watch(group, directory)
                status = group[0].status
            except RankError as error:
                why = str(error)
            except AgentFlyError as error:
                if not attempt:
                    raise
                _tell(f"the ranks cannot be started again: {error}; to continue: agentfly train --resume {directory}")
                return 1
            finally:
                for rank in group:
                    rank.kill()
                starter.release()
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
    while True:
        time.sleep(LOOK_S)
        for rank in group:
            directory = rank.read() or directory
        own = group[0].status
        if own is not None and own >= 0 and own != RANK_LOST:  # rank 0 has ended by itself
            if own == 0:
                _leave(group)
                return None, directory
            return _why_failed(group), directory
        if any(rank.status == 2 for rank in group[1:]):  # a mistake of the user, which that rank has reported
            return None, directory
        if any(rank.why_lost() is not None for rank in group):
            rank, why = _cause(group)
            failed = rank.number and (rank.status or 0) > 0 and group[0].status is None
            if failed and _wait(lambda: group[0].status is not None, END_S):
                continue  # it had lost rank 0, which was about to end
            return f"rank {rank.number} {why}", directory


def _cause(group: list[Rank]) -> tuple[Rank, str]:
    """Returns the rank that was lost first, and how: one that was killed, and not those that ended because of it."""

    def find() -> list[tuple[Rank, str]]:
        for rank in group[1:]:
            rank.read()
        return [(rank, why) for rank in group if (why := rank.why_lost()) is not None]

    def rank_lost(item: tuple[Rank, str]) -> bool:
        return item[0].status == RANK_LOST

    _wait(lambda: not all(map(rank_lost, find())), CAUSE_S)
    return min(find(), key=lambda item: (rank_lost(item), item[0].number))


def _leave(group: list[Rank]) -> None:
    """Wait for the other ranks of a run that has ended well."""

    def left() -> bool:
        for rank in group[1:]:
            rank.read()
        return all(rank.status is not None or rank.why_lost() is not None for rank in group)

    _wait(left, LEAVE_S)


def _why_failed(group: list[Rank]) -> str | None:
    """Returns that another rank was lost, if that is why rank 0 failed. None for an error of rank 0."""
    if group[0].status != 1:
        return None

    def lost() -> list[Rank]:
        for rank in group[1:]:
            rank.read()
        return [rank for rank in group[1:] if rank.why_lost() is not None and (rank.status is None or rank.status < 0)]

    _wait(lambda: bool(lost()), CAUSE_S)  # the system may not have reported it yet
    others = lost()
    return f"rank {others[0].number} {others[0].why_lost()}" if others else None


def _wait(over: Callable[[], bool], limit_s: float) -> bool:
    """Wait until it is over, at most so long. Returns whether it is."""
    deadline = time.monotonic() + limit_s
    while not over():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


class LocalRanks:
    """All ranks are processes of this machine. `threads` is run.threads."""

    def __init__(self, ranks: int, threads: int | None) -> None:
        self._ranks, self._threads = ranks, threads

    def start(self, arguments: Sequence[str]) -> list[Rank]:
        environ = {
            **QUIET,
            **os.environ,
            "WORLD_SIZE": f"{self._ranks}",
            "LOCAL_WORLD_SIZE": f"{self._ranks}",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": f"{free_port()}",
        }
        if self._threads is None:  # as many as cores, over all ranks
            environ.setdefault("OMP_NUM_THREADS", f"{max(1, _cores() // self._ranks)}")
        group: list[Rank] = []
        try:
            for number in range(self._ranks):
                group.append(start_here(number, arguments, {**environ, "LOCAL_RANK": f"{number}"}))
        except BaseException:
            for rank in group:
                rank.kill()
            raise
        return group

    def release(self) -> None:
        """Processes hold nothing beyond their end."""


def resuming(arguments: Sequence[str], directory: Path) -> list[str]:
    """Returns the arguments of `agentfly train` with --resume and this folder."""
    words_kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--resume":
            next(words, None)
        elif not word.startswith("--resume="):
            words_kept.append(word)
    return [*words_kept, "--resume", str(directory)]


class _Forwarder:
    """Passes signals on to rank 0."""

    def __init__(self) -> None:
        self.rank: Rank | None = None
        self.received = False
        self._starting = False

    @contextmanager
    def starting(self) -> Iterator[None]:
        """While ranks are started there is no rank 0 to pass a signal on to: it ends this program."""
        self._starting = True
        try:
            yield
        finally:
            self._starting = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        if self._starting:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        if isinstance(self.rank, LocalRank):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.rank.process.pid, number)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
