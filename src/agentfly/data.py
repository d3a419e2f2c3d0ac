"""Data sets: reads files or rows and returns checked `Task`s.

A row is a mapping with `messages`, `question` (the user message) or `prompt` (either). Rewards and tools ask for its other
fields by name; `task.fields` has all of them. A data set is one of

    rows                    a list of mappings or Tasks, a Hugging Face `Dataset`, a DataFrame, or a mapping of splits
    rows.jsonl              a file: .json, .jsonl, .csv, .tsv or .parquet
    hf://ORG/NAME           a data set of the Hugging Face hub or a folder of `save_to_disk`: hf://openai/gsm8k/main:test
    arithmetic              a task set: a function `fn(split, count=None, seed=0) -> rows` of the kind "tasks"

All rows are checked before the run. An error gives the number of the row in its file, counted from 0.
"""

from __future__ import annotations

import csv
import dataclasses
import difflib
import io
import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from . import plugins, schema
from .errors import ConfigError, DataError
from .schema import Bounds, read, setting
from .types import ROLES, Message, Task, ToolCall

RowT = TypeVar("RowT")

SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
HUB = "hf://"
MAX_BITS = 14_284  # the longest integer that `str` writes
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """The tasks."""

    train: str = setting("", "training rows: a .json, .jsonl, .csv or .parquet file, hf://NAME, or a task set by name")
    validation: str | None = setting(None, "held-out rows; when not set, a share of the training rows or the task set's split")
    holdout: float = setting(
        0.1, "share of a training file that is held out when no validation rows are given", above=0, below=1
    )
    train_count: int | None = setting(None, "use only the first rows", low=1)
    validation_count: int | None = setting(
        None, "use only the first held-out rows; when not set, 200 in a training and all in `agentfly eval`", low=0
    )
    shuffle: bool = setting(True, "draw the training rows in a new seeded order each time through them")
    sampler: str | dict[str, Any] | Callable[..., Any] = setting(
        "epochs",
        "what decides which row is drawn next: a name of `agentfly samplers list`, file.py:NAME or module:NAME, in Python also "
        "a class; or a table: `kind` and its options",
    )
    sources: dict[str, dict[str, Any]] = setting(
        {}, "several data sets by name, instead of train: a table for each, with `weight` (1 when not set) and keys of [data]"
    )

    def __post_init__(self) -> None:
        schema.check_fields(self, "data.")
        if not (isinstance(self.sampler, str | Mapping) or callable(self.sampler)):
            raise ConfigError(f"data.sampler must be a name, a table or a class, not {self.sampler!r}")
        if isinstance(self.sampler, Mapping) and "kind" not in self.sampler:
            raise ConfigError("data.sampler has no kind: write {kind = NAME, ...}, or the name alone")
        self.parts()

    @property
    def validated(self) -> int:
        """How many held-out rows a training validates on, at most."""
        return 200 if self.validation_count is None else self.validation_count

    @property
    def sampler_options(self) -> tuple[str | Callable[..., Any], dict[str, Any]]:
        """The sampler without its options, and these."""
        options = dict(self.sampler) if isinstance(self.sampler, Mapping) else {"kind": self.sampler}
        return options.pop("kind"), options

    @property
    def name(self) -> str | None:
        """What the rows are called: the file or task set, or the names of all sources."""
        return "+".join(self.sources) or self.train or None

    def parts(self) -> list[DataSource]:
        """Returns the sources, or the only one, which has no name. Raises ConfigError for a source that is wrong."""
        if not self.sources:
            return [DataSource(None, 1.0, self)]
        for key in ("train", "validation"):
            if getattr(self, key):
                raise ConfigError(f"data.{key} and data.sources cannot both be set: move the rows of data.{key} into a source")
        return [self._part(name, table) for name, table in self.sources.items()]

    def _part(self, name: str, table: Mapping[str, Any]) -> DataSource:
        prefix = f"data.sources.{name}"
        if not re.fullmatch(r"[\w-]+", name):
            raise ConfigError(f"{prefix}: the name of a source has letters, digits, _ and - only")
        keys = [*(item.name for item in dataclasses.fields(self) if item.name != "sources"), "weight"]
        for key in table:
            if key not in keys:
                near = difflib.get_close_matches(key, keys, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"a source has {', '.join(keys)}"
                raise ConfigError(f"unknown config key '{prefix}.{key}'; {hint}")
        if not table.get("train"):
            raise ConfigError(f"{prefix}.train is not set: point it at a file, at hf://NAME, or at a task set")
        weight: float = read(f"{prefix}.weight", table.get("weight", 1.0), float, Bounds(above=0))
        own = {key: value for key, value in table.items() if key != "weight"}
        try:
            return DataSource(name, weight, dataclasses.replace(self, sources={}, **own))
        except ConfigError as error:
            raise ConfigError(str(error).replace("data.", f"{prefix}.", 1)) from error


class DataSource(NamedTuple):
    """A named part of the rows: its share of the draws is its weight among those of all sources."""

    name: str | None
    weight: float
    data: DataSettings


def load_tasks(
    source: str | Path | Iterable[Any], *, split: str = "train", count: int | None = None, seed: int = 0
) -> list[Task]:
    """Tasks from a file, from a named task set, or from rows (mappings or Tasks). Raises DataError or ConfigError."""
    if isinstance(source, (str, Path)):
        where = str(source)
        rows = read_rows(where) if is_file_name(where) else _generate(where, split, count, seed)
    else:
        where, rows = "tasks", _rows_of(source, split, count)
    if count is not None:
        rows = rows[:count]
    if not rows:
        raise DataError(f"{where}: the data set is empty")
    tasks = [row if isinstance(row, Task) else _to_task(row, i, where) for i, row in enumerate(rows)]
    _refuse_repeated_ids(tasks, where)
    return tasks


def read_rows(source: str | Path) -> list[Any]:
    """The rows of a file or of a `hf://` data set, unchecked. Raises DataError if they cannot be read."""
    if str(source).startswith(HUB):
        return _read_hub(str(source))
    path = Path(source)
    if not path.is_file():
        raise DataError(f"{path}: {'a folder, not a file of rows' if path.is_dir() else 'no such file'}")
    if path.suffix == ".parquet":
        return _read_parquet(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}){_formats(path)}") from error
    if path.suffix == ".json":
        return _parse_json_list(text, path)
    if path.suffix in (".csv", ".tsv"):
        return _parse_table(text, path)
    return [_parse_line(line, number, path) for number, line in enumerate(text.splitlines(), 1) if line.strip()]


def has_splits(source: object) -> bool:
    """Whether a data set is a mapping of splits, such as a Hugging Face `DatasetDict`, and not a row."""
    return isinstance(source, Mapping) and any(
        isinstance(part, Iterable) and not isinstance(part, str | bytes | Mapping)
        for part in (source.get(name) for name in ("train", "validation", "test"))
    )


def _rows_of(source: Any, split: str, count: int | None) -> list[Any]:
    """The rows of an object. Of a stream, only the first `count` are read."""
    if has_splits(source):
        if split not in source:
            raise DataError(f"the data set has no split {split!r}; its splits: {', '.join(map(str, source))}")
        source = source[split]
    if isinstance(source, Mapping):
        raise DataError("tasks must be a list of rows, not one row: put it in a list")
    if hasattr(source, "columns") and hasattr(source, "to_dict"):  # a DataFrame iterates over its columns
        source = source.to_dict("records")
    try:
        return list(islice(source, count))
    except TypeError:
        raise DataError(f"tasks must be a list of rows, a file or a task set's name, not {_kind(source)}") from None


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

    A thought in a field beside the content (THOUGHTS) is put before it, between <think> and </think>. Raises DataError.
    """
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
        raise DataError(f"{where}: 'content' must be a string or a list of text parts, not {_kind(content)}")
    texts = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        text = part.get("text") if isinstance(part, Mapping) else part
        if kind not in TEXT_PARTS:
            raise DataError(f"{where} has a part of type {kind!r}; the messages of a row hold text only")
        if not isinstance(text, str):
            raise DataError(f"{where}: a text part must be {{'type': 'text', 'text': '...'}}, not {_kind(part)}")
        texts.append(text)
    return "\n".join(texts)


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
                place = row_of(task, index)
                raise DataError(f"{place} has no field {name!r}, which {who} asks for; its fields: {have}")


def row_of(task: Task, index: int) -> str:
    """How an error names a task: by its row in the file, or by `index` if it was not read from one."""
    return f"row {index if task.row is None else task.row} (id {task.id!r})"


def is_file_name(name: str) -> bool:
    """Whether a source is a file or a `hf://` data set rather than the name of a task set."""
    if name.startswith(HUB) or name.endswith(SUFFIXES):
        return True
    return ":" not in name and ("/" in name or Path(name).suffix != "") and name not in plugins.names("tasks")


def _generate(name: str, split: str, count: int | None, seed: int) -> list[Any]:
    maker = plugins.resolve("tasks", name)
    if not callable(maker):
        raise ConfigError(f"the task set {name!r} is not a function fn(split, count=None, seed=0) -> rows")
    return list(maker(split, count, seed))


def _parse_json_list(text: str, path: Path) -> list[Any]:
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(rows, list):
        raise DataError(
            f"{path}: a .json data set is a list of rows, this is a {type(rows).__name__} (one row a line is .jsonl)"
        )
    return rows


def _parse_line(line: str, number: int, path: Path) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError: an integer of more digits than Python reads
        raise DataError(f"{path}: line {number} is not valid JSON: {error}{_formats(path)}") from error


def _formats(path: Path) -> str:
    """For an unknown suffix: which files are data sets."""
    return "" if not path.suffix or path.suffix in SUFFIXES else f"; a data set is a {', '.join(SUFFIXES)} file"


def _parse_table(text: str, path: Path) -> list[Any]:
    """The rows of a CSV or TSV file with a header. Cells are strings; a cell of `messages` or `prompt` may hold JSON."""
    dialect = "excel-tab" if path.suffix == ".tsv" else "excel"
    reader = csv.DictReader(io.StringIO(text, newline=""), dialect=dialect, strict=True)
    rows = []
    try:
        for row in reader:
            if None in row or None in row.values():
                names = reader.fieldnames or ()
                raise DataError(f"{path}: line {reader.line_num} does not have {len(names)} cells, as the header has")
            rows.append(row)
    except csv.Error as error:
        raise DataError(f"{path}: line {reader.reader.line_num} is not valid CSV: {error}") from error
    return rows


def _read_hub(source: str) -> list[Any]:
    """`hf://ORG/NAME[/CONFIG][:SPLIT]`, or `hf://` and a folder of `Dataset.save_to_disk`; the split is train unless given."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise plugins.missing_extra(source, "datasets") from error
    place, _, split = source.removeprefix(HUB).partition(":")
    split = split or "train"
    try:
        if Path(place).is_dir():
            dataset = datasets.load_from_disk(place)
            return _rows_of(dataset, split, None)
        name, config = "/".join(place.split("/")[:2]), "/".join(place.split("/")[2:])
        return list(datasets.load_dataset(name, config or None, split=split))
    except DataError:
        raise
    except Exception as error:  # the hub, the network and a data set's own code can raise anything
        raise DataError(f"{source} could not be loaded: {type(error).__name__}: {error}") from error


def _read_parquet(path: Path) -> list[Any]:
    try:
        import pyarrow.parquet as parquet
    except ModuleNotFoundError as error:
        raise plugins.missing_extra(f"reading {path.name}", "pyarrow") from error
    try:
        return list(parquet.read_table(path).to_pylist())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error


def _to_task(row: object, index: int, where: str) -> Task:
    def refuse(what: str) -> DataError:
        return DataError(f"{where}: row {index}: {what}")

    if not isinstance(row, Mapping):
        raise refuse(f"a row is an object with fields, this is {_kind(row)}")
    if any(not isinstance(key, str) for key in row):
        raise refuse("field names must be strings")
    asked = next((name for name in ("messages", "question", "prompt") if name in row), None)
    if asked is None:
        raise refuse(f"has neither 'question' nor 'messages'; its fields: {', '.join(map(str, row)) or 'none'}")
    huge = next((key for key, value in row.items() if isinstance(value, int) and value.bit_length() > MAX_BITS), None)
    if huge is not None:
        raise refuse(f"{huge!r} is an integer of more than 4,300 digits, which Python does not write")
    value = row[asked]
    if asked == "question" or (asked == "prompt" and isinstance(value, str)):
        if not isinstance(value, str) or not value.strip():
            raise refuse(f"{asked!r} must be a non-empty string, not {_kind(value)}")
        messages: tuple[Message, ...] = (Message("user", value),)
    else:
        messages = _to_messages(value, f"{where}: row {index}", asked)
    fields = {key: value for key, value in row.items() if key != "messages"}
    own_id = row.get("id")
    return Task(id=str(index if own_id is None else own_id), messages=messages, fields=fields, row=index)


def _to_messages(value: object, where: str, name: str) -> tuple[Message, ...]:
    if isinstance(value, str) and value.lstrip()[:1] == "[":  # a cell of a table
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: {name!r} is not valid JSON: {error}") from error
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise DataError(f"{where}: {name!r} must be a non-empty list, not {_kind(value)}")
    messages = [parse_message(item, number, where) for number, item in enumerate(value)]
    if messages[-1].role == "assistant":
        raise DataError(f"{where}: the last message is from the assistant, so the model has nothing to reply to")
    return tuple(messages)


def _kind(value: object) -> str:
    return "nothing" if value is None else "an empty string" if value == "" else f"a {type(value).__name__}"


def _refuse_repeated_ids(tasks: Sequence[Task], where: str) -> None:
    seen: dict[str, int] = {}
    for index, task in enumerate(tasks):
        if task.id in seen:
            raise DataError(f"{where}: rows {seen[task.id]} and {index} have the same id {task.id!r}")
        seen[task.id] = index
