"""The checkpoint with the best validation is kept, also over a resume, and a run that no longer improves ends."""

from __future__ import annotations

import dataclasses
import io
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import agentfly
from agentfly.cli.train import print_result
from agentfly.config import Config
from agentfly.errors import StorageError
from agentfly.runs import checkpoints
from agentfly.runs.checkpoints import best_checkpoint, broken_files, mark_best
from agentfly.training import loop, saving
from agentfly.training.idle import Plateau
from tests.tiny import ROWS, save_tiny_model, tiny_agent

SMALL: dict[str, Any] = {
    "num_tasks": 1,
    "num_chains": 2,
    "threads": 1,
    "lr": 1e-2,
    "validation_count": 2,
    "validate_every": 1,
    "save_every": 0,
    "sampling": {"max_tokens": 3},
    "validate_at_start": False,
    "train.keep_checkpoints": 1,
    "train.keep_best": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The success of the next validations."""
    values: list[float] = []
    validate = loop.validate

    async def given(*args: Any, **options: Any) -> Any:
        evaluation = await validate(*args, **options)
        return dataclasses.replace(evaluation, metrics=evaluation.metrics | {"validation/success": values.pop(0)})

    monkeypatch.setattr(loop, "validate", given)
    return values


def train(model: Path, folder: Path, **options: Any) -> Any:
    return agentfly.train(tiny_agent(model), ROWS, run={"dir": str(folder), "name": "run"}, **(SMALL | options))


def screen(result: Any) -> str:
    console = Console(file=io.StringIO(), width=400)
    print_result(console, Config(), result, None)
    return console.file.getvalue()  # type: ignore[attr-defined]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(folder: Path, step: int, best: bool = False) -> Path:
    return checkpoints.write_checkpoint(folder, step, lambda path: (path / "trainer.pt").write_text("x") and None, 2, best)


def test_rotation_keeps_the_best_and_the_newest(tmp_path: Path) -> None:
    for step in range(1, 7):
        write(tmp_path, step, best=step in (1, 3))
    assert names(tmp_path) == ["best", "step-000003", "step-000005", "step-000006"]
    assert best_checkpoint(tmp_path) == tmp_path / "step-000003"
    mark_best(tmp_path, 6)
    write(tmp_path, 7)
    assert names(tmp_path) == ["best", "step-000006", "step-000007"]


def test_a_copied_run_whose_link_became_a_folder_can_go_on(tmp_path: Path) -> None:
    write(tmp_path, 1, best=True)
    copied = Path(shutil.copytree(tmp_path, tmp_path.parent / f"{tmp_path.name}-copy"))
    assert best_checkpoint(copied) is None
    write(copied, 2, best=True)
    assert best_checkpoint(copied) == copied / "step-000002"


def test_the_best_checkpoint_is_kept_named_and_restored(model: Path, tmp_path: Path, scored: list[float]) -> None:
    scored += [0.1, 0.5, 0.2, 0.3]
    result = train(model, tmp_path, steps=4)
    folder = tmp_path / "run" / "checkpoints"
    assert names(folder) == ["best", "step-000002", "step-000004"]
    assert result.best == folder / "step-000002"
    assert broken_files(folder / "best") == []
    assert checkpoints.export_model(folder / "best", tmp_path / "model").name == "best"
    assert f"best checkpoint: {result.best}" in screen(result)
    assert f"--model {folder / 'best'}" in screen(result)
    scored += [0.4, 0.6, 0.5]
    result = train(model, tmp_path, steps=5, resume=tmp_path / "run")
    assert result.best == folder / "step-000002"  # its figures are those of before
    result = train(model, tmp_path, steps=7, resume=tmp_path / "run")
    assert result.best == folder / "step-000006"
    assert names(folder) == ["best", "step-000006", "step-000007"]


def test_without_the_key_no_checkpoint_is_the_best(model: Path, tmp_path: Path, scored: list[float]) -> None:
    scored += [0.5, 0.2]
    result = train(model, tmp_path, steps=2, **{"train.keep_best": False})
    assert result.best is None
    assert names(tmp_path / "run" / "checkpoints") == ["step-000002"]


def test_a_best_checkpoint_that_was_not_saved_does_not_count(
    model: Path, tmp_path: Path, scored: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files = saving.write_checkpoint

    def fails_at_two(folder: Path, step: int, *rest: Any) -> Path:
        if step == 2:
            raise StorageError("the disk is full")
        return write_files(folder, step, *rest)

    monkeypatch.setattr(saving, "write_checkpoint", fails_at_two)
    scored += [0.1, 0.9, 0.5, 0.2]
    result = train(model, tmp_path, steps=4)
    assert result.best == tmp_path / "run" / "checkpoints" / "step-000003"


# ---- the end of a run that no longer improves ----------------------------------------------------------------------------

HELD_OUT = [{"question": f"What is {number} plus 1?", "answer": str(number + 1)} for number in range(60, 66)]


def tasks(*values: float) -> dict[str, dict[str, list[float]]]:
    return {"success": {str(task): [value] for task, value in enumerate(values)}}


def test_a_plateau_is_judged_by_the_tasks_and_not_by_the_mean() -> None:
    plateau = Plateau(2)
    plateau.add(0, tasks(*[0.0] * 20))
    plateau.add(10, tasks(*[1.0] * 2, *[0.0] * 18))  # higher, but two tasks of 20 may be chance
    assert plateau.reason is None
    plateau.add(20, tasks(*[1.0] * 10, *[0.0] * 10))
    assert plateau.state["count"] == 0
    plateau.add(30, tasks(*[1.0] * 11, *[0.0] * 9))
    assert plateau.reason is None
    plateau.add(40, tasks(*[1.0] * 9, *[0.0] * 11))
    assert plateau.reason is not None
    assert "the last 2 validations was better than that of step 20" in plateau.reason
    assert Plateau(3, plateau.state).reason is None
    assert Plateau(0, plateau.state).reason is None


def test_a_reward_that_rises_is_better_although_no_task_succeeds() -> None:
    plateau = Plateau(1)
    for step, reward in ((0, 0.1), (10, 0.2)):
        plateau.add(step, {"success": tasks(*[0.0] * 8)["success"], "reward": tasks(*[reward] * 8)["success"]})
    assert plateau.reason is None
    assert plateau.state["step"] == 10


def test_too_few_tasks_stop_no_run() -> None:
    plateau = Plateau(1)
    for step in range(5):
        plateau.add(step, tasks(*[0.0] * 5))
    assert plateau.reason is None


def test_a_run_that_does_not_improve_ends_and_a_resumed_one_too(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"train.stop_after": 2, "train.keep_best": False, "validation_count": None, "validation": HELD_OUT}
    result = train(model, tmp_path, steps=9, **options)
    assert result.steps == 3  # the first validation is what the two later ones are compared with
    assert result.stopped is not None
    assert "after step 3 of 9" in result.stopped
    assert "none of the last 2 validations was better than that of step 1" in capsys.readouterr().out.replace("\n", " ")
    assert result.checkpoint == tmp_path / "run" / "checkpoints" / "step-000003"
    again = train(model, tmp_path, steps=9, resume=tmp_path / "run", **options)
    assert (again.steps, again.stopped) == (3, result.stopped)
    assert result.stopped in screen(again)
    further = train(model, tmp_path, steps=9, resume=tmp_path / "run", **options | {"train.stop_after": 3})
    assert further.steps == 4
