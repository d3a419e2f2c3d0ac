"""What `test_ray_env_servers.py` does inside its namespace: trainings whose environments live on nodes that are lost."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import threading
import time
import traceback
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import agentfly
from agentfly.health import diagnose
from agentfly.runs import RunStore
from agentfly.training.cluster import env_servers
from agentfly.training.loop import Trainer
from agentfly.types import Outcome, Trajectory
from tests.scale.ray_local import LocalCluster, run_all, running, wait_for
from tests.tiny import ROWS, save_tiny_model

SERVERS = 3
made: list[Watched] = []
drawn = random.Random()


class Watched(env_servers.EnvServers):
    """Environment servers that a scenario can look at from another thread."""

    def __init__(self, *values: Any, **more: Any) -> None:
        super().__init__(*values, **more)
        made.append(self)

    def nodes(self) -> dict[str, env_servers.ServerMember]:
        return {member.node: member for member in self.fleet.live}


def all_ended(members: list[env_servers.ServerMember]) -> bool:
    return all(member.ended.done() for member in members)


def scenarios(local: LocalCluster) -> dict[str, str]:
    seed = int(time.time())
    print("seed", seed, flush=True)
    drawn.seed(seed)
    local.add("head", cpus=0)
    local.add("b", "c", "d", cpus=4)
    env_servers.EnvServers = Watched  # type: ignore[misc]
    return run_all(local, [samplers_hear_of_a_new_server, nodes_killed_and_frozen])


def nodes_killed_and_frozen(local: LocalCluster) -> None:
    """Chains run in the trainer; the node of one server is killed at a random moment, that of another is frozen."""
    told: list[str] = []

    def harm(folder: Path) -> None:
        (servers,) = made
        wait_for(lambda: len(servers.fleet.live) == SERVERS and sum(member.instances for member in servers.fleet.live) >= 12)
        assert len(servers.nodes()) == SERVERS
        for how, attack in (("killed", local.kill), ("frozen", local.freeze)):
            time.sleep(drawn.uniform(0.0, 2.0))
            name = drawn.choice(sorted(servers.nodes()))
            lost = [member for member in servers.fleet.live if member.node == name]
            print(how, name, len(lost), "servers with", sum(member.instances for member in lost), "environments", flush=True)
            began = time.monotonic()
            attack(name)
            wait_for(partial(all_ended, lost), what=f"that {name} is found lost")
            noticed_s = time.monotonic() - began
            print("noticed after", round(noticed_s, 1), "s:", lost[0].ended.result(), flush=True)
            wait_for(lambda: len(servers.fleet.live) == SERVERS, what="that all servers live again")
            print("replaced after", round(time.monotonic() - began, 1), "s on", sorted(servers.nodes()), flush=True)
            told.append(name)
            assert name not in servers.nodes()

    chains, result = train(local, harm, steps=20, cluster={"env_hosts": SERVERS})
    failed = [chain for chain in chains if chain.outcome is Outcome.WORLD_FAILURE]
    print("chains", Counter(chain.outcome.value for chain in chains), {chain.error for chain in failed}, flush=True)
    assert failed, "no chain was on a server that was lost"
    assert all("environment server" in str(chain.error) for chain in failed)
    assert result.history[-1]["resources/Room/failed"] >= len(failed)
    local.thaw(told[-1])
    wait_for(lambda: not running("environment-server"), what="that nothing is left, also on the node that thaws")


def samplers_hear_of_a_new_server(local: LocalCluster) -> None:
    """Chains run in sampler processes; the process of a server is killed, and the samplers use the one that takes its place."""

    def harm(folder: Path) -> None:
        (servers,) = made
        wait_for(lambda: len(servers.fleet.live) == 2 and sum(member.instances for member in servers.fleet.live) >= 8)
        time.sleep(drawn.uniform(0.0, 1.0))
        os.kill(drawn.choice(running("environment-server")), signal.SIGKILL)
        wait_for(lambda: servers.fleet.restarts == 1)
        wait_for(
            lambda: len(servers.fleet.live) == 2 and min(member.instances for member in servers.fleet.live) > 0,
            what="a share of each server",
        )

    chains, _ = train(
        local, harm, steps=15, cluster={"env_hosts": 2}, sampler={"replicas": 2, "place": "process"}, rollout={"num_tasks": 4}
    )
    failed = [chain for chain in chains if chain.outcome is Outcome.WORLD_FAILURE]
    print("chains", Counter(chain.outcome.value for chain in chains), {chain.error for chain in failed}, flush=True)
    assert all("environment server" in str(chain.error) for chain in failed)
    wait_for(lambda: not running("environment-server"), what="that nothing is left")


def train(local: LocalCluster, harm: Any, *, steps: int, **more: dict[str, Any]) -> tuple[list[Trajectory], Any]:
    """Train while `harm(folder)` runs in another thread. Returns the stored chains and the result, once the books balance."""
    made.clear()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tiny_model(folder / "model")
        (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
        tree: dict[str, Any] = {
            "agent": {
                "kind": "tests.scale.served_agent:Looks", "model": str(folder / "model"), "max_turns": 2,
                "tools": ["tests.scale.served_agent:look"], "reward": "tests.tiny:even", "env": "tests.scale.served_agent:Room",
            },
            "resources": {"pools": {"Room": {"options": {"folder": str(folder)}}}},
            "sampling": {"max_tokens": 8},
            "data": {"train": str(folder / "rows.jsonl"), "validation_count": 4},
            "rollout": {"num_tasks": 6, "num_chains": 2},
            "train": {"steps": steps, "lr": 1e-2, "validate_every": 0, "validate_at_start": False, "max_failed_share": 0.9},
            "run": {"dir": str(folder / "runs"), "name": "run", "threads": 1},
            "cluster": {"address": local.address, "health_s": 4.0},
        }  # fmt: skip
        for section, keys in more.items():
            tree[section] = {**tree.get(section, {}), **keys}
        errors: list[str] = []

        def work() -> None:
            try:
                wait_for(lambda: made)
                harm(folder)
            except BaseException:  # told below; without the file, the run would last for minutes
                errors.append(traceback.format_exc())
            finally:
                (folder / "fast").touch()

        original = Trainer._collect

        async def collect(self: Trainer, step: int) -> Any:
            if step == steps - 2:  # on a slow machine: the last steps last until the nodes have been harmed
                (folder / "hold").touch()
            return await original(self, step)

        Trainer._collect = collect  # type: ignore[method-assign]
        thread = threading.Thread(target=work)
        thread.start()
        try:
            result = agentfly.train(agentfly.Config.from_dict(tree))
        finally:
            Trainer._collect = original  # type: ignore[method-assign]
            ended_first = thread.is_alive()
            thread.join(200)
        assert not errors, errors[0]
        assert not ended_first, "the training ended before its nodes were harmed"
        check_books(result, tree)
        with RunStore(result.directory / "run.db", readonly=True) as store:
            return store.trajectories(split="train", limit=99_999), result


def check_books(result: Any, tree: dict[str, Any]) -> None:
    """Every task is trained, filtered or failed, no chain is stored twice, no lease is left, and the ledger's checks hold."""
    assert result.steps == tree["train"]["steps"]
    bad = [(check.name, check.problems) for check in diagnose(result.directory).checks if not check.ok]
    assert not bad, bad
    with RunStore(result.directory / "run.db", readonly=True) as store:
        names = [chain.id for chain in store.trajectories(split="train", limit=99_999)]
    assert len(names) == len(set(names)) == result.steps * tree["rollout"]["num_tasks"] * tree["rollout"]["num_chains"]
    last = result.history[-1]
    print({name: value for name, value in last.items() if name.startswith(("ledger/", "resources/Room"))}, flush=True)
    counted = sum(last[f"ledger/{name}"] for name in ("trained", "filtered", "failed", "in_flight"))
    assert sum(value for name, value in last.items() if name.endswith("/env_hosts")) == tree["cluster"]["env_hosts"]
    assert counted == last["ledger/drawn"] == result.steps * tree["rollout"]["num_tasks"]
