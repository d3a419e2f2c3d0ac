"""Whole runs on two ranks: started by the command or by torchrun, killed, frozen, stopped and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from agentfly.cli import main
from agentfly.runs import RunDirectory, RunStore
from agentfly.runs.checkpoints import latest_checkpoint
from agentfly.training.ranks.supervisor import resuming
from tests.close import ROUNDING, assert_close_to_norm
from tests.scale.held import checkpoint, hold_after, release, variables
from tests.tiny import ROWS, save_tiny_model

ROOT = Path(__file__).parent.parent.parent
PATIENCE_S = 240.0
STEPS = 6
pytestmark = pytest.mark.timeout(1200)  # a busy machine imports torch six times
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    model = save_tiny_model(folder / "model")
    (folder / "rows.json").write_text(json.dumps(ROWS))
    path = folder / "run.toml"
    path.write_text(
        f'[agent]\nkind = "tests.tiny:TwoTurns"\nmodel = "{model}"\ntools = ["tests.scale.held:look"]\n'
        f'reward = "tests.tiny:even"\nmax_turns = 2\n[sampling]\nmax_tokens = 6\n'
        f'[data]\ntrain = "{folder}/rows.json"\nvalidation_count = 2\n'
        f"[rollout]\nnum_tasks = 2\nnum_chains = 2\n[train]\nsteps = {STEPS}\nlr = 1e-3\nsave_every = 1\n"
        "keep_checkpoints = 99\nvalidate_every = 0\n"
        f'[run]\ndir = "{folder}"\nthreads = 1\n'
    )
    return path


@pytest.fixture(scope="module")
def alone(recipe: Path) -> dict[str, Any]:
    """The same run in one process."""
    assert main(["train", str(recipe), "run.name=alone"]) == 0
    return outcome(recipe.parent / "alone")


def outcome(run: Path) -> dict[str, Any]:
    """The metrics of each step, and the weights of the last checkpoint."""
    from safetensors.torch import load_file

    with RunStore(RunDirectory(run).database, readonly=True) as store:
        metrics = {(row.step, row.name): row.value for row in store.metrics()}
    checkpoint = latest_checkpoint(run)
    assert checkpoint.name == f"step-{STEPS:06d}"
    weights: dict[str, torch.Tensor] = {}
    for path in checkpoint.glob("*.safetensors"):
        weights |= load_file(path)
    return {"metrics": metrics, "weights": weights}


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    for step in range(1, STEPS + 1):
        for name in ("train/loss", "train/grad_norm", "rollout/reward", "train/logprob_gap"):
            if (step, name) in want["metrics"]:
                expected = pytest.approx(want["metrics"][step, name], rel=ROUNDING, abs=ROUNDING)
                assert got["metrics"][step, name] == expected, (step, name)
    for name, tensor in want["weights"].items():
        assert_close_to_norm(got["weights"][name], tensor, of=name)


def start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **variables(log.parent)}
    return subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log.open("wb"), stderr=subprocess.STDOUT)


def agentfly(*words: str) -> list[str]:
    return [sys.executable, "-m", "agentfly", *words]


def children(process: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def rank_of(process: int) -> str:
    """The rank of a process; empty if it has ended or not begun."""
    try:
        words = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((word.partition(b"=")[2].decode() for word in words if word.startswith(b"RANK=")), "")


def wait_for(what: Callable[[], Any], process: subprocess.Popen[bytes] | None = None) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if found := what():
            return found
        assert process is None or process.poll() is None, "the run ended before"
        time.sleep(0.05)
    raise AssertionError("waited too long")


def gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture
def ended() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that are killed after the test."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


@linux
def test_a_run_survives_a_killed_and_a_frozen_rank_and_equals_one_process(
    recipe: Path, alone: dict[str, Any], ended: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = recipe.parent
    run, log = folder / "killed", folder / "killed.log"
    hold_after(folder, "killed", 2)
    process = start(agentfly("train", str(recipe), "run.name=killed", "learner.ranks=2", "train.keep_checkpoints=9"), log)
    ended.append(process)
    wait_for(checkpoint(folder, "killed", 2).is_dir, process)
    first = {rank_of(child): child for child in children(process.pid)}
    os.kill(first["1"], signal.SIGKILL)
    second = wait_for(lambda: {rank_of(c): c for c in children(process.pid) if c not in first.values()}.get("1"), process)
    assert gone(first["0"])
    hold_after(folder, "killed", 4)
    wait_for(checkpoint(folder, "killed", 4).is_dir, process)
    os.kill(second, signal.SIGSTOP)
    release(folder)
    assert process.wait(PATIENCE_S) == 0, log.read_text()
    told = log.read_text()
    assert "rank 1 was killed by SIGKILL: all ranks are started again from the last checkpoint (restart 1 of 3)" in told
    assert "rank 1 is frozen: all ranks are started again from the last checkpoint (restart 2 of 3)" in told
    assert_same(outcome(run), alone)
    assert main(["doctor", str(run)]) == 0
    assert not list((run / "checkpoints").glob(".*"))
    out = recipe.parent / "exported"
    assert main(["export-model", str(run), str(out)]) == 0
    assert not (out / "shards").exists()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(out)
    for name, tensor in outcome(run)["weights"].items():
        assert torch.equal(model.state_dict()[name], tensor)
    capsys.readouterr()


@linux
def test_ctrl_c_saves_and_torchrun_goes_on_with_it(recipe: Path, alone: dict[str, Any], ended: list[Any]) -> None:
    folder = recipe.parent
    run, log = folder / "stopped", folder / "stopped.log"
    hold_after(folder, "stopped", 2)
    process = start(agentfly("train", str(recipe), "run.name=stopped", "learner.ranks=2"), log)
    ended.append(process)
    wait_for(checkpoint(folder, "stopped", 2).is_dir, process)
    ranks = children(process.pid)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130, log.read_text()
    assert f"to continue: agentfly train --resume {run}" in log.read_text()
    assert all(gone(rank) for rank in ranks)
    release(folder)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "agentfly"]
    process = start([*launch, "train", "--resume", str(run)], log)
    ended.append(process)
    assert process.wait(PATIENCE_S) == 0, log.read_text()
    assert_same(outcome(run), alone)


@linux
def test_nothing_is_left_when_the_supervisor_is_killed(recipe: Path, ended: list[Any]) -> None:
    folder = recipe.parent
    log = folder / "orphaned.log"
    hold_after(folder, "orphaned", 3)
    more = ["algorithm=ppo", "lora.rank=2", "rollout.max_lag=1", "train.steps=50"]  # and other parts of a run meanwhile
    process = start(agentfly("train", str(recipe), "run.name=orphaned", "learner.ranks=2", *more), log)
    ended.append(process)
    wait_for(checkpoint(folder, "orphaned", 3).is_dir, process)
    ranks = children(process.pid)
    assert sorted(map(rank_of, ranks)) == ["0", "1"]
    process.kill()
    process.wait()
    release(folder)
    wait_for(lambda: all(gone(rank) for rank in ranks))


def test_a_restart_resumes_the_folder_of_the_run() -> None:
    words = ["train", "run.toml", "--resume", "old", "train.steps=3", "--profile"]
    assert resuming(words, Path("/runs/a")) == ["train", "run.toml", "train.steps=3", "--profile", "--resume", "/runs/a"]
    assert resuming(["train", "--resume=old"], Path("/runs/a")) == ["train", "--resume", "/runs/a"]


def test_ranks_and_worker_processes_together_train_as_one_process(recipe: Path, alone: dict[str, Any], tmp_path: Path) -> None:
    words = agentfly("train", str(recipe), "run.name=both", "learner.ranks=2", "sampler.replicas=2")
    process = start(words, tmp_path / "log")
    assert process.wait(PATIENCE_S * 2) == 0, (tmp_path / "log").read_text()[-3000:]
    assert_same(outcome(recipe.parent / "both"), alone)
    assert main(["doctor", str(recipe.parent / "both")]) == 0
