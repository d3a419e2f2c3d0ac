"""Starts the processes of a fleet. `Launcher` is the protocol; `LocalLauncher` starts processes of this machine.

A launcher knows nothing of what runs in the processes. It starts `member_main.py` with a ticket and says how the process ended.
A process ends with the one that launched it: see `member_main`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..errors import ConfigError, EngineError
from .bare import how_ended

SCRIPT = Path(__file__).parent / "member_main.py"
RANK_VARIABLES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT",
)  # fmt: skip
"""Variables that describe the trainer as a rank of a group, to which its processes do not belong."""


class Launched(Protocol):
    """A process that was started. `node` is the name of its node in a cluster, "" on this machine."""

    node: str

    def ended(self) -> str | None:
        """How the process ended, such as "(exit code 3)", with the end of what it printed. None while it runs."""

    def kill(self) -> None:
        """End the process and what it has started, at once. Returns when it is gone. May be called more than once."""


class Launcher(Protocol):
    """Starts the processes of one fleet. `takes_long`: `start` takes seconds, so it is called in a thread."""

    takes_long: bool

    def start(self, index: int, ticket: Mapping[str, Any]) -> Launched:
        """Start process `index` and give it the ticket. Raises EngineError if that fails, ConfigError if it always will."""

    def close(self) -> None:
        """Free what the launcher holds. All of its processes have ended."""


class LocalLauncher:
    """Processes of this machine. `log_dir` gets one file per index with what its processes print, such as `sampler-0.log`.

    A process has the environment variables of this one, without those of ranks, and those in `environments[index]`.
    """

    takes_long = False  # and the parent-death signal of a process belongs to the thread that starts it

    def __init__(self, log_dir: Path, environments: Sequence[Mapping[str, str]] = ()) -> None:
        if os.name != "posix":
            raise ConfigError('worker processes need Linux or macOS: set sampler.replicas = 1 and sampler.place = "shared"')
        self._log_dir, self._environments = log_dir, environments
        self._life = os.pipe()

    def start(self, index: int, ticket: Mapping[str, Any]) -> LocalProcess:
        inherited = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        added = self._environments[index] if self._environments else {}
        name = process_name(ticket)
        words = [sys.executable, "-I", "-X", "utf8", str(SCRIPT), str(self._life[0]), str(os.getpid()), name]
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            log = self._log_dir / f"{name}.log"
            with log.open("ab") as output:
                began = output.tell()
                popen = subprocess.Popen(
                    words,
                    env={**inherited, **added},
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    pass_fds=(self._life[0],),
                )
        except OSError as error:
            raise EngineError(f"a worker process could not be started: {error}") from error
        assert popen.stdin is not None
        with contextlib.suppress(BrokenPipeError), popen.stdin as stdin:  # it has ended already: `ended` says how
            stdin.write(json.dumps(dict(ticket)).encode())
        return LocalProcess(popen, log, began)

    def close(self) -> None:
        for end in self._life:
            with contextlib.suppress(OSError):
                os.close(end)


class LocalProcess:
    """A process of this machine. It leads its own process group."""

    node = ""

    def __init__(self, popen: subprocess.Popen[bytes], log: Path, began: int) -> None:
        """`began` is where the output of this process begins in its log."""
        self.pid = popen.pid
        self._popen, self._log, self._began = popen, log, began

    def ended(self) -> str | None:
        code = self._popen.poll()
        if code is None:
            return None
        return how_ended(code, str(self._log), self._began)

    def kill(self) -> None:
        if self._popen.returncode is None:  # once it is reaped, its number may belong to another process
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._popen.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(timeout=5)


def process_name(ticket: Mapping[str, Any]) -> str:
    """Names a process in file names and lists of processes, such as "sampler-0"."""
    return str(ticket["name"]).replace(" ", "-")
