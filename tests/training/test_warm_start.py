"""The warm start before reinforcement learning: demonstrations by name, refused settings, and what it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentfly import plugins
from agentfly.agents import CodeAgent, ReactAgent
from agentfly.api import train
from agentfly.config import Config
from agentfly.data import load_tasks
from agentfly.errors import ConfigError, DataError
from agentfly.runs import RunDirectory, RunStore
from agentfly.training.demonstrations import demo_rows, demo_samples

SMALL: dict[str, Any] = {
    "agent": {
        "kind": "react",
        "model": "pocket",
        "tools": ["add", "subtract", "multiply"],
        "reward": "exact_match",
        "max_turns": 4,
    },
    "data": {"train": "arithmetic", "train_count": 16, "validation_count": 4},
    "sampling": {"max_tokens": 48},
    "rollout": {"num_tasks": 2, "num_chains": 2},
    "train": {"steps": 1, "lr": 1e-6},
    "run": {"threads": 1},
}


def config(tmp_path: Path, **warm_start: Any) -> Config:
    return Config.from_dict({**SMALL, "run": {"threads": 1, "dir": str(tmp_path), "name": "run"}, "warm_start": warm_start})


@pytest.mark.parametrize("name", ["arithmetic", "code", "easy_code"])
def test_demonstrations_are_of_the_train_split_and_the_same_for_the_same_seed(name: str) -> None:
    rows = demo_rows(name, 40, 3)
    assert rows == demo_rows(name, 40, 3)
    assert rows != demo_rows(name, 40, 4)
    asked = {row["messages"][0]["content"] for row in rows}
    for split in ("validation", "test"):
        held = {task.messages[0].content for task in load_tasks(name, split=split, count=200)}
        assert not asked & held


@pytest.mark.parametrize("name", ["arithmetic", "code"])
def test_without_mistakes_every_answer_is_right_and_with_them_only_their_share_is(name: str) -> None:
    def right(row: Any) -> bool:
        return bool(row["messages"][-1]["content"].endswith(f"Answer: {row['answer']}"))

    assert all(right(row) for row in demo_rows(name, 100, 0))
    wrong = sum(not right(row) for row in demo_rows(name, 400, 0, 0.5))
    assert 130 <= wrong <= 230
    assert not any(right(row) for row in demo_rows("code", 50, 0, 1.0))


def test_what_a_demonstration_says_a_cell_prints_is_what_it_prints() -> None:
    import contextlib
    import io

    for row in demo_rows("code", 60, 1):
        names: dict[str, Any] = {}
        messages = row["messages"]
        for said, observed in zip(messages[1:-1:2], messages[2:-1:2], strict=True):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(said["content"].removeprefix("```python\n").removesuffix("\n```"), names)
            assert observed["content"] == f"Observation: {printed.getvalue().rstrip() or '(no output)'}"


def test_every_row_of_the_built_in_sets_fits_its_agent() -> None:
    tools = ["add", "subtract", "multiply"]
    assert demo_samples(demo_rows("arithmetic", 8, 0, 0.5), ReactAgent("pocket", tools=tools))
    assert demo_samples(demo_rows("easy_code", 8, 0, 0.5), CodeAgent("pocket"))


def test_a_warm_start_lowers_the_loss_is_recorded_at_step_0_and_is_not_repeated_on_resume(tmp_path: Path) -> None:
    chosen = config(tmp_path, demos="arithmetic", steps=6, lr=3e-4, num_demos=4, count=40)
    result = train(chosen)
    store = RunStore(RunDirectory.existing(result.directory).database)
    try:
        first = {row.name: row.value for row in store.metrics() if row.step == 0}
    finally:
        store.close()
    assert first["warm_start/loss_after"] < first["warm_start/loss_before"]
    written = Config.load(result.directory / "config.toml")
    assert written.warm_start == chosen.warm_start

    def explode(count: int, seed: int = 0, *, mistakes: float = 0.0) -> list[Any]:
        raise AssertionError("a resumed run has had its warm start")

    plugins.register("demos", "arithmetic", explode)
    try:
        again = train(chosen, resume=result.directory)
    finally:
        del plugins._registered["demos"]["arithmetic"]
    assert again.steps == 1


def test_a_file_of_demonstrations_serves_too_and_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "demos.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in demo_rows("arithmetic", 12, 0)))
    assert len(demo_rows(str(file), 5, 0, 0.0)) == 5
    with pytest.raises(ConfigError, match="no effect on"):
        demo_rows(str(file), 5, 0, 0.3)
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(DataError, match="empty"):
        demo_rows(str(tmp_path / "none.jsonl"), 5, 0)


def test_conversations_and_renamed_columns_are_demonstrations_like_messages(tmp_path: Path) -> None:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    plain = demo_rows("arithmetic", 4, 0)
    rows = [
        {
            **{name: value for name, value in row.items() if name != "messages"},
            "talk": [{"from": names[each["role"]], "value": each["content"]} for each in row["messages"]],
        }
        for row in plain
    ]
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    agent = ReactAgent("pocket", tools=["add", "multiply"])
    renamed = demo_rows(str(file), None, 0, columns={"conversations": "talk"})
    ids = [[sample.token_ids.tolist() for sample in demo_samples(part, agent)] for part in (plain, renamed)]
    assert ids[0] == ids[1]
    with pytest.raises(DataError, match="a list 'messages' or 'conversations'"):
        demo_samples(rows, agent)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"steps": 5}, "no effect without warm_start.demos"),
        ({"demos": "arithmetic", "steps": 0}, "warm_start.steps must be an integer of at least 1"),
        ({"demos": "arithmetic", "lr": 0.0}, "warm_start.lr must be a number above 0"),
        ({"demos": "arithmetic", "mistakes": 1.5}, "warm_start.mistakes must be a number from 0 to 1"),
        ({"demo": "arithmetic"}, "warm_start.demos"),
    ],
)
def test_settings_that_would_do_nothing_or_harm_are_refused(tmp_path: Path, settings: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        config(tmp_path, **settings)


def test_an_unknown_set_is_named_with_its_neighbour(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'arithmetic'"):
        train(config(tmp_path, demos="arithmetics", steps=1))
