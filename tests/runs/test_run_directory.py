"""A run's folder is new, or resumed on purpose."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentfly.errors import ConfigError
from agentfly.runs import RunDirectory, RunStore


def test_a_new_run_has_its_layout(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "runs" / "one")
    assert run.checkpoints.is_dir()
    names = [path.name for path in (run.config, run.database, run.metrics, run.checkpoints)]
    assert names == ["config.toml", "run.db", "metrics.jsonl", "checkpoints"]
    assert [path.name for path in run.path.iterdir()] == ["checkpoints"]


def test_a_folder_with_something_in_it_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    RunDirectory.create(tmp_path / "empty")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"is not empty: resume it with --resume"):
        RunDirectory.create(tmp_path / "full")
    with pytest.raises(ConfigError, match="is a file"):
        RunDirectory.create(tmp_path / "full" / "notes.txt")
    with pytest.raises(ConfigError, match="cannot be created"):
        RunDirectory.create(tmp_path / "full" / "notes.txt" / "below")


def test_a_fresh_run_is_named_by_its_time_and_never_meets_another(tmp_path: Path) -> None:
    runs = [RunDirectory.fresh("grpo: my/model", root=tmp_path) for _ in range(3)]
    assert len({run.path for run in runs}) == 3
    assert all(run.path.parent == tmp_path and run.path.name.startswith("grpo-my-model-2") for run in runs)
    assert RunDirectory.fresh("..", root=tmp_path, stamp="x").path == tmp_path / "run-x"
    given = RunDirectory.fresh("a", root=tmp_path, stamp="v1")
    assert given.path == tmp_path / "a-v1"
    given.config.write_text("")
    with pytest.raises(ConfigError, match="not empty"):
        RunDirectory.fresh("a", root=tmp_path, stamp="v1")


def test_only_the_folder_of_a_run_can_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run folder"):
        RunDirectory.existing(tmp_path / "none")
    with pytest.raises(ConfigError, match="not the folder of a run"):
        RunDirectory.existing(tmp_path)
    run = RunDirectory.create(tmp_path / "one")
    RunStore(run.database).close()
    assert RunDirectory.existing(run.path) == run
