"""What `test_ray_ranks.py` does inside its namespace: whole runs with two learner ranks over three nodes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.scale.held import checkpoint, hold_after, release, variables
from tests.scale.ray_local import PATIENCE_S, LocalCluster, run_all, running, wait_for

PARENT = "member_main.py"
state: dict[str, Any] = {}


def scenarios(local: LocalCluster, folder: str, seed: int) -> dict[str, str]:
    local.add("a", "b", "c", cpus=2)
    state.update(folder=Path(folder), random=random.Random(seed))
    return run_all(
        local,
        [too_many_ranks, folder_not_shared, node_killed, node_frozen, driver_killed, resumed],
    )


def start(local: LocalCluster, *words: str, log: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start `agentfly train`. What it prints goes to a file."""
    command = [sys.executable, "-m", "agentfly", "train", *words]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **variables(state["folder"])}
    with (state["folder"] / log).open("wb") as output:
        return subprocess.Popen(command, env=environ, stdout=output, stderr=subprocess.STDOUT, **options)


def recipe(local: LocalCluster, *words: str) -> list[str]:
    return [f"{state['folder']}/run.toml", f"cluster.address={local.address}", "cluster.health_s=4", *words]


def told(log: str) -> str:
    return (state["folder"] / log).read_text(encoding="utf-8", errors="replace")


def wait_for_step(process: subprocess.Popen[bytes], name: str, step: int, log: str) -> None:
    """Wait for a checkpoint and then for a random part of the next step. The run is held after that one at the latest."""
    folder = state["folder"]
    hold_after(folder, name, step)

    def there() -> bool:
        assert process.poll() is None, told(log)[-3000:]
        return checkpoint(folder, name, step).is_dir()

    wait_for(there, PATIENCE_S, f"checkpoint {step}")
    time.sleep(state["random"].uniform(0.0, 0.4))


def node_of_rank_1(local: LocalCluster) -> str:
    (parent,) = running(PARENT)
    return next(name for name in local.nodes if parent in local.processes(name))


def too_many_ranks(local: LocalCluster) -> None:
    process = start(local, *recipe(local, "run.name=many", "learner.ranks=7"), log="many.log")
    assert process.wait(PATIENCE_S) == 2, told("many.log")
    said = told("many.log")
    assert "error: 7 learner ranks with 1 CPU each do not fit the cluster, which has room for 6 (node a has " in said, said
    assert "Traceback" not in said
    assert not (state["folder"] / "many").exists()


def folder_not_shared(local: LocalCluster) -> None:
    """A path that leads to a folder in the driver's process alone, as an unshared disk does on a machine."""
    here = os.open(state["folder"], os.O_RDONLY)
    words = recipe(local, "run.name=apart", "learner.ranks=2", f"run.dir=/proc/self/fd/{here}/apart")
    process = start(local, *words, log="apart.log", pass_fds=[here])
    assert process.wait(PATIENCE_S) == 2, told("apart.log")
    os.close(here)
    sentence = f"error: folder /proc/self/fd/{here}/apart is not the same folder on node "
    assert sentence in told("apart.log"), told("apart.log")
    assert ": put run.dir on a shared file system\n" in told("apart.log")
    assert not list((state["folder"] / "apart").iterdir())


def node_killed(local: LocalCluster) -> None:
    hold_after(state["folder"], "lost", 2)
    state["run"] = start(local, *recipe(local, "run.name=lost", "learner.ranks=2", "train.keep_checkpoints=99"), log="lost.log")
    wait_for_step(state["run"], "lost", 2, "lost.log")
    state["first"] = node_of_rank_1(local)
    assert state["first"] != "a"  # where rank 0 has its share
    local.kill(state["first"])
    wait_for(lambda: "(restart 1 of 3)" in told("lost.log"), what="that the loss is noticed")
    assert f"rank 1 was lost with its node {state['first']}" in told("lost.log") or "rank 1 was lost on node" in told(
        "lost.log"
    )


def node_frozen(local: LocalCluster) -> None:
    wait_for_step(state["run"], "lost", 4, "lost.log")
    state["second"] = node_of_rank_1(local)
    assert state["second"] not in ("a", state["first"])
    local.freeze(state["second"])
    began = time.monotonic()  # a connection to a frozen node stands for minutes: silence alone shows the loss
    wait_for(lambda: "(restart 2 of 3)" in told("lost.log"), what="that the freeze is noticed")
    print(f"noticed after {time.monotonic() - began:.1f} s", flush=True)


def driver_killed(local: LocalCluster) -> None:
    wait_for_step(state["run"], "lost", 6, "lost.log")
    frozen = set(local.processes(state["second"]))
    left = set(running(PARENT)) - frozen
    assert len(left) == 1  # on the only node that is left, beside rank 0
    state["run"].kill()
    state["run"].wait()
    wait_for(lambda: not set(running(PARENT)) - frozen, what="that no parent is left")
    wait_for(lambda: not set(running("run.name=lost")) - frozen, what="that no rank is left")
    local.thaw(state["second"])
    wait_for(lambda: not running(PARENT) and not running("run.name=lost"), what="that nothing is left on a node that thaws")


def resumed(local: LocalCluster) -> None:
    release(state["folder"])
    process = start(local, "--resume", f"{state['folder']}/lost", log="resumed.log")
    assert process.wait(PATIENCE_S) == 0, told("resumed.log")[-3000:]
    assert not running(PARENT)
