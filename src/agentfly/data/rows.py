"""The rows of a file, a Hugging Face data set or an object, unchecked."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from .. import plugins
from ..errors import DataError

SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
HUB = "hf://"


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
    return [parse_line(line, number, path) for number, line in enumerate(text.splitlines(), 1) if line.strip()]


def is_file_name(name: str) -> bool:
    """Whether a source is a file or a `hf://` data set rather than the name of a task set."""
    if name.startswith(HUB) or name.endswith(SUFFIXES):
        return True
    return ":" not in name and ("/" in name or Path(name).suffix != "") and name not in plugins.names("tasks")


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


def parse_line(line: str, number: int, path: Path) -> object:
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
            return rows_of(dataset, split, None)
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


def has_splits(source: object) -> bool:
    """Whether a data set is a mapping of splits, such as a Hugging Face `DatasetDict`, and not a row."""
    return isinstance(source, Mapping) and any(
        isinstance(part, Iterable) and not isinstance(part, str | bytes | Mapping)
        for part in (source.get(name) for name in ("train", "validation", "test"))
    )


def rows_of(source: Any, split: str, count: int | None) -> list[Any]:
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
        raise DataError(f"tasks must be a list of rows, a file or a task set's name, not {kind_of(source)}") from None


def kind_of(value: object) -> str:
    return "nothing" if value is None else "an empty string" if value == "" else f"a {type(value).__name__}"
