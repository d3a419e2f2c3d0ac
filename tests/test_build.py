"""Training and validation rows: what is held out, and when a row is refused because it is in both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from agentfly import Config, plugins
from agentfly.build import build_learner, build_tasks, held_out_tasks
from agentfly.engines import open_engine
from agentfly.engines.local import LocalEngine
from agentfly.errors import ConfigError
from agentfly.learn.learner import PolicyLearner
from tests.learn.chains import tiny_llama

GAMES = [{"question": "Guess my number.", "secret": number} for number in range(30)]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(**data: Any) -> Config:
    return Config.from_dict({"data": data})


def test_rows_that_ask_the_same_and_differ_elsewhere_are_split(tmp_path: Path) -> None:
    train, held = build_tasks(config(train=str(write(tmp_path / "games.jsonl", GAMES)), holdout=0.2))
    assert (len(train), len(held)) == (24, 6)
    assert not {task.fields["secret"] for task in train} & {task.fields["secret"] for task in held}
    assert len(build_tasks(config(), GAMES[:20], GAMES[20:])[1]) == 10


def test_equal_rows_of_one_file_are_no_error(tmp_path: Path) -> None:
    for rows in (GAMES * 2, GAMES[:1] * 20):
        train, held = build_tasks(config(train=str(write(tmp_path / "games.jsonl", rows)), holdout=0.2))
        assert len(train) + len(held) == len(rows)
        assert held


def test_a_row_in_both_files_is_refused_by_its_number_in_each(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", [{**row, "id": f"a{number}"} for number, row in enumerate(GAMES[:20])])
    second = write(tmp_path / "b.jsonl", [{**row, "id": f"b{number}"} for number, row in enumerate(GAMES[17:])])
    with pytest.raises(ConfigError, match=r"validation row 0 \(id 'b0'\) is the same as training row 17 \(id 'a17'\)"):
        build_tasks(config(train=str(first), validation=str(second)))


def test_rows_with_tool_calls_can_be_compared() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    rows = [{"messages": [call, {"role": "tool", "content": str(number)}]} for number in range(4)]
    assert len(build_tasks(config(), rows[:2], rows[2:])[0]) == 2
    with pytest.raises(ConfigError, match="validation row 0 .* training row 1 "):
        build_tasks(config(), rows[:2], rows[1:])


def test_a_task_set_that_ignores_its_split_is_refused() -> None:
    plugins.register("tasks", "one_split", lambda split, count=None, seed=0: GAMES)
    with pytest.raises(ConfigError, match="would measure memory"):
        build_tasks(config(train="one_split"))


def test_a_mapping_of_splits_brings_its_validation_rows() -> None:
    splits = {"train": GAMES[:20], "validation": GAMES[20:25], "test": GAMES[25:]}
    assert [len(part) for part in build_tasks(config(), splits)] == [20, 5]
    del splits["validation"]
    assert [len(part) for part in build_tasks(config(), splits)] == [18, 2]


def test_a_training_says_how_many_of_its_held_out_rows_it_validates_on() -> None:
    told: list[str] = []
    rows = [{"question": f"What is {i}?"} for i in range(250)]
    assert len(build_tasks(config(), rows[:20], rows[20:], told.append)[1]) == 200
    assert len(build_tasks(config(validation_count=5), rows, None, told.append)[1]) == 5
    assert len(build_tasks(config(validation_count=1000), rows[:20], rows[20:], told.append)[1]) == 230
    assert told == [f"validation plays the first {n} held-out rows (data.validation_count)" for n in ("200 of 230", "5 of 25")]


@pytest.mark.parametrize("name", ["games.csv", "games.tsv", "folder/games.data"])
def test_every_file_is_split_and_none_is_taken_for_a_task_set(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    if name.endswith(".data"):
        write(tmp_path / name, GAMES)
    else:
        gap = "," if name.endswith("csv") else "\t"
        (tmp_path / name).write_text(f"question{gap}secret\n" + "".join(f"Guess.{gap}{number}\n" for number in range(30)))
    train, held = build_tasks(config(train=name))
    assert (len(train), len(held)) == (27, 3)
    with pytest.raises(ConfigError, match="only a task set has a split 'test'"):
        held_out_tasks(config(train=name), "test")


def test_a_model_or_a_learner_for_which_the_device_is_too_small_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def too_small(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 56 GiB.\nGPU 0 has a total capacity of 24 GiB")

    keys = r"set agent\.engine\.kv_gib .*lora\.rank.* Tried to allocate 56 GiB\.$"
    monkeypatch.setattr(PolicyLearner, "_make_optimizers", too_small)
    with pytest.raises(ConfigError, match=f"^the device ran out of memory in the setup of the learner: {keys}"):
        build_learner(Config.load("quickstart"), tiny_llama(), exact=True)
    monkeypatch.setattr(LocalEngine, "__init__", too_small)
    with pytest.raises(ConfigError, match=f"^the device ran out of memory in opening the model: {keys}"):
        open_engine("pocket")
