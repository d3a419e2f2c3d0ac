"""Data sets: reads files or rows and returns checked `Task`s.

A row is a mapping with `messages`, `conversations` (the same as `from` and `value`), `prompt` (messages or the user's text), or
`question`, `problem` or `instruction` (the user's text). Rewards and tools ask for its other fields by name; `task.fields` has
all of them, and `data.columns` renames them. A data set is one of

    rows                    a list of mappings or Tasks, a Hugging Face `Dataset`, a DataFrame, or a mapping of splits
    rows.jsonl              a file: .json, .jsonl, .csv, .tsv or .parquet
    hf://ORG/NAME           a data set of the Hugging Face hub or a folder of `save_to_disk`: hf://openai/gsm8k/main:test
    arithmetic              a task set: a function `fn(split, count=None, seed=0) -> rows` of the kind "tasks"

All rows are checked before the run. An error gives the number of the row in its file, counted from 0.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .. import plugins
from ..errors import ConfigError, DataError
from ..types import ROLES, Message, Task, ToolCall
from .rows import has_splits, is_file_name, kind_of, parse_line, read_rows, rows_of
from .settings import DataSettings, DataSource

__all__ = [
    "MESSAGES",
    "DataSettings",
    "DataSource",
    "check_fields",
    "has_splits",
    "is_file_name",
    "load_tasks",
    "parse_message",
    "read_rows",
    "rename_columns",
    "row_key",
    "row_of",
    "split_rows",
]

RowT = TypeVar("RowT")

MAX_BITS = 14_284  # the longest integer that `str` writes
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
TEXT_PARTS = ("text", "input_text", "output_text")
MESSAGES = ("messages", "conversations")
"""Fields that hold the messages of a row."""
ASKS = ("messages", "question", "prompt", "problem", "instruction", "conversations")
"""Fields that open a chain, the first that a row has."""
SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "observation": "tool"}
"""Roles by the names that rows with `from` and `value` give them."""


def load_tasks(
    source: str | Path | Iterable[Any],
    *,
    split: str = "train",
    count: int | None = None,
    seed: int = 0,
    columns: Mapping[str, str] | None = None,
) -> list[Task]:
    """Tasks from a file, from a named task set, or from rows (mappings or Tasks). Raises DataError or ConfigError.

    `columns` names fields of the rows by columns of the data.
    """
    if isinstance(source, (str, Path)):
        where = str(source)
        rows = read_rows(where) if is_file_name(where) else _generate(where, split, count, seed)
    else:
        where, rows = "tasks", rows_of(source, split, count)
    if count is not None:
        rows = rows[:count]
    if not rows:
        raise DataError(f"{where}: the data set is empty")
    rows = rename_columns(rows, columns, where)
    tasks = [row if isinstance(row, Task) else _to_task(row, i, where) for i, row in enumerate(rows)]
    _refuse_repeated_ids(tasks, where)
    return tasks


def rename_columns(rows: list[Any], columns: Mapping[str, str] | None, where: str) -> list[Any]:
    """Returns rows whose fields are named as `columns` says; the others stay. A column may lie deeper: `reward_model.style`.

    Raises DataError for a row without a column.
    """
    if not columns:
        return rows
    return [_renamed(row, columns, f"{where}: row {index}") for index, row in enumerate(rows)]


def _renamed(row: object, columns: Mapping[str, str], where: str) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: data.columns renames the fields of an object, and the row is {kind_of(row)}")
    taken = {}
    for field, column in columns.items():
        value: object = row
        for name in [column] if column in row else column.split("."):
            if not isinstance(value, Mapping) or name not in value:
                have = ", ".join(map(str, row)) or "none"
                raise DataError(f"{where} has no column {column!r}, which data.columns names; its columns: {have}")
            value = value[name]
        taken[field] = value
    return {name: value for name, value in row.items() if name not in columns.values()} | taken


def split_rows(
    rows: Sequence[RowT], holdout: float, seed: int, key: Callable[[RowT], Any] | None = None
) -> tuple[list[RowT], list[RowT]]:
    """Splits rows (or tasks) into training and validation; the same seed gives the same split.

    Rows with the same `key` stay on one side, unless there are too few different ones.
    """
    if not 0.0 < holdout < 1.0:
        raise ConfigError(f"data.holdout must be between 0 and 1, not {holdout}")
    if len(rows) < 2:
        raise DataError("one row cannot be split into training and validation: set data.validation to another file")
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    wanted = min(len(rows) - 1, max(1, round(len(rows) * holdout)))
    groups: dict[Any, list[int]] = {}
    for i in order:
        groups.setdefault(i if key is None else key(rows[i]), []).append(i)
    held: set[int] = set()
    for group in groups.values():
        if len(held) + len(group) <= wanted:
            held.update(group)
    held = held or set(order[:wanted])
    return [row for i, row in enumerate(rows) if i not in held], [rows[i] for i in sorted(held)]


def row_key(task: Task) -> str:
    """A text that two tasks share exactly if their rows are equal, ids aside."""
    fields = {name: value for name, value in task.fields.items() if name != "id"}
    return f"{task.messages!r} {json.dumps(fields, sort_keys=True, default=repr)}"


def parse_message(item: object, number: int, where: str) -> Message:
    """One message of a row. `content` may be a list of text parts; `tool_calls` may have the form of a chat server.

    A message with `from` and `value` is one with `role` and `content`.

    A thought in a field beside the content (THOUGHTS) is put before it, between <think> and </think>. Raises DataError.
    """
    if isinstance(item, Mapping) and "from" in item and "role" not in item:
        item = {**item, "role": SPEAKERS.get(item["from"], item["from"]), "content": item.get("value")}
    if not isinstance(item, Mapping) or "role" not in item or not ("content" in item or item.get("tool_calls")):
        raise DataError(f"{where}: message {number} must be an object with 'role' and 'content'")
    if item["role"] not in ROLES:
        raise DataError(f"{where}: message {number} has the role {item['role']!r}; roles are {', '.join(ROLES)}")
    content = item.get("content")
    text = "" if content is None and item.get("tool_calls") else _content_text(content, f"{where}: message {number}")
    calls = tuple(_parse_call(call, number, where) for call in item.get("tool_calls") or ())
    if item.get("function_call") and not calls:
        raise DataError(f"{where}: message {number} has 'function_call', which servers no longer write: give 'tool_calls'")
    thought = next((item[key] for key in THOUGHTS if item.get(key)), None)
    if thought is not None and item["role"] == "assistant":
        text = f"<think>\n{_content_text(thought, f'{where}: message {number}')}\n</think>\n\n{text}"
    return Message(item["role"], text, calls, name=item.get("name"), tool_call_id=item.get("tool_call_id"))


def _content_text(content: object, where: str) -> str:
    """The text of a message's content: a string, or parts as `{"type": "text", "text": ...}`, which are joined by newlines."""
    if isinstance(content, str):
        return content
    parts = [content] if isinstance(content, Mapping) else content
    if not isinstance(parts, list | tuple) or not parts:
        raise DataError(f"{where}: 'content' must be a string or a list of text parts, not {kind_of(content)}")
    texts = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        text = part.get("text") if isinstance(part, Mapping) else part
        if kind not in TEXT_PARTS:
            raise DataError(f"{where} has a part of type {kind!r}; the messages of a row hold text only")
        if not isinstance(text, str):
            raise DataError(f"{where}: a text part must be {{'type': 'text', 'text': '...'}}, not {kind_of(part)}")
        texts.append(text)
    return "\n".join(texts)


def _parse_call(call: Any, number: int, where: str) -> ToolCall:
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise DataError(f"{where}: message {number} has a tool call without a name")
    arguments = inner.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parse_line(arguments, number, Path(f"{where}, message"))
    if not isinstance(arguments, dict):
        raise DataError(f"{where}: message {number}: the arguments of a tool call are an object, not {kind_of(arguments)}")
    return ToolCall(inner["name"], arguments, str(call.get("id", "")))


def check_fields(tasks: Sequence[Task], needs: Iterable[str], who: str) -> None:
    """Raises DataError if a row lacks a field that a reward or tool (`who`) asks for."""
    for name in sorted(needs):
        for index, task in enumerate(tasks):
            if name not in task.fields:
                have = ", ".join(sorted(task.fields)) or "none"
                place = row_of(task, index)
                raise DataError(f"{place} has no field {name!r}, which {who} asks for; its fields: {have}")


def row_of(task: Task, index: int) -> str:
    """How an error names a task: by its row in the file, or by `index` if it was not read from one."""
    return f"row {index if task.row is None else task.row} (id {task.id!r})"


def _generate(name: str, split: str, count: int | None, seed: int) -> list[Any]:
    maker = plugins.resolve("tasks", name)
    if not callable(maker):
        raise ConfigError(f"the task set {name!r} is not a function fn(split, count=None, seed=0) -> rows")
    return list(maker(split, count, seed))


def _to_task(row: object, index: int, where: str) -> Task:
    def refuse(what: str) -> DataError:
        return DataError(f"{where}: row {index}: {what}")

    if not isinstance(row, Mapping):
        raise refuse(f"a row is an object with fields, this is {kind_of(row)}")
    if any(not isinstance(key, str) for key in row):
        raise refuse("field names must be strings")
    asked = next((name for name in ASKS if name in row), None)
    if asked is None:
        have = ", ".join(map(str, row)) or "none"
        raise refuse(f"has none of {', '.join(ASKS)}; its fields: {have}. data.columns renames fields: columns.question=NAME")
    huge = next((key for key, value in row.items() if isinstance(value, int) and value.bit_length() > MAX_BITS), None)
    if huge is not None:
        raise refuse(f"{huge!r} is an integer of more than 4,300 digits, which Python does not write")
    value = row[asked]
    if asked not in MESSAGES and (asked != "prompt" or isinstance(value, str)):
        if not isinstance(value, str) or not value.strip():
            raise refuse(f"{asked!r} must be a non-empty string, not {kind_of(value)}")
        about = row.get("input") if asked == "instruction" else None  # the text that the instruction is about
        messages: tuple[Message, ...] = (Message("user", f"{value}\n\n{about}" if about else value),)
    else:
        messages = _to_messages(value, f"{where}: row {index}", asked)
    fields = {key: value for key, value in row.items() if key not in MESSAGES}
    own_id = row.get("id")
    return Task(id=str(index if own_id is None else own_id), messages=messages, fields=fields, row=index)


def _to_messages(value: object, where: str, name: str) -> tuple[Message, ...]:
    if isinstance(value, str) and value.lstrip()[:1] == "[":  # a cell of a table
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: {name!r} is not valid JSON: {error}") from error
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise DataError(f"{where}: {name!r} must be a non-empty list, not {kind_of(value)}")
    messages = [parse_message(item, number, where) for number, item in enumerate(value)]
    if messages[-1].role == "assistant":
        raise DataError(f"{where}: the last message is from the assistant, so the model has nothing to reply to")
    return tuple(messages)


def _refuse_repeated_ids(tasks: Sequence[Task], where: str) -> None:
    seen: dict[str, int] = {}
    for index, task in enumerate(tasks):
        if task.id in seen:
            raise DataError(f"{where}: rows {seen[task.id]} and {index} have the same id {task.id!r}")
        seen[task.id] = index
