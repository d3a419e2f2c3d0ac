"""A pool of rank processes that runs all cases once, for several tests.

`run_pool` starts `python -m tests.scale.rank_pool FOLDER PORTS DEVICE PATTERN SIZE...`, which imports torch and forks ranks.
They run the cases and checks whose names match, first on the first SIZE ranks, and so on; rank 0 leaves the results in FOLDER.
"""

from __future__ import annotations

import faulthandler
import glob
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

import torch

from agentfly.learn.ranks.environment import read_rank
from agentfly.learn.ranks.group import RankGroup
from agentfly.training.ranks.process import free_port
from tests.scale.rank_cases import CASES, run_case, updates_of
from tests.scale.rank_checks import CHECKS

ROOT = Path(__file__).parent.parent.parent
PATIENCE_S = 1100.0
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
"""The addresses of loopback as /proc/net writes them: IPv4, IPv6, and IPv4 in IPv6."""


def run_pool(folder: Path, sizes: Sequence[int], device: str = "cpu", pattern: str = "") -> None:
    """Run the cases whose names match on pools of these sizes. Raises AssertionError if a process fails."""
    words = [sys.executable, "-m", "tests.scale.rank_pool", str(folder)]
    words += [",".join(f"{free_port()}" for _ in sizes), device, pattern, *map(str, sizes)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, cwd=ROOT, env=environ, start_new_session=True)
    try:
        status = process.wait(PATIENCE_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    logs = [folder / f"rank-{rank}.log" for rank in range(max(sizes))]
    assert status == 0, "\n".join(log.read_text()[-3000:] for log in logs if log.exists())


def listening() -> list[str]:
    """The addresses on which this process listens (Linux)."""
    own = {os.readlink(path) for path in glob.glob("/proc/self/fd/*") if os.path.islink(path)}
    rows = [line.split() for name in ("tcp", "tcp6") for line in _lines(f"/proc/self/net/{name}")]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()[1:] if os.path.exists(path) else []


def fork_ranks(folder: Path, count: int) -> int | None:
    """The number of this rank; None in the process that forked them, once all have ended. Raises if one failed."""
    for rank in range(count):
        if not os.fork():
            with (folder / f"rank-{rank}.log").open("wb") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            return rank
    for _ in range(count):
        status = os.waitstatus_to_exitcode(os.wait()[1])
        if status:
            raise SystemExit(f"a rank ended with {status}")  # the others may wait for it
    return None


def main(folder: Path, rank: int, ports: Sequence[str], device: str, pattern: str, sizes: Sequence[int]) -> None:
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    for port, size in zip(ports, sizes, strict=True):
        if rank >= size:
            continue
        os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{size}"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        this = read_rank()
        assert this is not None
        with closing(RankGroup.join(this, device, 300.0)) as group:
            assert all(address in LOOPBACK for address in listening()), f"a rank listens on {listening()}"
            run_cases(group, folder, size, device, pattern)


def run_cases(group: RankGroup, folder: Path, size: int, device: str, pattern: str) -> None:
    """Run the cases and checks whose names match on one group."""
    for name in filter(re.compile(pattern).search, [*CASES, *CHECKS]):
        if name in CASES:
            found = run_case(CASES[name], group, device, updates_of(CASES[name], size))
        else:
            found = CHECKS[name](group, folder)
        group.broken = None
        if group.leads:
            print(size, name, flush=True)
            torch.save(found, folder / f"{size}-{name}.pt")


if __name__ == "__main__":
    place, ports, device, pattern, *words = sys.argv[1:]
    torch.set_num_threads(1)
    sizes = list(map(int, words))
    rank = fork_ranks(Path(place), max(sizes))
    if rank is not None:
        main(Path(place), rank, ports.split(","), device, pattern, sizes)
