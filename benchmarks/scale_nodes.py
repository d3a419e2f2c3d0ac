"""Environments over nodes: 10,000 of them on four nodes of a Ray cluster in one machine, with a scripted engine.

In: nothing. The program starts Ray itself, in its own network namespace where only loopback is up (Linux with unshare). Out: a
table, or with --json the figures by name, after each part:

    start      seconds until all environments stand, and how many the busiest and the idlest server have
    memory     PSS of the server processes, per environment, and what one environment adds
    leases     every environment is leased, then called, then given back, again and again: leases per second
    chains     whole chains with a scripted engine, two calls each, as many at once as there are environments; a reply takes
               5 seconds, so the figure to read is the driver's processor time
    loss       the same, while one node is killed: chains that failed, and how long until all environments stand again

It fails if anything is lost: an environment that is not given back, a call without its answer, a chain without an outcome.

    python benchmarks/scale_nodes.py --json out.json
    python benchmarks/scale_nodes.py --environments 400 --nodes 2 --rounds 2
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import gc
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import agentfly
from agentfly.resources import spec_of
from agentfly.rollout import make_plan, open_environments, run_chains
from agentfly.testing import ByteRenderer, GuessEnv, ScriptedEngine
from agentfly.types import Action, Completion, Request, Task, ToolCall

UNSHARE = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
TASK = Task("t", (), {"secret": 7})
CPUS_PER_NODE = 8
THINK_S = 5.0
"""What the engine takes for a reply: long enough that all chains hold an environment at the same time."""


@agentfly.tool(name="guess", register=False)
async def guess(n: int, env: GuessEnv) -> str:
    """Guess the number.

    Args:
        n: the guess
    """
    return await env.guess(n)  # type: ignore[misc, no-any-return]


@agentfly.reward(name="found")
def found(trajectory: Any) -> float:
    """Whether the last guess was right."""
    return float(any("correct" in str(turn.results) for turn in trajectory.turns))


def reply(request: Request) -> str:
    """Two guesses, then an answer."""
    text = bytes(token for token in request.prompt_ids if token < 256).decode()
    return ("4", "7", "end")[min(2, text.count("Observation"))]


class Guesses(agentfly.BaseAgent):
    """Guesses 4 and 7, and ends."""

    def parse(self, completion: Completion) -> Action:
        """A guess, or the end."""
        if completion.text == "end":
            return Action(answer="end")
        return Action(calls=(ToolCall("guess", {"n": int(completion.text)}),))


def pss_mb(pids: list[int]) -> float:
    """The proportional set size of some processes: what they share is counted once."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1])
    return total / 1024


def host_pids() -> list[int]:
    """The processes of the environment servers."""
    found_pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        if b"environment-server" in path.read_bytes():
            found_pids.append(int(path.parent.name))
    return found_pids


class Nodes:
    """The nodes of a Ray cluster in this machine; the first holds no environments."""

    def __init__(self, count: int) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=False)
        self._nodes: dict[str, Any] = {}
        for name in ["head", *(f"node-{number}" for number in range(count))]:
            more = {} if self._nodes else {"include_dashboard": False}
            cpus = CPUS_PER_NODE if self._nodes else 0
            self._nodes[name] = self._cluster.add_node(
                node_name=name, num_cpus=cpus, object_store_memory=80 << 20, memory=2 << 30, **more
            )
        self.address = str(self._cluster.address)

    def kill(self, name: str) -> None:
        """End all processes of a node without notice."""
        roots = [info.process.pid for infos in self._nodes[name].all_processes.values() for info in infos]
        children: dict[int, list[int]] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            children.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
        doomed = list(roots)
        for pid in doomed:
            doomed += children.get(pid, [])
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)


class Benchmark:
    """One run: figures by name."""

    def __init__(self, environments: int, nodes: int, rounds: int) -> None:
        self.environments, self.num_nodes, self.rounds = environments, nodes, rounds
        self.figures: dict[str, float] = {}

    def put(self, name: str, value: float) -> None:
        self.figures[name] = round(value, 4)
        print(f"{name:44} {value:12.3f}", flush=True)

    async def run(self) -> None:
        from agentfly.fleet.node_launcher import NodeLauncher
        from agentfly.fleet.ray_cluster import Cluster
        from agentfly.fleet.reservation import Share
        from agentfly.training.cluster.env_servers import EnvServers

        began = time.perf_counter()
        nodes = Nodes(self.num_nodes)
        self.put("start/ray_s", time.perf_counter() - began)
        agent = Guesses(
            ScriptedEngine(reply, delay_s=THINK_S),
            env=GuessEnv,
            tools=[guess],
            reward=found,
            max_turns=4,
            renderer=ByteRenderer(),
        )
        spec = spec_of(GuessEnv)
        with Cluster.connect(nodes.address, note=print) as cluster:
            began = time.perf_counter()
            # A killed node's server is placed on another node, so each has room for more than one.
            launcher = NodeLauncher(cluster, Share(1.0))
            async with EnvServers(launcher, [spec], self.num_nodes, cluster.own.address, note=print) as servers:
                self.put("start/hosts_s", time.perf_counter() - began)
                assert len({member.node for member in servers.fleet.live}) == self.num_nodes
                empty = pss_mb(host_pids())
                async with open_environments(agent, make_plan(agent), self.environments, directory=servers.directory) as plan:
                    await self.stand(plan.manager, servers)
                    self.memory(empty)
                    await self.lease_all(plan.manager)
                    await self.chains(plan)
                    await self.lose_a_node(plan, servers, nodes)
                assert list(servers.directory.counts.values()) == [0] * self.num_nodes, servers.directory.counts
                await asyncio.sleep(2)  # the servers report every second
                left = sum(member.instances for member in servers.fleet.live)
                assert left == 0, f"{left} environments are left"
        assert not host_pids()
        self.put("lost/environments_left", 0)

    async def stand(self, manager: Any, servers: Any) -> None:
        """Create all environments."""
        began = time.perf_counter()
        assert await manager.warm(GuessEnv, self.environments, 600.0) == self.environments
        self.put("start/environments_s", time.perf_counter() - began)
        counts = list(servers.directory.counts.values())
        assert sum(counts) == self.environments, counts
        self.put("start/most_on_a_host", max(counts))
        self.put("start/fewest_on_a_host", min(counts))

    def memory(self, empty: float) -> None:
        now = pss_mb(host_pids())
        self.put("memory/hosts_empty_mb", empty)
        self.put("memory/hosts_full_mb", now)
        self.put("memory/per_environment_kb", now / self.environments * 1024)
        self.put("memory/added_by_one_kb", (now - empty) / self.environments * 1024)

    async def lease_all(self, manager: Any) -> None:
        """All environments are leased, then all are called, then all are given back; several rounds."""
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(self.rounds):
            names = [f"chain {number}" for number in range(self.environments)]
            leases = await asyncio.gather(*(manager.acquire([GuessEnv], TASK, name, 600.0) for name in names))
            assert len(manager.holders()) == self.environments
            answers = Counter(await asyncio.gather(*(lease[GuessEnv].guess(7) for lease in leases)))
            assert answers == {"correct": self.environments}, answers
            for lease in leases:
                lease.release_now()
            assert manager.holders() == {}
        leased = self.rounds * self.environments
        self.put("leases/per_s", leased / (time.perf_counter() - began))
        self.put("leases/driver_cpu_us", (time.process_time() - cpu) / leased * 1e6)
        assert manager.metrics()["resources/total/allocated"] == 0

    async def chains(self, plan: Any) -> None:
        """As many chains at once as there are environments; each holds one while the engine takes its time."""
        plan.manager.mark()
        began, cpu = time.perf_counter(), time.process_time()
        chains = await self._run(plan, "a-")
        self.put("chains/per_s", len(chains) / (time.perf_counter() - began))
        self.put("chains/driver_cpu_us", (time.process_time() - cpu) / len(chains) * 1e6)
        self.put("chains/most_leased_at_once", plan.manager.metrics()["resources/total/most_allocated"])
        assert all(chain.reward == 1.0 for chain in chains), Counter(chain.outcome.value for chain in chains)

    async def _run(self, plan: Any, prefix: str) -> list[Any]:
        tasks = [Task(str(number), (agentfly.Message("user", "guess"),), {"secret": 7}) for number in range(self.environments)]
        return await run_chains(plan, tasks, num_chains=1, max_concurrency=self.environments, prefix=prefix)

    async def lose_a_node(self, plan: Any, servers: Any, nodes: Nodes) -> None:
        manager = plan.manager
        victim = servers.fleet.live[0]
        name = victim.node
        on_it = next(count for server, count in servers.directory.counts.items() if server.url == victim.url)
        running = asyncio.ensure_future(self._run(plan, "b-"))
        while len(manager.holders()) < 0.9 * self.environments:  # noqa: ASYNC110 - a benchmark
            await asyncio.sleep(0.1)
        began = time.perf_counter()
        nodes.kill(name)
        await victim.ended
        self.put("loss/noticed_s", time.perf_counter() - began)
        chains = await running
        failed = [chain.outcome.value == "world_failure" for chain in chains]
        assert len(chains) == self.environments
        assert all(lost or chain.reward == 1.0 for chain, lost in zip(chains, failed, strict=True))
        assert sum(failed) <= on_it, (sum(failed), on_it)
        assert manager.holders() == {}
        self.put("loss/environments_lost", on_it)
        self.put("loss/chains_failed", sum(failed))
        assert await manager.warm(GuessEnv, self.environments, 600.0) == self.environments
        while len(servers.fleet.live) < self.num_nodes:  # noqa: ASYNC110 - a benchmark
            await asyncio.sleep(0.05)
        self.put("loss/all_stand_again_s", time.perf_counter() - began)


def loopback_up() -> None:
    """Bring up loopback, the only interface of this namespace."""
    interfaces = [name for _, name in socket.if_nameindex()]
    assert interfaces == ["lo"], f"not in a network namespace of its own: {interfaces}"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        flags = struct.unpack("16sh", fcntl.ioctl(control, 0x8913, struct.pack("16sh", b"lo", 0))[:18])[1]
        fcntl.ioctl(control, 0x8914, struct.pack("16sh", b"lo", flags | 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="how often all environments are leased")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(options.environments, options.nodes - 1, options.rounds) < 1:
        parser.error("--environments and --rounds are at least 1, --nodes at least 2")
    if not options.inside:
        with tempfile.TemporaryDirectory(prefix="agentfly-ray-") as folder:
            environ = {**os.environ, "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
            words = [*UNSHARE, sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--inside"]
            sys.exit(subprocess.run(words, env=environ, check=False).returncode)
    loopback_up()
    gc.freeze()
    benchmark = Benchmark(options.environments, options.nodes, options.rounds)
    asyncio.run(benchmark.run())
    if options.json is not None:
        options.json.write_text(json.dumps(benchmark.figures, indent=1) + "\n", encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # the kernel ends the cluster with this namespace


if __name__ == "__main__":
    main()
