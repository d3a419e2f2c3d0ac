"""The loop: what a run leaves behind, what it refuses, and that it can be taken up again exactly."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import agentfly
from agentfly import reward, tool
from agentfly.errors import ConfigError, InvariantError, RewardError, WorldError
from agentfly.runs import RunStore
from agentfly.runs.checkpoints import broken_files, latest_checkpoint, list_checkpoints
from agentfly.testing import ByteRenderer, ScriptedEngine
from agentfly.watch.metrics import unknown
from tests.close import assert_close_to_norm
from tests.tiny import ROWS, TwoTurns, look, sample_in_float64, save_tiny_model, tiny_agent

SMALL: dict[str, Any] = {"num_tasks": 2, "num_chains": 2, "threads": 1, "lr": 1e-2, "validation_count": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def train(model: Path, folder: Path, name: str = "run", **options: Any) -> Any:
    return agentfly.train(tiny_agent(model), ROWS, run={"dir": str(folder), "name": name}, **(SMALL | options))


def weights(checkpoint: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(checkpoint / "model.safetensors")


def test_a_run_folder_holds_config_metrics_trajectories_and_a_loadable_model(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = train(model, tmp_path, steps=3, save_every=1, keep_checkpoints=2, validate_every=2)
    folder = result.directory
    assert agentfly.Config.load(folder / "config.toml").train.steps == 3
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} == {0, 1, 2, 3}
    assert not unknown([name for metrics in result.history for name in metrics])
    for name in (
        "reward/mean",
        "reward/component/tokens",
        "rollout/turns",
        "rollout/tool_calls/look",
        "train/grad_norm",
        "time/step_s",
    ):
        assert math.isfinite(result.history[0][name]), name
    store = RunStore(folder / "run.db")
    assert len(store.trajectories(split="train", limit=100)) == 12
    assert len(store.trajectories(step=0, split="validation", limit=100)) == 4
    store.close()
    assert [path.name for path in list_checkpoints(folder / "checkpoints")] == ["step-000002", "step-000003"]
    AutoModelForCausalLM.from_pretrained(result.checkpoint)
    AutoTokenizer.from_pretrained(result.checkpoint)
    assert broken_files(result.checkpoint) == []


def test_the_time_of_every_step_is_divided_into_parts_that_add_up(model: Path, tmp_path: Path) -> None:
    from agentfly.watch.profile import PARTS

    result = train(model, tmp_path, steps=3, validate_every=2, save_every=1)
    for metrics in result.history:
        assert sum(metrics[name] for name in PARTS.values() if name in metrics) == pytest.approx(metrics["time/step_s"])
        assert metrics["time/learn_s"] > 0
        assert metrics["time/rollout_s"] < metrics["time/step_s"]
        assert metrics["time/reply_s"] > 0
    assert ["time/validate_s" in metrics for metrics in result.history] == [False, True, False]
    assert ["time/save_s" in metrics for metrics in result.history] == [False, True, True]  # of the step before


def test_a_resumed_run_ends_where_an_unbroken_one_does(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample_in_float64(monkeypatch)
    whole = train(model, tmp_path, "whole", steps=4, validate_at_start=False)
    train(model, tmp_path, "parts", steps=2, validate_at_start=False)
    again = train(model, tmp_path, "parts", steps=4, validate_at_start=False, resume=tmp_path / "parts")
    assert again.steps == 4
    for name, tensor in weights(whole.checkpoint).items():
        assert_close_to_norm(weights(again.checkpoint)[name], tensor, of=name)
    store = RunStore(tmp_path / "parts" / "run.db")
    assert len(store.trajectories(split="train", limit=100)) == 16
    store.close()


def test_a_broken_checkpoint_is_passed_over(model: Path, tmp_path: Path) -> None:
    result = train(model, tmp_path, steps=2, save_every=1)
    newest = list_checkpoints(result.directory / "checkpoints")[-1]
    (newest / "model.safetensors").write_bytes(b"half a file")
    assert broken_files(newest) == ["model.safetensors"]
    assert latest_checkpoint(result.directory).name == "step-000001"


def test_a_run_without_held_out_rows_trains_and_validates_nothing(model: Path, tmp_path: Path) -> None:
    result = train(model, tmp_path, steps=2, validation_count=0, validate_every=1)
    assert result.steps == 2 and result.before == result.after == {}
    assert not any(name.startswith("validation/") for row in result.history for name in row)


def test_nothing_to_resume_is_said(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        train(model, tmp_path, steps=2, resume=tmp_path / "nowhere")


def test_a_run_folder_is_not_overwritten(model: Path, tmp_path: Path) -> None:
    train(model, tmp_path, steps=1)
    with pytest.raises(ConfigError, match="run"):
        train(model, tmp_path, steps=1)


def test_an_engine_without_weights_cannot_be_trained(tmp_path: Path) -> None:
    agent = TwoTurns(ScriptedEngine(["x"]), tools=[look], reward="exact_match", renderer=ByteRenderer())
    with pytest.raises(ConfigError, match="cannot be trained"):
        agentfly.train(agent, ROWS, run={"dir": str(tmp_path)}, **SMALL)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"steps": 0}, "train.steps"),
        ({"lrr": 1}, "unknown config key"),
        ({"algorithm": "grop"}, "did you mean"),
        ({"num_chains": 1}, "num_chains"),
        ({"agent.model": "x"}, "is set by the agent that was passed in"),
    ],
)
def test_a_bad_setting_is_refused_before_anything_runs(
    model: Path, tmp_path: Path, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        train(model, tmp_path, **options)
    assert not (tmp_path / "run").exists()


def test_a_run_that_loses_its_chains_stops_and_keeps_what_it_had(model: Path, tmp_path: Path) -> None:
    @tool(name="look", register=False)
    async def gone() -> str:
        """Look."""
        raise WorldError("the server is gone")

    agent = tiny_agent(model, tools=[gone])
    with pytest.raises(InvariantError, match="the server is gone"):
        agentfly.train(agent, ROWS, run={"dir": str(tmp_path), "name": "lost"}, validate_at_start=False, steps=2, **SMALL)
    store = RunStore(tmp_path / "lost" / "run.db")
    assert {trajectory.outcome.value for trajectory in store.trajectories(limit=100)} == {"world_failure"}
    store.close()


def test_a_reward_that_breaks_at_step_two_loses_nothing(model: Path, tmp_path: Path) -> None:
    scored = 0

    @reward(name="late")
    def late() -> float:
        nonlocal scored
        scored += 1
        return float(scored % 2) if scored <= 4 else math.nan

    agent = tiny_agent(model, reward=late)
    with pytest.raises(RewardError, match="late"):
        agentfly.train(agent, ROWS, run={"dir": str(tmp_path), "name": "late"}, validate_at_start=False, steps=3, **SMALL)
    store = RunStore(tmp_path / "late" / "run.db")
    assert len(store.trajectories(step=1, limit=100)) == 4
    store.close()
    assert latest_checkpoint(tmp_path / "late").name == "step-000001"


def test_ctrl_c_saves_and_says_how_to_go_on(model: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        f'[agent]\nkind = "tests.tiny:TwoTurns"\nmodel = "{model}"\ntools = ["tests.tiny:look"]\nreward = "tests.tiny:even"\n'
        f'max_turns = 2\n[sampling]\nmax_tokens = 12\n[data]\ntrain = "{tmp_path}/rows.json"\nvalidation_count = 4\n'
        f"[rollout]\nnum_tasks = 2\nnum_chains = 2\n[train]\nsteps = 100000\n"
        f'[run]\ndir = "{tmp_path}"\nname = "stopped"\nthreads = 1\n'
    )
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    root = Path(__file__).parent.parent.parent
    process = subprocess.Popen(
        [sys.executable, "-m", "agentfly", "train", str(config)],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
        # A suite that runs in the background of a shell ignores Ctrl-C, and so would whatever it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    metrics = tmp_path / "stopped" / "metrics.jsonl"
    deadline = time.monotonic() + 500
    while (
        not (metrics.exists() and '"step": 2' in metrics.read_text()) and time.monotonic() < deadline and process.poll() is None
    ):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 130, output
    assert "--resume" in output
    assert "Traceback" not in output
    assert broken_files(latest_checkpoint(tmp_path / "stopped")) == []
