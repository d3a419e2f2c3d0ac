"""Worker processes in a fraction of a second: a process that has imported everything forks them.

`ForkLauncher` implements `Launcher` with the arguments of `LocalLauncher`. Everything else of a worker is real: its own process
group, its connection, its tie to the test's process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

_zygote: list[subprocess.Popen[bytes]] = []


def zygote() -> subprocess.Popen[bytes]:
    if not _zygote or _zygote[0].poll() is not None:
        _zygote[:] = [
            subprocess.Popen([sys.executable, "-m", "tests.scale.forked"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        ]
    return _zygote[0]


class ForkLauncher:
    takes_long = False
    pids: ClassVar[list[int]] = []
    """All processes that were started, in order."""
    refuse = False
    """Raise instead of starting another process."""

    def __init__(self, log_dir: Path, environments: Sequence[Mapping[str, str]] = ()) -> None:
        self.log_dir = log_dir

    def start(self, index: int, ticket: Mapping[str, Any]) -> Forked:
        from agentfly.errors import EngineError

        if ForkLauncher.refuse:
            raise EngineError("no process can be started")
        self.log_dir.mkdir(parents=True, exist_ok=True)
        process = zygote()
        assert process.stdin is not None
        assert process.stdout is not None
        order = {"ticket": dict(ticket), "log": str(self.log_dir / f"sampler-{index}.log")}
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.flush()
        pid = int(process.stdout.readline())
        ForkLauncher.pids.append(pid)
        return Forked(pid)

    def close(self) -> None:
        pass


class Forked:
    node = ""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def ended(self) -> str | None:
        return None if is_running(self.pid) else "(gone)"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        wait_until_gone(self.pid)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until_gone(pid: int, timeout_s: float = 120.0) -> bool:
    until = time.monotonic() + timeout_s
    while is_running(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not is_running(pid)


def main() -> None:
    import torch

    import agentfly.learn.model.storage
    import agentfly.training.workers.weights
    import agentfly.training.workers.worker  # noqa: F401
    from agentfly.engines import open_engine
    from agentfly.fleet.member_main import run_program
    from agentfly.resources.rpc.worker_main import tie_to

    torch.set_num_threads(1)
    open_engine("pocket", device="cpu")  # imports what transformers imports late
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # its children are reaped by the kernel
    life, _ours = os.pipe()
    for line in sys.stdin.buffer:
        order = json.loads(line)
        pid = os.fork()
        if pid:
            sys.stdout.write(f"{pid}\n")
            sys.stdout.flush()
            continue
        os.close(_ours)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        log = os.open(order["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        sys.path[:] = order["ticket"]["path"]
        tie_to(os.getppid(), life)
        run_program(order["ticket"])


if __name__ == "__main__":
    main()
