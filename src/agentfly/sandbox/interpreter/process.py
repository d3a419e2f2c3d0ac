"""A subprocess with resource limits for code that a model wrote. This is process isolation, not a sandbox: see the package.

A `Process` runs `child` in a new session (setsid) and an empty directory, with a scrubbed environment and limits on
memory, CPU, processes, open files and file size. When the object is destroyed or collected, its process group is killed and
reaped and its directory is removed. Unix only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from .removal import remove_tree

MIN_MEMORY_MB = 64
FILE_MB = 64
NUM_PROCESSES = 4096
"""The kernel counts all processes and threads of the user, so this only stops a fork bomb."""


def bootstrap(alias: str, module: str) -> str:
    """Returns source for `python -c` that imports the module `agentfly.MODULE` as `ALIAS.MODULE` and calls its `main`.

    The packages above the module, and this one, are made empty: no `__init__` of AgentFly runs, and the process stays small.
    Code that runs there and imports `agentfly` still gets the real package.
    """
    root = Path(__file__).parents[2]
    parents = module.split(".")[:-1]
    packages = ["", *(".".join(parents[: count + 1]) for count in range(len(parents)))]
    lines = ["import sys"]
    for package in dict.fromkeys([*packages, "sandbox", "sandbox.interpreter"]):
        name, folder = f"{alias}.{package}".rstrip("."), str(root.joinpath(*package.split(".")))
        lines.append(f"m = sys.modules[{name!r}] = type(sys)({name!r}); m.__path__ = [{folder!r}]")
    return "\n".join([*lines, f"from {alias}.{module} import main", "main()"])


CHILD = bootstrap("agentfly_python", "sandbox.interpreter.child")


def rlimits(memory_mb: int, cpu_s: int | None = None) -> str:
    """Returns the limits as `child` reads them."""
    if memory_mb < MIN_MEMORY_MB:
        raise ConfigError(f"memory_mb must be at least {MIN_MEMORY_MB}, not {memory_mb}")
    limits = {"AS": memory_mb << 20, "FSIZE": FILE_MB << 20, "NOFILE": 256, "NPROC": NUM_PROCESSES, "CORE": 0}
    return json.dumps({**limits, "CPU": cpu_s} if cpu_s else limits)


def environment(directory: str) -> dict[str, str]:
    """Returns an environment without the parent's variables. One thread per numeric library keeps many children cheap."""
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    return {"PATH": os.defpath, "HOME": directory, "TMPDIR": directory, "LANG": "C.UTF-8", **threads}


class Process:
    """A running child process. Starting one blocks for some milliseconds: do it in a thread."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        files: Mapping[str, str],
        streams: Mapping[str, str],
    ) -> None:
        """`files` are written into the child's directory first. A stream is the name of a file there."""
        if os.name != "posix":
            raise ConfigError("running Python code in a subprocess needs Linux or macOS")
        self.directory = tempfile.mkdtemp(prefix="agentfly-python-")
        try:
            for name, text in files.items():
                Path(self.directory, name).write_text(text, encoding="utf-8")
            with contextlib.ExitStack() as stack:
                opened: dict[str, Any] = {
                    key: stack.enter_context(Path(self.directory, name).open("rb" if key == "stdin" else "wb"))
                    for key, name in streams.items()
                }
                self.popen = subprocess.Popen(
                    [sys.executable, "-I", "-X", "utf8", "-c", CHILD, *arguments],
                    cwd=self.directory,
                    env=environment(self.directory),
                    start_new_session=True,
                    **opened,
                )
        except BaseException:
            remove_tree(self.directory)
            raise
        self._finalizer = weakref.finalize(self, _destroy, self.popen, self.directory, os.getpid())

    def signal(self, number: int) -> None:
        """Signals the process group, unless the process was reaped: the kernel may have given its id to another process."""
        _signal(self.popen, number)

    def exited(self) -> bool:
        """Whether the process has ended. Does not reap it, so its group can still be killed."""
        if self.popen.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def wait(self, timeout_s: float) -> bool:
        """Blocks until the process has ended. Returns False if that takes longer than `timeout_s`."""
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
        """Kills the group, reaps it and removes the directory. Returns the exit code, negative for a signal."""
        self._finalizer()
        return self.popen.returncode


def _signal(popen: subprocess.Popen[Any], number: int) -> None:
    if popen.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(popen.pid, number)


def _destroy(popen: subprocess.Popen[Any], directory: str, owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of the owner runs this finalizer on its copy of the object: the child belongs to the owner
    _signal(popen, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        popen.wait(timeout=5)
    remove_tree(directory)
