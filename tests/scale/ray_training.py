"""What `test_ray_samplers.py` does inside its namespace: trainings whose samplers run on the nodes of a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agentfly
from agentfly.cli import main
from agentfly.errors import ConfigError
from agentfly.fleet.node_launcher import NodeLauncher
from agentfly.fleet.ray_cluster import Cluster
from agentfly.health import diagnose
from agentfly.runs import RunStore
from agentfly.runs.checkpoints import list_checkpoints
from agentfly.training.cluster import current_cluster, on_cluster
from agentfly.training.cluster.checks import sampler_launcher
from agentfly.training.cluster.status import show_status
from agentfly.training.evaluation import evaluate_run
from agentfly.training.loop import Trainer
from agentfly.training.workers import engine as engine_module
from agentfly.training.workers.engine import WorkerEngine
from agentfly.training.workers.weights import Kind, Senders
from agentfly.watch.metrics import unknown
from tests.scale.ray_local import PATIENCE_S, LocalCluster, run_all, running, wait_for
from tests.tiny import ROWS, save_tiny_model

WORKER = "member_main.py"
folder: Path


def scenarios(local: LocalCluster, path: str, *names: str) -> dict[str, str]:
    global folder
    folder = Path(path)
    save_tiny_model(folder / "model")
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    local.add("head", cpus=0)
    local.add("b", "c", "d", cpus=2)
    every = [sentences, driver_killed, evaluation, nodes_die]
    return run_all(local, [each for each in every if not names or each.__name__ in names])


def config_of(local: LocalCluster, name: str, **more: dict[str, Any]) -> agentfly.Config:
    tree: dict[str, Any] = {
        "agent": {
            "kind": "tests.scale.slow_agent:Slow", "model": str(folder / "model"), "tools": ["tests.scale.slow_agent:look"],
            "reward": "tests.tiny:even", "max_turns": 3,
        },
        "sampling": {"max_tokens": 12},
        "data": {"train": str(folder / "rows.jsonl"), "validation_count": 4},
        "rollout": {"num_tasks": 4, "num_chains": 2},
        "train": {"steps": 30, "lr": 1e-2, "validate_every": 0, "validate_at_start": False, "max_failed_share": 1.0},
        "run": {"dir": str(folder / "runs"), "name": name},
        "sampler": {"replicas": 2},
        "cluster": {"address": local.address, "health_s": 4.0},
    }  # fmt: skip
    for section, keys in more.items():
        tree[section] = {**tree.get(section, {}), **keys}
    return agentfly.Config.from_dict(tree)


def stored(run: Path) -> dict[str, Any]:
    with RunStore(run / "run.db", readonly=True) as store:
        found = store.trajectories(split="train", limit=9999)
    assert len({each.id for each in found}) == len(found), "a chain was stored twice"
    return {each.id: each for each in found}


def check_books(result: Any, steps: int, chains: int) -> None:
    """No chain was trained twice, and none is missing."""
    found = stored(result.directory)
    assert len(found) == steps * chains
    last = result.history[-1]
    assert last["ledger/drawn"] == steps * chains / 2
    assert last["ledger/in_flight"] == 0
    assert last["workers/lost_chains"] == sum(each.outcome.value == "world_failure" for each in found.values())
    assert not unknown(name for metrics in result.history for name in metrics)
    problems = [check.problems for check in diagnose(result.directory).checks if not check.ok]
    assert not problems, problems


def sentences(local: LocalCluster) -> None:
    """What is wrong with a cluster is said in a sentence, before a run trains."""
    with pytest.raises(ConfigError, match=r"no Ray cluster answers at 127\.0\.0\.1:9 after 1 s \(Connection refused\)"):
        Cluster.connect("127.0.0.1:9", timeout_s=1.0)
    with pytest.raises(ConfigError, match="host:port of the head of a Ray cluster"):
        Cluster.connect("ray://127.0.0.1:9")
    config = config_of(local, "refused")
    with on_cluster(config, print) as cluster:
        assert current_cluster() is cluster
        many = config_of(local, "refused", sampler={"replicas": 9})
        with pytest.raises(ConfigError, match="9 samplers with 1 CPU each do not fit the cluster, which has room for 6"):
            agentfly.train(many)
        own = config_of(local, "refused", sampler={"place": "own"})
        with pytest.raises(ConfigError, match="2 samplers with 1 CPU and 1 GPU each do not fit .* room for 0"):
            agentfly.train(own)
        launcher = sampler_launcher(cluster, config, folder / "logs")
        with pytest.raises(ConfigError, match=r"node \w+ cannot reach the trainer at 127\.0\.0\.1:9 .*refused.*firewall"):
            launcher.start(0, {"name": "sampler 0", "index": 0, "address": ["127.0.0.1", 9], "attempt": 0})
        launcher.close()
        wait_for(lambda: not cluster.reserved(), what="that its reservation is gone")
    assert not (folder / "runs" / "refused").exists(), "a run that was refused leaves no folder"
    assert current_cluster() is None


def driver_killed(local: LocalCluster) -> None:
    """The trainer is killed: nothing of it is left on the nodes, and the run can be resumed. Others see what it has there."""
    one = {"replicas": 1, "place": "process"}
    config = config_of(local, "killed", train={"steps": 500, "save_every": 4}, sampler=one)
    (folder / "killed.toml").write_text(config.to_toml())
    run = folder / "runs" / "killed"
    with (folder / "log").open("wb") as log:
        driver = subprocess.Popen(
            [sys.executable, "-m", "agentfly", "train", str(folder / "killed.toml")], stdout=log, stderr=log
        )
    try:
        wait_for(lambda: driver.poll() is not None or list_checkpoints(run / "checkpoints"), what="a checkpoint")
        assert driver.poll() is None, (folder / "log").read_text()[-3000:]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert main(["cluster", "status", "--address", local.address, "--json"]) == 0
        status = json.loads(printed.getvalue())
        assert driver.poll() is None, "the run ended before its status was read"
    finally:
        driver.kill()
        driver.wait()
    (only,) = status["runs"]
    assert only["directory"] == str(run)
    assert only["processes"] == [{"name": "sampler 0", "node": only["processes"][0]["node"]}]
    assert only["samplers"] == 1
    nodes = {node["name"]: node for node in status["nodes"]}
    assert list(nodes) == ["b", "c", "d", "head"]
    assert sum(node["samplers"] for node in nodes.values()) == 1
    assert nodes[only["processes"][0]["node"]]["cpus"] == [1.0, 2.0]
    text = show_status(status)
    print(text, flush=True)
    assert f"run {run}, step " in text
    assert f"samplers: 1 on {only['processes'][0]['node']}\n" in text
    began = time.monotonic()
    wait_for(lambda: not running(WORKER) and not running("NodeActor"), what="that the nodes are empty")
    print(f"the nodes were empty after {time.monotonic() - began:.1f} s", flush=True)
    steps = int(list_checkpoints(run / "checkpoints")[-1].name.rpartition("-")[2]) + 4
    places: list[str] = []
    ways: list[str] = []
    start, sender, collect = NodeLauncher.start, Senders._make, Trainer._collect

    def started(self: NodeLauncher, *values: Any) -> Any:
        process = start(self, *values)
        places.append(f"{process.reservation.about['pid']} {process.node}")
        return process

    def sent(self: Senders, kind: Kind, device: Any) -> Any:
        ways.append(kind)
        return sender(self, kind, device)

    async def kill_once(self: Trainer, step: int) -> Any:
        if step == steps - 2:
            os.kill(running(WORKER)[0], signal.SIGKILL)
        return await collect(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NodeLauncher, "start", started)
        patch.setattr(Senders, "_make", sent)
        patch.setattr(Trainer, "_collect", kill_once)
        again = config_of(local, "killed", train={"steps": steps, "save_every": 4}, sampler=one)
        result = agentfly.train(again, resume=run)
    assert set(ways) == {"memory"}, "a worker on the trainer's machine reads the weights from memory"
    assert len(places) == 2
    assert len(set(places)) == 1, "a worker that died alone starts again on its host"
    assert result.history[-1]["workers/restarts"] == 1
    assert result.steps == steps
    check_books(result, steps, 8)
    wait_for(lambda: not running(WORKER), what="that no worker is left")


def evaluation(local: LocalCluster) -> None:
    """An evaluation uses the samplers of the cluster, and leaves nothing there."""
    config = config_of(local, "held", sampler={"replicas": 1, "place": "process"})
    done = evaluate_run(config, num_chains=2)
    assert len(done.trajectories) == 8
    assert {each.outcome.value for each in done.trajectories} == {"max_turns"}
    wait_for(lambda: not running(WORKER) and not running("NodeActor"), what="that the nodes are empty")


def nodes_die(local: LocalCluster) -> None:
    """One node is killed and one is frozen while a run samples ahead; weights go by broadcast, as between machines."""
    harmed: list[tuple[str, float]] = []
    original_engine, original_collect = engine_module.WorkerEngine, Trainer._collect
    engines: list[WorkerEngine] = []
    draws = random.Random(time.time_ns())

    def made(config: agentfly.Config, **options: Any) -> WorkerEngine:
        engines.append(original_engine(config, transport="broadcast", **options))
        return engines[-1]

    def joined() -> bool:
        return (pool := engines[0].pool) is None or all(each.live for each in pool.replicas)

    def harm(how: Callable[[str], None]) -> None:
        pool: Any = engines[0].pool
        until = time.monotonic() + draws.uniform(0.5, 2.0)
        while not (busy := [name for name, chains in pool.chains_by_node().items() if chains]) and time.monotonic() < until:
            time.sleep(0.005)
        name = draws.choice(busy or list(pool.chains_by_node()))
        how(name)
        began = time.monotonic()
        wait_for(lambda: not joined(), what="that the loss is noticed")
        harmed.append((name, time.monotonic() - began))
        print(f"{how.__name__} {name}, noticed after {harmed[-1][1]:.1f} s", flush=True)

    async def collect(self: Trainer, step: int) -> Any:
        if step in (6, 14, 22):
            async with asyncio.timeout(PATIENCE_S):
                while len(harmed) < (step - 6) // 8 or not joined():
                    await asyncio.sleep(0.1)
            if step < 22:
                threading.Timer(draws.uniform(0, 1.0), harm, [local.kill if step == 6 else local.freeze]).start()
        if step < 22:
            await asyncio.sleep(0.1)
        return await original_collect(self, step)

    engine_module.WorkerEngine, Trainer._collect = made, collect  # type: ignore[misc, method-assign]
    try:
        result = agentfly.train(config_of(local, "harmed", rollout={"max_lag": 2, "depth": 1}, train={"steps": 30}))
    finally:
        engine_module.WorkerEngine, Trainer._collect = original_engine, original_collect  # type: ignore[misc, method-assign]
    assert len(harmed) == 2
    check_books(result, 30, 8)
    last = result.history[-1]
    shown = [
        (name.split("/")[2], value) for row in result.history for name, value in row.items() if name.startswith("cluster/")
    ]
    told = sum(value for name, value in shown if name == "chains")
    assert told == 240 - last["workers/lost_chains"], told
    assert sum(value for name, value in shown if name == "samplers") <= 2 * 30
    assert sum(value for name, value in shown if name == "cpus") <= 2 * 30
    assert last["workers/restarts"] >= 2
    assert last["handover/replicas"] == 2
    assert {last["handover/replica/0/version"], last["handover/replica/1/version"]} == {last["train/version"] + 1}
    print({name: value for name, value in last.items() if name.startswith(("workers/", "handover/", "cluster/"))}, flush=True)
    print(Counter(each.outcome.value for each in stored(result.directory).values()), flush=True)
    frozen = set(local.processes(harmed[1][0]))
    wait_for(lambda: not set(running(WORKER)) - frozen, what="that no worker is left on a node that lives")
    local.thaw(harmed[1][0])
    wait_for(lambda: not running(WORKER), what="that no worker is left on the node that thawed")
