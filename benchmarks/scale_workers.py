"""The worker processes of `scale.py`: chains per second over replicas, and how fast weights reach them."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentfly.build import build_agent, build_plan
from agentfly.config import Config
from agentfly.data import load_tasks
from agentfly.resources import Admission
from agentfly.rollout import open_environments, run_chains
from agentfly.training.workers.launcher import LocalLauncher
from agentfly.training.workers.pool import WorkerPool

HERE = Path(__file__).parent


def config_of(agent: str, count: int) -> Config:
    """The config of a run with `count` worker processes; 0: with none."""
    sampler = {"replicas": count, "place": "process"} if count else {}
    return Config.from_dict({"agent": {"kind": f"{HERE}/scale_agents.py:{agent}"}, "sampling": {"seed": 1}, "sampler": sampler})


@asynccontextmanager
async def workers(config: Config) -> AsyncIterator[WorkerPool]:
    """The worker processes of a config."""
    opening = {"config": config.to_toml(), "count": config.sampler.replicas, "threads": 1, "chains": 1}
    with tempfile.TemporaryDirectory() as folder:
        async with WorkerPool(LocalLauncher(Path(folder)), config.sampler.replicas, opening) as pool:
            yield pool


async def _chains_per_s(count: int, median_s: float, num_chains: int) -> float:
    config = config_of("Waits", count)
    agent = build_agent(config)
    plan = build_plan(config, agent)
    tasks = load_tasks([{"question": f"{i}: median {median_s} s"} for i in range(num_chains)])

    async def measure(ready: Any) -> float:
        most = ready.admission.limit
        await run_chains(ready, tasks[:16], num_chains=1, max_concurrency=most, prefix="warm-")
        began = time.perf_counter()
        await run_chains(ready, tasks, num_chains=1, max_concurrency=most)
        return num_chains / (time.perf_counter() - began)

    if not count:
        async with open_environments(agent, plan, None) as ready:
            return await measure(ready)
    async with workers(config) as pool:
        admission = Admission(pool.room)
        pool.on_room(admission.wake)
        return await measure(replace(plan, runner=pool, admission=admission))


def replicas(counts: list[int]) -> dict[str, float]:
    """Chains per second, with long tool calls and without any, in this process (0) and in so many workers.

    Each engine serves 64 chains at once. With long calls that is the limit; without, the CPU and the messages are.
    """
    found = {}
    for count in [0, *counts]:
        found[f"replicas/{count}/chains_per_s_long_tools"] = asyncio.run(_chains_per_s(count, 0.25, 1024))
        found[f"replicas/{count}/chains_per_s_no_wait"] = asyncio.run(_chains_per_s(count, 0.0, 1000))
    return found


async def _handover(kind: str, count: int, num_bytes: int, times: int = 5) -> float:
    import torch

    from agentfly.training.workers.weights import BroadcastSender, MemorySender

    size = 1 << 22
    model = [(f"w{i}", torch.randn(size // 4)) for i in range(num_bytes // size)]
    buckets = [model[i : i + 16] for i in range(0, len(model), 16)]
    async with workers(config_of("Sink", count)) as pool:
        memory, broadcast = MemorySender(), BroadcastSender(torch.device("cpu"))

        def send(version: int) -> None:
            if kind == "memory":
                memory.write(buckets)
                memory.send(version, pool.replicas)
            else:
                broadcast.send(version, pool.replicas, lambda: buckets)

        await asyncio.to_thread(send, 1)  # allocates, and makes the group
        began = time.perf_counter()
        for version in range(2, 2 + times):
            await asyncio.to_thread(send, version)
        took = (time.perf_counter() - began) / times
        memory.close()
        broadcast.close()
    return num_bytes * count / took / 1e9


def handover(counts: list[int], num_bytes: int = 256 << 20) -> dict[str, float]:
    """GB/s of weights that reach the workers, all of them together, through shared memory and by broadcast (gloo)."""
    return {
        f"handover/{kind}/{count}/gb_per_s": asyncio.run(_handover(kind, count, num_bytes))
        for kind in ("memory", "broadcast")
        for count in counts
    }
