"""Groups of two ranks that end right after a collective: `python -m tests.scale.short_groups COUNT` prints how each rank ended.

One process imports torch and forks the ranks, so a group takes a fraction of a second. Each rank ends as a program does, by
the end of its main module, with references to its destroyed group left.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from agentfly.learn.ranks.environment import ThisRank
from agentfly.learn.ranks.group import RankGroup
from agentfly.training.ranks.process import free_port

kept: list[Any] = []


def fork_rank(port: int) -> tuple[list[int], ThisRank | None]:
    """Returns the pids of two new ranks, and in a rank which it is."""
    pids = []
    for rank in range(2):
        pid = os.fork()
        if not pid:
            return [], ThisRank(rank, 2, rank, 2, f"127.0.0.1:{port}")
        pids.append(pid)
    return pids, None


def use_group(this: ThisRank) -> None:
    group = RankGroup.join(this, "cpu", 120.0)
    kept.append(dist.group.WORLD)
    for _ in range(20):
        group.sum(torch.ones(1000))
    sys.setswitchinterval(60.0)  # a busy machine: a thread that waits for the GIL gets it when this one waits, and not before
    group.sum(torch.ones(1000))
    group.close()


def main(count: int) -> None:
    torch.set_num_threads(1)
    statuses = []
    for _ in range(count):
        pids, this = fork_rank(free_port())
        if this is not None:
            use_group(this)
            return
        statuses += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    print(json.dumps(statuses))


if __name__ == "__main__":
    main(int(sys.argv[1]))
