"""Updates of a learner that is sharded over processes of this machine (FSDP2 over gloo), beside one process.

In: numbers of ranks. Out: seconds of an update and learned tokens per second, by number of ranks. All sizes learn from the same
rows with the bundled model, one thread per process; the first update is left out. Ranks of one machine share its cores and
memory, so more ranks than cores cost time: the figures show what sharding costs, not what more machines give.

    python benchmarks/scale_ranks.py RANK SIZE PORT RESULT      # one rank; `scale.py` starts them
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TOKENS, LONGEST, REPEATS = 8192, 256, 3
TIMEOUT_S = 600.0


def ranks(counts: list[int]) -> dict[str, float]:
    """The figures of each number of ranks."""
    found: dict[str, float] = {}
    for size in counts:
        figures = _run(size)
        found |= {f"ranks/{size}/{name}": value for name, value in figures.items()}
    return found


def _run(size: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port, result = free.getsockname()[1], Path(folder) / "result.json"
        free.close()
        words = [sys.executable, __file__]
        more = [f"{size}", f"{port}", str(result)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        started = [subprocess.Popen([*words, f"{rank}", *more], env=environ) for rank in range(size)]
        try:
            for process in started:
                if process.wait(TIMEOUT_S):
                    raise SystemExit(f"a rank of {size} ended with status {process.returncode}")
        finally:
            for process in started:
                process.kill()
                process.wait()
        figures: dict[str, float] = json.loads(result.read_text())
        return figures


def work(rank: int, size: int, port: int, result: Path) -> None:
    """One rank: learn, and on rank 0 write the figures."""
    import torch
    from gpu_learner import as_groups, make_rows

    from agentfly.engines.local import load_model
    from agentfly.learn.learner import PolicyLearner
    from agentfly.learn.ranks.environment import read_rank
    from agentfly.learn.ranks.group import RankGroup
    from agentfly.learn.ranks.learner import RankLearner
    from agentfly.learn.settings import OptimSettings

    torch.set_num_threads(1)
    model, _ = load_model("pocket", device="cpu")
    optim = OptimSettings(lr=1e-6, max_tokens_per_batch=2048)
    learner: Any
    group = None
    if size == 1:
        learner = PolicyLearner(model, "grpo", optim=optim)
    else:
        os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{size}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
        this = read_rank()
        assert this is not None
        group = RankGroup.join(this, "cpu", TIMEOUT_S)
        learner = RankLearner(model, "grpo", ranks=group, reduce="float32", timeout_s=TIMEOUT_S, optim=optim)
        if not group.leads:
            learner.follow()
            group.close()
            return
    vocabulary = model.config.vocab_size
    rows = make_rows(TOKENS, vocabulary, LONGEST)
    seconds = []
    for number in range(1 + REPEATS):
        groups = as_groups(rows, learner.version, vocabulary)
        began = time.perf_counter()
        learner.update(groups)
        seconds += [time.perf_counter() - began] if number else []
    took = statistics.median(seconds)
    result.write_text(json.dumps({"update_s": took, "tokens_per_s": sum(row.length for row in rows) / took}))
    if group is not None:
        learner.stop()
        group.close()


if __name__ == "__main__":
    number, of, at, target = sys.argv[1:]
    work(int(number), int(of), int(at), Path(target))
