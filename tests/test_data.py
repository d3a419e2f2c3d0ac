"""Rows are read and checked before anything runs; a bad one is named by its index."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from agentfly import plugins
from agentfly.build import build_tasks, held_out_tasks
from agentfly.config import Config
from agentfly.data import check_fields, load_tasks, row_key, split_rows
from agentfly.errors import ConfigError, DataError, MissingExtra, UnknownName
from agentfly.types import Message, Task

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
        ({"answer": "4"}, "has none of messages, question, prompt"),
        ({"instruction": 3}, "'instruction' must be a non-empty string"),
        ({"conversations": [{"from": "robot", "value": "x"}]}, "roles are"),
        ({"conversations": [{"from": "human"}]}, "message 0"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "nothing to reply to"),
        ({"question": ""}, "non-empty string"),
        ({"question": None}, "non-empty string"),
        ({"question": "a", "messages": []}, "non-empty list"),
        ({"messages": []}, "non-empty list"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "roles are"),
        ({"messages": [{"role": "user", "content": 3}]}, "must be a string"),
        ({"messages": [{"role": "user"}]}, "'role' and 'content'"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "nothing to reply to"),
        ({"prompt": ""}, "non-empty string"),
        ({"messages": "[{"}, "'messages' is not valid JSON"),
        ({"messages": [{"role": "user", "content": []}]}, "a list of text parts"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "of type 'image_url'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "a text part must be"),
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


PARTS = [{"type": "text", "text": "What is 2 + 2?"}, {"type": "text", "text": "Be brief."}]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (PARTS[:1], "What is 2 + 2?"),
        (PARTS, "What is 2 + 2?\nBe brief."),
        (PARTS[0], "What is 2 + 2?"),
        (["What is 2 + 2?"], "What is 2 + 2?"),
        ([{"type": "input_text", "text": "Hi", "image_url": None}], "Hi"),
    ],
)
def test_content_parts_are_read_as_text(content: Any, text: str) -> None:
    (task,) = load_tasks([{"messages": [{"role": "user", "content": content}]}])
    assert task.messages == (Message("user", text),)


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"problem": "2 + 2", "solution": "4"}, "2 + 2"),
        ({"instruction": "Add.", "input": "2 and 2", "output": "4"}, "Add.\n\n2 and 2"),
        ({"instruction": "Say hello.", "input": ""}, "Say hello."),
        ({"question": "Which?", "problem": "a field", "instruction": "too"}, "Which?"),
    ],
)
def test_the_usual_names_of_a_question_are_read_and_stay_fields(row: dict[str, str], asked: str) -> None:
    (task,) = load_tasks([row])
    assert task.messages == (Message("user", asked),)
    assert task.fields == row


def test_rows_with_from_and_value_are_conversations() -> None:
    turns = [("system", "Be brief."), ("human", "Hi"), ("gpt", "Hello."), ("human", "2 + 2?")]
    row = {"conversations": [{"from": who, "value": text} for who, text in turns], "answer": "4"}
    (task,) = load_tasks([row])
    assert [(message.role, message.content) for message in task.messages] == [
        ("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello."), ("user", "2 + 2?"),
    ]  # fmt: skip
    assert task.fields == {"answer": "4"}


def test_columns_name_the_fields_of_rows_also_those_that_lie_deeper() -> None:
    row = {"problem": "2 + 2", "reward_model": {"style": "rule", "ground_truth": "4"}, "a.b": "dotted", "level": 3}
    columns = {"question": "problem", "answer": "reward_model.ground_truth", "name": "a.b"}
    (task,) = load_tasks([row], columns=columns)
    assert task.messages == (Message("user", "2 + 2"),)
    reward_model = row["reward_model"]
    assert task.fields == {"question": "2 + 2", "answer": "4", "name": "dotted", "level": 3, "reward_model": reward_model}
    swapped = load_tasks([{"question": "4", "answer": "2 + 2"}], columns={"question": "answer", "answer": "question"})
    assert swapped[0].fields == {"question": "2 + 2", "answer": "4"}


def test_a_column_that_a_row_lacks_is_named_with_the_columns_that_it_has() -> None:
    rows = [{"problem": "a", "answer": {"text": "1"}}, {"question": "b"}]
    with pytest.raises(DataError, match="row 1 has no column 'problem', which data.columns names; its columns: question"):
        load_tasks(rows, columns={"question": "problem"})
    with pytest.raises(DataError, match="row 0 has no column 'answer.text.more'"):
        load_tasks(rows, columns={"question": "answer.text.more"})
    with pytest.raises(DataError, match="the row is a Task"):
        load_tasks(load_tasks([{"question": "b"}]), columns={"question": "problem"})


def test_columns_of_a_config_hold_for_training_validation_and_evaluation(tmp_path: Path) -> None:
    for name in ("train", "held"):
        rows = [json.dumps({"ask": f"{name} {number}", "gold": str(number)}) for number in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    words = [f"data.train={tmp_path}/train.jsonl", "data.columns.question=ask", "data.columns.answer=gold"]
    config = Config.load(None, words)
    assert Config.load(None, ["data.columns={question='ask', answer='gold'}", words[0]]) == config
    train, validation = build_tasks(config)
    assert {task.fields["answer"] for task in [*train, *validation]} == {"0", "1", "2"}
    both = Config.load(None, [*words, f"data.validation={tmp_path}/held.jsonl"])
    assert [task.fields["question"] for task in build_tasks(both)[1]] == ["held 0", "held 1", "held 2"]
    assert [task.fields["question"] for task in held_out_tasks(both, "validation")] == ["held 0", "held 1", "held 2"]
    source = "data.sources.a={train='%s', columns={question='ask', answer='gold'}}" % (tmp_path / "train.jsonl")
    assert build_tasks(Config.load(None, [source]))[0][0].fields["answer"] in {"0", "1", "2"}


def test_messages_are_the_prompt_and_a_question_beside_them_is_a_field() -> None:
    (task,) = load_tasks([{"question": "2 + 2", "messages": [{"role": "user", "content": "What is 2 + 2?"}], "answer": "4"}])
    assert task.messages == (Message("user", "What is 2 + 2?"),)
    assert task.fields == {"question": "2 + 2", "answer": "4"}


@pytest.mark.parametrize("prompt", ["What?", [{"role": "user", "content": "What?"}]])
def test_a_prompt_is_a_question_or_messages(prompt: Any) -> None:
    (task,) = load_tasks([{"prompt": prompt, "answer": "4"}])
    assert task.messages == (Message("user", "What?"),)


def test_a_table_gives_rows_of_strings_and_may_hold_messages(tmp_path: Path) -> None:
    comma, tab = tmp_path / "rows.csv", tmp_path / "rows.tsv"
    comma.write_text('\ufeffquestion,answer\n"What is 2 + 2, exactly?\nSay it.",4\n\nWhat is 3?,3\n', encoding="utf-8")
    tab.write_text('messages\tanswer\n"[{""role"": ""user"", ""content"": ""Hi""}]"\t4\n')
    tasks = load_tasks(comma)
    assert [task.messages[0].content for task in tasks] == ["What is 2 + 2, exactly?\nSay it.", "What is 3?"]
    assert [task.fields["answer"] for task in tasks] == ["4", "3"]
    assert load_tasks(tab)[0].messages == (Message("user", "Hi"),)


@pytest.mark.parametrize("line", ["only one cell", "a,b,c", 'a,"b'])
def test_a_line_that_does_not_fit_the_header_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"question,answer\nWhat?,4\n{line}\n")
    with pytest.raises(DataError, match="line 3"):
        load_tasks(path)


@pytest.mark.parametrize("name", ["rows.xlsx", "rows.txt", "folder/rows.dat"])
def test_a_file_of_another_kind_is_not_taken_for_a_task_set(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="no such file"):
        load_tasks(name)
    (tmp_path / name).write_text("PK what")
    with pytest.raises(DataError, match=r"a data set is a \.json, \.jsonl, .*\.csv"):
        load_tasks(name)


class FakeDataset:
    """Iterates over mappings, as a Hugging Face `Dataset` does."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.read = rows, 0

    def __iter__(self) -> Any:
        for row in self.rows:
            self.read += 1
            yield row


def test_objects_that_iterate_over_rows_are_data_sets() -> None:
    stream = FakeDataset(ROWS * 10)
    assert [task.fields["answer"] for task in load_tasks(stream, count=2)] == ["4", "6"]
    assert stream.read == 2
    splits = {"train": FakeDataset(ROWS), "test": FakeDataset(ROWS[:1])}
    assert len(load_tasks(splits)) == 2
    assert len(load_tasks(splits, split="test")) == 1
    with pytest.raises(DataError, match="no split 'validation'; its splits: train, test"):
        load_tasks(splits, split="validation")
    with pytest.raises(DataError, match="not one row"):
        load_tasks(ROWS[0])
    with pytest.raises(DataError, match="not a int"):
        load_tasks(3)  # type: ignore[arg-type]


def test_hub_data_sets_are_loaded_by_datasets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def load_dataset(name: str, config: str | None, split: str) -> FakeDataset:
        asked.append((name, config, split))
        if name == "no/such":
            raise ConnectionError("offline")
        return FakeDataset(ROWS)

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    fake.load_from_disk = lambda place: {"train": FakeDataset(ROWS), "test": FakeDataset(ROWS[:1])}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert len(load_tasks("hf://openai/gsm8k/main:test")) == 2
    assert len(load_tasks("hf://squad")) == 2
    assert asked == [("openai/gsm8k", "main", "test"), ("squad", None, "train")]
    assert len(load_tasks(f"hf://{tmp_path}:test")) == 1
    with pytest.raises(DataError, match="hf://no/such could not be loaded: ConnectionError: offline"):
        load_tasks("hf://no/such")


def test_without_datasets_a_hub_data_set_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"pip install 'agentfly\[hub\]'"):
        load_tasks("hf://openai/gsm8k")


def test_equal_rows_stay_on_one_side_of_a_split() -> None:
    tasks = load_tasks([{"question": "Play.", "secret": number // 2} for number in range(40)])
    train, held = split_rows(tasks, 0.2, 1, key=row_key)
    assert len(held) == 8
    assert not {task.fields["secret"] for task in train} & {task.fields["secret"] for task in held}
    constant = load_tasks([{"question": "Play."} for _ in range(10)])
    assert [len(part) for part in split_rows(constant, 0.2, 1, key=row_key)] == [8, 2]
    lopsided = load_tasks([{"question": "Play.", "secret": number > 0} for number in range(100)])
    assert [len(part) for part in split_rows(lopsided, 0.1, 1, key=row_key)] == [99, 1]


def test_the_number_of_a_row_is_that_of_its_file_also_after_a_split() -> None:
    tasks = load_tasks([{"question": f"q{number}", "id": f"t{number}"} for number in range(20)])
    for part in split_rows(tasks, 0.3, 0):
        last = part[-1]
        with pytest.raises(DataError, match=rf"row {part[0].row} \(id 't{part[0].row}'\) has no field 'answer'"):
            check_fields(part, {"answer"}, "the reward 'exact'")
        assert last.id == f"t{last.row}"


def test_fields_may_have_the_names_of_what_a_chain_provides() -> None:
    from agentfly import FromTask, ReactAgent, reward, tool
    from agentfly.testing import ByteRenderer, ScriptedEngine

    @tool(register=False)
    def read(context: FromTask[str]) -> str:
        """Read the text."""
        return context

    @reward
    def found(prediction: str, context: str, task: Task, **fields: Any) -> float:
        return float(prediction == context == task.fields["context"] and fields["env"] == "lab" and "task" not in fields)

    row = {"question": "Read it.", "context": "blue", "task": "reading", "env": "lab"}
    script = ["Thought: t\nAction: read\nInput: {}", "Thought: t\nAnswer: blue"]
    agent = ReactAgent(ScriptedEngine(script), renderer=ByteRenderer(), tools=[read], reward=found)
    (trajectory,) = agent.run_sync([row])
    assert trajectory.turns[0].results[0].observation == "blue"
    assert trajectory.reward == 1.0


def test_an_integer_of_thousands_of_digits_is_one_sentence_with_its_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "q", "answer": 1}\n{"question": "q", "answer": ' + "9" * 5000 + "}\n")
    with pytest.raises(DataError, match="line 2 is not valid JSON"):
        load_tasks(path)
    with pytest.raises(DataError, match=r"row 1: 'answer' is an integer of more than 4,300 digits"):
        load_tasks([{"question": "q", "answer": 1}, {"question": "q", "answer": 10**5000}])
