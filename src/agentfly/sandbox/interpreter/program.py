"""`run_code`: a program runs once, in a new process with limits of time, memory and output."""

from __future__ import annotations

import math
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ...aio.threads import run_in_thread
from ...errors import WorldError
from ...tools.text import clean
from .process import Process, rlimits

MEMORY_MB = 1024
_MAX_FILE = 1_000_000


@dataclass(frozen=True, slots=True)
class CodeRun:
    """The outcome of a program. `exit_code` is negative if a signal ended it."""

    stdout: str
    stderr: str
    exit_code: int
    timed_out: bool


async def run_code(code: str, *, stdin: str = "", timeout_s: float, memory_mb: int = MEMORY_MB) -> CodeRun:
    """Runs `code` as a program in a new process. Cancelling the call kills the process. Raises WorldError if none can start."""
    limits = rlimits(memory_mb, cpu_s=math.ceil(timeout_s) + 2)
    return await run_in_thread(_run_code, clean(code), clean(stdin), timeout_s, limits)  # type: ignore[no-any-return]


def _run_code(code: str, stdin: str, timeout_s: float, limits: str) -> CodeRun:
    streams = {"stdin": ".stdin", "stdout": ".stdout", "stderr": ".stderr"}
    try:
        process = Process(["main.py", limits], files={"main.py": code, ".stdin": stdin}, streams=streams)
    except OSError as error:
        raise WorldError(f"a Python process could not be started: {error}") from error
    try:
        timed_out = not process.wait(timeout_s)
        process.signal(signal.SIGKILL)  # the whole group: what the program left running too
        process.popen.wait(timeout=5)
        stdout, stderr = (_read(Path(process.directory, name)) for name in (".stdout", ".stderr"))
    except subprocess.TimeoutExpired as error:
        raise WorldError("a Python process could not be killed") from error
    finally:
        code_of_exit = process.destroy()
    return CodeRun(stdout, stderr, -signal.SIGKILL if code_of_exit is None else code_of_exit, timed_out)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_FILE).decode(errors="replace")
            missing = os.fstat(file.fileno()).st_size - _MAX_FILE
            return text if missing <= 0 else f"{text}\n[... cut: {missing:,} bytes left out]"
    except OSError:
        return ""  # the program removed the file
