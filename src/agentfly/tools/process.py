"""A subprocess with limits, for code that a model wrote: how it is started, read and ended. Used by `python`.

This is process isolation, not a sandbox: see `python`. Comes in: a command line for `python_child`; goes out: a process in
its own session (setsid) and its own empty directory, with a scrubbed environment, and limits on memory, CPU, processes, open
files and file size. Whatever happens to the object, its process group is killed, reaped and its directory removed. Unix only.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError

CHILD = Path(__file__).with_name("python_child.py")
MIN_MEMORY_MB = 64
FILE_MB = 64
NUM_PROCESSES = 4096
"""Counted by the kernel over all processes and threads of the user, so it only stops a fork bomb."""


def rlimits(memory_mb: int, cpu_s: int | None = None) -> str:
    """The limits, as `python_child` reads them."""
    if memory_mb < MIN_MEMORY_MB:
        raise ConfigError(f"memory_mb must be at least {MIN_MEMORY_MB}, not {memory_mb}")
    limits = {"AS": memory_mb << 20, "FSIZE": FILE_MB << 20, "NOFILE": 256, "NPROC": NUM_PROCESSES, "CORE": 0}
    return json.dumps({**limits, "CPU": cpu_s} if cpu_s else limits)


def environment(directory: str) -> dict[str, str]:
    """Nothing of the parent's environment. One thread per numeric library keeps many children cheap."""
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    return {"PATH": os.defpath, "HOME": directory, "TMPDIR": directory, "LANG": "C.UTF-8", **threads}


class Process:
    """A running child. Starting one blocks for some milliseconds: do it in a thread."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        files: Mapping[str, str],
        streams: Mapping[str, int | str],
        pass_fds: Sequence[int] = (),
    ) -> None:
        """`files` are written into the child's directory before it starts; a stream is a descriptor or one of those files."""
        if os.name != "posix":
            raise ConfigError("running Python code in a subprocess needs Linux or macOS")
        self.directory = tempfile.mkdtemp(prefix="agentfly-python-")
        try:
            for name, text in files.items():
                Path(self.directory, name).write_text(text, encoding="utf-8")
            with contextlib.ExitStack() as stack:
                opened: dict[str, Any] = {}
                for key, stream in streams.items():
                    if isinstance(stream, str):
                        path = Path(self.directory, stream)
                        opened[key] = stack.enter_context(path.open("rb" if key == "stdin" else "wb"))
                    else:
                        opened[key] = stream
                self.popen = subprocess.Popen(
                    [sys.executable, "-I", "-X", "utf8", str(CHILD), *arguments],
                    cwd=self.directory,
                    env=environment(self.directory),
                    start_new_session=True,
                    pass_fds=pass_fds,
                    **opened,
                )
        except BaseException:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise
        self._finalizer = weakref.finalize(self, _destroy, self.popen, self.directory, os.getpid())

    def signal(self, number: int) -> None:
        """Signal the whole group. Only while it has not been reaped: after that its number may belong to someone else."""
        _signal(self.popen, number)

    def exited(self) -> bool:
        """Whether it has ended, without reaping it: its group can still be killed."""
        if self.popen.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def wait(self, timeout_s: float) -> bool:
        """Block until it has ended, at most so long."""
        deadline = time.monotonic() + timeout_s
        pause = 0.001
        while not self.exited():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, 0.02)
        return True

    def destroy(self) -> int | None:
        """Kill the group, reap it, remove its directory. The exit code, negative for a signal."""
        self._finalizer()
        return self.popen.returncode


def _signal(popen: subprocess.Popen[Any], number: int) -> None:
    if popen.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(popen.pid, number)


def _destroy(popen: subprocess.Popen[Any], directory: str, owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of the owner ends or collects its copy: the child is not its to kill
    _signal(popen, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        popen.wait(timeout=5)
    shutil.rmtree(directory, ignore_errors=True)
