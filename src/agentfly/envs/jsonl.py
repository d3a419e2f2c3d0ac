"""Files with one JSON value per line, also gzipped, read row by row. Errors name the file and the line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from ..errors import DataError

MAX_LINE = 64 << 20
UNREADABLE = (OSError, EOFError, zlib.error)
"""Raised by files that are truncated, damaged or not readable."""


def open_bytes(path: Path) -> gzip.GzipFile | BufferedReader:
    """A file as a stream of bytes, decompressed if its name or its first bytes say that it is gzipped."""
    with open(path, "rb") as stream:
        zipped = path.suffix == ".gz" or stream.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if zipped else open(path, "rb")


def read_lines(path: str | Path) -> Iterator[tuple[int, Any]]:
    """The rows of a JSONL file with their line numbers. Skips blank lines. Raises DataError for an empty or malformed file."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    number = rows = 0
    try:
        with open_bytes(path) as stream:
            while line := stream.readline(MAX_LINE):
                number += 1
                if len(line) >= MAX_LINE:
                    raise DataError(f"{path}: line {number} is longer than {MAX_LINE >> 20} MB")
                if line.isspace():
                    continue
                rows += 1
                # Not json.loads(bytes), which would guess UTF-16 or UTF-32.
                yield number, json.loads(line.decode("utf-8-sig", "surrogatepass"))
    except UNREADABLE as error:
        raise DataError(f"{path}: line {number + 1} cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: line {number} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: line {number} is not valid JSON: {error.msg} (column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or lists in lists
        raise DataError(f"{path}: line {number} is not valid JSON: {error}") from error
    if not rows:
        raise DataError(f"{path}: the file has no rows")
