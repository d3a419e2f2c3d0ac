"""Data sets: reads files or rows and returns checked `Task`s.

A row is a mapping with `question` (the user message) or `messages`. Rewards and tools ask for its other fields by name. A data
set is a list of rows, a JSON, JSONL or Parquet file, or the name of a task set: a function
`fn(split, count=None, seed=0) -> rows` registered under the kind "tasks". All rows are checked before the run; an error gives
the index of the row.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from . import plugins
from .errors import ConfigError, DataError
from .types import ROLES, Message, Task, ToolCall

RowT = TypeVar("RowT")

# Parameters of these names are filled by the chain, so a field of a row with such a name could never be asked for.
RESERVED = frozenset({"prediction", "trajectory", "task", "env", "context"})
SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet")


def load_tasks(
    source: str | Path | Iterable[Any], *, split: str = "train", count: int | None = None, seed: int = 0
) -> list[Task]:
    """Tasks from a file, from a named task set, or from rows (mappings or Tasks). Raises DataError or ConfigError."""
    if isinstance(source, (str, Path)):
        where = str(source)
        rows = read_rows(Path(where)) if is_file_name(where) else _generate(where, split, count, seed)
    elif isinstance(source, Mapping):
        raise DataError("tasks must be a list of rows, not one row: put it in a list")
    else:
        where, rows = "tasks", list(source)
    if count is not None:
        rows = rows[:count]
    if not rows:
        raise DataError(f"{where}: the data set is empty")
    tasks = [row if isinstance(row, Task) else _to_task(row, i, where) for i, row in enumerate(rows)]
    _refuse_repeated_ids(tasks, where)
    return tasks


def read_rows(path: Path) -> list[Any]:
    """The rows of a file, unchecked. Raises DataError if the file cannot be read."""
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    if path.suffix == ".parquet":
        return _read_parquet(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    if path.suffix == ".json":
        return _parse_json_list(text, path)
    return [_parse_line(line, number, path) for number, line in enumerate(text.splitlines(), 1) if line.strip()]


def split_rows(rows: Sequence[RowT], holdout: float, seed: int) -> tuple[list[RowT], list[RowT]]:
    """Splits rows (or tasks) into training and validation; the same seed gives the same split."""
    if not 0.0 < holdout < 1.0:
        raise ConfigError(f"data.holdout must be between 0 and 1, not {holdout}")
    if len(rows) < 2:
        raise DataError("one row cannot be split into training and validation: set data.validation to another file")
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    held = set(order[: min(len(rows) - 1, max(1, round(len(rows) * holdout)))])
    return [row for i, row in enumerate(rows) if i not in held], [rows[i] for i in sorted(held)]


def parse_message(item: Any, number: int, where: str) -> Message:
    """One message of a row. `tool_calls` may have the form of a chat server. Raises DataError."""
    if not isinstance(item, Mapping) or "role" not in item or "content" not in item:
        raise DataError(f"{where}: message {number} must be an object with 'role' and 'content'")
    if item["role"] not in ROLES:
        raise DataError(f"{where}: message {number} has the role {item['role']!r}; roles are {', '.join(ROLES)}")
    content = "" if item["content"] is None and item.get("tool_calls") else item["content"]
    if not isinstance(content, str):
        raise DataError(f"{where}: message {number}: 'content' must be a string, not {_kind(content)}")
    calls = tuple(_parse_call(call, number, where) for call in item.get("tool_calls") or ())
    return Message(item["role"], content, calls, name=item.get("name"), tool_call_id=item.get("tool_call_id"))


def _parse_call(call: Any, number: int, where: str) -> ToolCall:
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise DataError(f"{where}: message {number} has a tool call without a name")
    arguments = inner.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parse_line(arguments, number, Path(f"{where}, message"))
    if not isinstance(arguments, dict):
        raise DataError(f"{where}: message {number}: the arguments of a tool call are an object, not {_kind(arguments)}")
    return ToolCall(inner["name"], arguments, str(call.get("id", "")))


def check_fields(tasks: Sequence[Task], needs: Iterable[str], who: str) -> None:
    """Raises DataError if a row lacks a field that a reward or tool (`who`) asks for."""
    for name in sorted(needs):
        for index, task in enumerate(tasks):
            if name not in task.fields:
                have = ", ".join(sorted(task.fields)) or "none"
                raise DataError(f"row {index} (id {task.id!r}) has no field {name!r}, which {who} asks for; its fields: {have}")


def is_file_name(name: str) -> bool:
    """Whether a source is a file rather than the name of a task set."""
    return name.endswith(SUFFIXES) or ("/" in name and ":" not in name)


def _generate(name: str, split: str, count: int | None, seed: int) -> list[Any]:
    maker = plugins.resolve("tasks", name)
    if not callable(maker):
        raise ConfigError(f"the task set {name!r} is not a function fn(split, count=None, seed=0) -> rows")
    return list(maker(split, count, seed))


def _parse_json_list(text: str, path: Path) -> list[Any]:
    try:
        rows = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(rows, list):
        raise DataError(
            f"{path}: a .json data set is a list of rows, this is a {type(rows).__name__} (one row a line is .jsonl)"
        )
    return rows


def _parse_line(line: str, number: int, path: Path) -> Any:
    try:
        return json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{path}: line {number} is not valid JSON: {error}") from error


def _read_parquet(path: Path) -> list[Any]:
    try:
        import pyarrow.parquet as parquet
    except ModuleNotFoundError as error:
        raise plugins.missing_extra(f"reading {path.name}", "pyarrow") from error
    try:
        return list(parquet.read_table(path).to_pylist())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error


def _to_task(row: Any, index: int, where: str) -> Task:
    def refuse(what: str) -> DataError:
        return DataError(f"{where}: row {index}: {what}")

    if not isinstance(row, Mapping):
        raise refuse(f"a row is an object with fields, this is {_kind(row)}")
    if any(not isinstance(key, str) for key in row):
        raise refuse("field names must be strings")
    if taken := RESERVED & row.keys():
        raise refuse(f"the field name {sorted(taken)[0]!r} is reserved; rename it")
    if "question" in row and "messages" in row:
        raise refuse("has both 'question' and 'messages'; keep one")
    if "messages" in row:
        messages = _to_messages(row["messages"], f"{where}: row {index}")
    elif "question" in row:
        question = row["question"]
        if not isinstance(question, str) or not question.strip():
            raise refuse(f"'question' must be a non-empty string, not {_kind(question)}")
        messages = (Message("user", question),)
    else:
        raise refuse(f"has neither 'question' nor 'messages'; its fields: {', '.join(map(str, row)) or 'none'}")
    fields = {key: value for key, value in row.items() if key != "messages"}
    return Task(id=str(row.get("id", index)), messages=messages, fields=fields)


def _to_messages(value: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise DataError(f"{where}: 'messages' must be a non-empty list, not {_kind(value)}")
    messages = [parse_message(item, number, where) for number, item in enumerate(value)]
    if messages[-1].role == "assistant":
        raise DataError(f"{where}: the last message is from the assistant, so the model has nothing to reply to")
    return tuple(messages)


def _kind(value: Any) -> str:
    return "nothing" if value is None else "an empty string" if value == "" else f"a {type(value).__name__}"


def _refuse_repeated_ids(tasks: Sequence[Task], where: str) -> None:
    seen: dict[str, int] = {}
    for index, task in enumerate(tasks):
        if task.id in seen:
            raise DataError(f"{where}: rows {seen[task.id]} and {index} have the same id {task.id!r}")
        seen[task.id] = index
