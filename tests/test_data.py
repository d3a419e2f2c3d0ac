"""Rows are read and checked before anything runs; a bad one is named by its index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentfly import plugins
from agentfly.data import check_fields, load_tasks, split_rows
from agentfly.errors import ConfigError, DataError, UnknownName
from agentfly.types import Message

ROWS = [{"question": "What is 2 + 2?", "answer": "4"}, {"question": "What is 3 + 3?", "answer": "6"}]


def write(path: Path, rows: list[Any]) -> Path:
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("suffix", ["json", "jsonl", "parquet"])
def test_every_file_format_gives_the_same_tasks(tmp_path: Path, suffix: str) -> None:
    tasks = load_tasks(write(tmp_path / f"rows.{suffix}", ROWS))
    assert [task.messages for task in tasks] == [(Message("user", row["question"]),) for row in ROWS]
    assert [task.fields["answer"] for task in tasks] == ["4", "6"]
    assert [task.id for task in tasks] == ["0", "1"]


def test_messages_are_taken_as_they_are() -> None:
    rows = [{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], "id": "greet"}]
    (task,) = load_tasks(rows)
    assert task.id == "greet"
    assert task.messages == (Message("system", "Be brief."), Message("user", "Hi"))
    assert "messages" not in task.fields


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("text", "a row is an object"),
        ({"answer": "4"}, "neither 'question' nor 'messages'"),
        ({"question": ""}, "non-empty string"),
        ({"question": None}, "non-empty string"),
        ({"question": "a", "messages": []}, "both"),
        ({"messages": []}, "non-empty list"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "roles are"),
        ({"messages": [{"role": "user", "content": 3}]}, "must be a string"),
        ({"messages": [{"role": "user"}]}, "'role' and 'content'"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "nothing to reply to"),
        ({"question": "q", "task": 1}, "reserved"),
    ],
)
def test_a_malformed_row_is_named_by_its_index(row: Any, what: str) -> None:
    with pytest.raises(DataError, match="row 1") as error:
        load_tasks([ROWS[0], row])
    assert what in str(error.value)


def test_a_broken_line_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a"}\n{"question": \n')
    with pytest.raises(DataError, match="line 2"):
        load_tasks(path)


def test_a_json_object_is_not_a_data_set(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{"question": "a"}')
    with pytest.raises(DataError, match="list of rows"):
        load_tasks(path)


def test_an_empty_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="empty"):
        load_tasks(write(tmp_path / "rows.json", []))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        load_tasks(tmp_path / "nowhere.json")


def test_two_rows_with_one_id_are_refused() -> None:
    with pytest.raises(DataError, match="rows 0 and 1"):
        load_tasks([{"question": "a", "id": 7}, {"question": "b", "id": 7}])


def test_a_named_task_set_is_called_with_split_count_and_seed() -> None:
    seen = []

    def maker(split: str, count: int | None = None, seed: int = 0) -> list[dict[str, str]]:
        seen.append((split, count, seed))
        return ROWS

    plugins.register("tasks", "two_sums", maker)
    assert len(load_tasks("two_sums", split="validation", count=2, seed=5)) == 2
    assert seen == [("validation", 2, 5)]
    with pytest.raises(UnknownName, match="did you mean 'two_sums'"):
        load_tasks("two_sum")


def test_the_split_is_seeded_and_disjoint() -> None:
    rows = list(range(50))
    train, held = split_rows(rows, 0.2, seed=1)
    assert sorted(train + held) == rows
    assert len(held) == 10
    assert (train, held) == split_rows(rows, 0.2, seed=1)
    assert held != split_rows(rows, 0.2, seed=2)[1]
    with pytest.raises(ConfigError, match="holdout"):
        split_rows(rows, 1.5, seed=1)


def test_a_field_that_one_row_lacks_is_reported_with_that_row() -> None:
    tasks = load_tasks([ROWS[0], {"question": "no answer here"}])
    with pytest.raises(DataError, match="row 1 .* no field 'answer', which the reward 'exact'"):
        check_fields(tasks, {"answer"}, "the reward 'exact'")
