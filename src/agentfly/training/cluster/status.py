"""Who uses the nodes of a cluster: for the metrics of a run, and for `agentfly cluster status` in any process.

A run publishes what it does (folder, step, chains, pools) every few seconds. Which processes it has on which node is read from
Ray, so that it is right whatever the run last said.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...errors import AgentFlyError
from ...fleet.ray_cluster import Cluster
from . import current_cluster

KINDS = {"sampler": "samplers", "environment server": "env_hosts", "rank": "ranks"}
"""How processes are counted, by their names without the number."""
WORDS = {"samplers": "sampler", "env_hosts": "environment server", "ranks": "learner rank"}
EVERY_S = 2.0
POOL_FIGURES = ("allocated", "idle", "warming", "waiting", "failed")

_published_at = 0.0


def kind_of(name: str) -> str:
    """What the process "sampler 3" is counted as; "" if it is not counted."""
    return KINDS.get(name.rpartition(" ")[0], "")


def cluster_metrics() -> dict[str, float]:
    """What this run has on each node now; nothing without a cluster."""
    cluster = current_cluster()
    metrics: dict[str, float] = {}
    for reservation in [] if cluster is None else cluster.reservations():
        node, kind = f"cluster/{reservation.node.name}", kind_of(reservation.name)
        added = {"cpus": reservation.share.cpus, **({kind: 1.0} if kind in ("samplers", "env_hosts") else {})}
        for name, value in added.items():
            metrics[f"{node}/{name}"] = metrics.get(f"{node}/{name}", 0.0) + value
    return metrics


async def publish_status(directory: Path, step: int, runner: object, figures: Mapping[str, float]) -> None:
    """Tell the cluster what this run does, every EVERY_S seconds. Does nothing without a cluster.

    `figures` are those of the environments (`resources/POOL/NAME`).
    """
    global _published_at
    cluster, now = current_cluster(), time.monotonic()
    if cluster is None or now - _published_at < EVERY_S:
        return
    _published_at = now
    pools: dict[str, dict[str, float]] = {}
    for name, value in figures.items():
        parts = name.split("/")
        if len(parts) == 3 and parts[0] == "resources" and parts[2] in POOL_FIGURES and parts[1] != "total":
            pools.setdefault(parts[1], {})[parts[2]] = value
    chains = runner.chains_by_node() if hasattr(runner, "chains_by_node") else {}
    record = {"directory": str(directory), "step": step, "chains": chains, "pools": pools}
    await asyncio.to_thread(_tell, cluster, record)


def _tell(cluster: Cluster, record: Mapping[str, Any]) -> None:
    try:
        cluster.tell(record)
    except (AgentFlyError, RuntimeError) as error:
        cluster.note(f"the cluster does not take the status of this run: {error}")


def read_status(cluster: Cluster) -> dict[str, Any]:
    """The nodes with what is free and what is reserved there, and the runs that use them."""
    reserved = [each for each in cluster.reserved() if kind_of(each.name)]
    records = cluster.records()
    nodes = [
        {
            "name": node.name,
            "address": node.address,
            "alive": node.alive,
            "cpus": [node.free_cpus, node.cpus],
            "memory_gib": [round(node.free_memory_gib, 2), round(node.memory_gib, 2)],
            "gpus": [node.free_gpus, node.gpus],
            **_counts(each.name for each in reserved if each.node == node.name),
        }
        for node in sorted(cluster.nodes(), key=lambda each: each.name)
    ]
    runs = []
    for run in dict.fromkeys(each.run for each in reserved):
        own = [each for each in reserved if each.run == run]
        said = records.get(run) or {"directory": "", "step": 0, "chains": {}, "pools": {}}
        processes = [{"name": each.name, "node": each.node} for each in own]
        runs.append({**said, **_counts(each.name for each in own), "processes": processes})
    return {"nodes": nodes, "runs": runs}


def _counts(names: Iterable[str]) -> dict[str, int]:
    counts = Counter(map(kind_of, names))
    return {kind: counts[kind] for kind in WORDS}


def show_status(status: Mapping[str, Any]) -> str:
    """The status as text: a line per node, and for each run its processes, chains and pools."""
    lines = [f"{'node':<20} {'address':<16} {'CPUs free':>12} {'GiB free':>14} {'GPUs free':>10}  placed there"]
    for node in status["nodes"]:
        cpus, memory, gpus = (f"{node[key][0]:g} of {node[key][1]:g}" for key in ("cpus", "memory_gib", "gpus"))
        counts = [f"{node[kind]} {word}{'s' * (node[kind] > 1)}" for kind, word in WORDS.items() if node[kind]]
        there = ", ".join(counts) or ("-" if node["alive"] else "dead")
        lines.append(f"{node['name']:<20} {node['address']:<16} {cpus:>12} {memory:>14} {gpus:>10}  {there}")
    if not status["runs"]:
        lines.append("no run of AgentFly has a process on this cluster")
    for run in status["runs"]:
        lines.append(f"\nrun {run['directory'] or '(is starting)'}, step {run['step']}")
        for kind, word in WORDS.items():
            where = Counter(process["node"] for process in run["processes"] if kind_of(process["name"]) == kind)
            if where:
                lines.append(f"  {word}s: {', '.join(f'{count} on {node}' for node, count in sorted(where.items()))}")
        if run["chains"]:
            lines.append(f"  chains: {', '.join(f'{count:g} on {node}' for node, count in sorted(run['chains'].items()))}")
        for name, figures in sorted(run["pools"].items()):
            text = ", ".join(f"{value:g} {figure}" for figure, value in figures.items())
            lines.append(f"  pool {name}: {text}")
    return "\n".join(lines) + "\n"
