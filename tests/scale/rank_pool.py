"""A pool of rank processes that runs all cases once, for several tests.

`run_pool` starts it; `python -m tests.scale.rank_pool FOLDER RANK PORTS DEVICE PATTERN SIZE...` is one of its processes. It
runs the cases and checks whose names match, first on the first SIZE ranks, and so on; rank 0 leaves what it found in FOLDER.
"""

from __future__ import annotations

import faulthandler
import glob
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch

from agentfly.learn.ranks.environment import read_place
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
    more = [",".join(f"{free_port()}" for _ in sizes), device, pattern, *map(str, sizes)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":  # gloo takes the interface of the host's name, which may not resolve
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    logs = [folder / f"rank-{rank}.log" for rank in range(max(sizes))]
    pool = []
    for rank, log in enumerate(logs):
        with log.open("wb") as out:
            own = [*words, f"{rank}", *more]
            pool.append(subprocess.Popen(own, cwd=ROOT, env=environ, stdout=out, stderr=out, start_new_session=True))
    deadline = time.monotonic() + PATIENCE_S
    try:
        while any(process.poll() is None for process in pool) and not any(process.poll() for process in pool):
            assert time.monotonic() < deadline, "the ranks took too long"
            time.sleep(0.1)
        codes = [process.poll() for process in pool]
        assert codes == [0] * len(pool), f"exit codes {codes}\n" + "\n".join(log.read_text()[-3000:] for log in logs)
    finally:
        for process in pool:
            process.kill()
            process.wait()


def listening() -> list[str]:
    """The addresses on which this process listens (Linux)."""
    own = {os.readlink(path) for path in glob.glob("/proc/self/fd/*") if os.path.islink(path)}
    rows = [line.split() for name in ("tcp", "tcp6") for line in _lines(f"/proc/self/net/{name}")]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()[1:] if os.path.exists(path) else []


def main(folder: Path, rank: int, ports: Sequence[str], device: str, pattern: str, sizes: Sequence[int]) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    for port, size in zip(ports, sizes, strict=True):
        if rank >= size:
            continue
        os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{size}"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        place = read_place()
        assert place is not None
        with closing(RankGroup.join(place, device, 300.0)) as group:
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
    place, number, ports, device, pattern, *sizes = sys.argv[1:]
    main(Path(place), int(number), ports.split(","), device, pattern, list(map(int, sizes)))
