"""A run that has lost what it had learned goes on from its best checkpoint, and so does a resumed one, bit for bit."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from agentfly.config import Config
from agentfly.errors import ConfigError
from agentfly.health import diagnose
from agentfly.learn.model.storage import load_state
from agentfly.training import loop
from agentfly.training.idle import Plateau
from tests.tiny import save_tiny_model
from tests.training.test_best import tasks, train

OPTIONS: dict[str, Any] = {
    "num_chains": 3, "train.stop_after": 2, "train.restart_from_best": 2, "train.keep_checkpoints": 9, "save_every": 1
}  # fmt: skip


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many of ten held-out tasks succeed in the next validations."""
    values: list[int] = []
    validate = loop.validate

    async def given(*args: Any, **options: Any) -> Any:
        evaluation = await validate(*args, **options)
        return dataclasses.replace(evaluation, metrics=evaluation.metrics | {"validation/success": values[0] / 10})

    def of_tasks(*args: Any) -> Any:
        count = values.pop(0)
        return tasks(*[1.0] * count, *[0.0] * (10 - count))

    monkeypatch.setattr(loop, "validate", given)
    monkeypatch.setattr(loop, "task_values", of_tasks)
    return values


def weights(folder: Path, step: int) -> torch.Tensor:
    from safetensors.torch import load_file

    saved = load_file(folder / "checkpoints" / f"step-{step:06d}" / "model.safetensors")
    return torch.cat([saved[name].flatten() for name in sorted(saved)])


def problems(folder: Path) -> dict[str, Any]:
    return {check.name: check.problems for check in diagnose(folder).checks if check.problems}


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_run_goes_back_when_it_is_worse_than_its_best_and_a_resumed_one_has_the_same_bits(
    tmp_path: Path, scored: list[int], capsys: pytest.CaptureFixture[str], algorithm: str
) -> None:
    model, folder = save_tiny_model(tmp_path / "model"), tmp_path / "run"
    more = (
        {"loss": {"entropy_target": 9.0}, "train.optimizer": "adamw_bf16"}
        if algorithm == "grpo"
        else {"critic_warmup_steps": 0}
    )
    # One chain at a time: the last bit of a log-prob depends on the chains that share its batch.
    options = OPTIONS | more | {"algorithm": algorithm, "rollout.max_concurrency": 1}
    scored += [1, 9, 1, 5, 6]
    result = train(model, tmp_path, steps=5, **options)
    rows = result.history
    assert [row.get("train/restarted_from") for row in rows] == [None, None, 2.0, None, None]
    assert torch.equal(weights(folder, 3), weights(folder, 2))
    assert not torch.equal(weights(folder, 4), weights(folder, 3))
    assert [row["train/version"] for row in rows] == [0.0, 1.0, 2.0, 4.0, 5.0]
    assert [row["train/adam_steps"] for row in rows] == [1.0, 2.0, 3.0, 3.0, 4.0]
    said = " ".join(capsys.readouterr().out.split())
    assert "after step 3: the validation is worse than that of step 2, by a paired test. 1 more restarts" in said
    assert problems(folder) == {}
    before, state = weights(folder, 5), load_state(folder / "checkpoints" / "step-000005" / "trainer.pt")
    for step in (4, 5):
        shutil.rmtree(folder / "checkpoints" / f"step-{step:06d}")
    scored += [5, 6]
    again = train(model, tmp_path, steps=5, resume=folder, **options)  # from the checkpoint that was saved with the restart
    assert again.steps == 5
    assert torch.equal(weights(folder, 5), before)
    other = load_state(folder / "checkpoints" / "step-000005" / "trainer.pt")
    assert other["plateau"] == state["plateau"]
    assert other["learner"]["kl"] == state["learner"]["kl"]
    assert problems(folder) == {}


def test_a_plateau_goes_back_as_often_as_it_may_and_then_ends(tmp_path: Path, scored: list[int]) -> None:
    model = save_tiny_model(tmp_path / "model")
    scored += [9, 8, 8, 8, 8, 8, 8, 8]
    result = train(model, tmp_path, steps=9, **OPTIONS | {"save_every": 0})
    assert [at for at, row in enumerate(result.history, 1) if "train/restarted_from" in row] == [3, 5]
    assert result.steps == 7
    assert result.stopped is not None
    assert "none of the last 2 validations was better than that of step 1" in result.stopped


def test_a_best_validation_goes_nowhere(tmp_path: Path, scored: list[int]) -> None:
    """Two validations are higher, but by no more than chance: the newest checkpoint is the best, and the run ends."""
    model = save_tiny_model(tmp_path / "model")
    scored += [5, 6, 7]
    result = train(model, tmp_path, steps=9, **OPTIONS)
    assert (result.steps, "train/restarted_from" in result.history[-1]) == (3, False)
    assert result.stopped is not None


def test_restarts_are_counted_and_kept_in_the_state() -> None:
    plateau = Plateau(3, None, restarts=1)
    for step, count in ((1, 9), (2, 1)):
        plateau.add(step, tasks(*[1.0] * count, *[0.0] * (10 - count)))
    assert plateau.restart is not None
    assert plateau.restarted() == 0
    assert plateau.restart is None
    plateau.add(3, tasks(*[1.0], *[0.0] * 9))
    assert plateau.restart is None
    assert Plateau(3, plateau.state, restarts=2).state["restarts"] == 1


def test_what_a_restart_needs_is_said() -> None:
    best = {"restart_from_best": 1, "keep_best": True, "stop_after": 3}
    Config.from_dict({"train": best})
    for name in ("keep_best", "stop_after"):
        with pytest.raises(ConfigError, match="train.restart_from_best needs the best checkpoint and its test"):
            Config.from_dict({"train": {key: value for key, value in best.items() if key != name}})
    with pytest.raises(ConfigError, match="train.restart_from_best works with rollout.max_lag = 0"):
        Config.from_dict({"train": best, "rollout": {"max_lag": 1}})
