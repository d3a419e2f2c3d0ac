"""Files of passages, read row by row: JSONL or gzipped JSONL in the published shapes.

    wiki-18      {"id": "0", "contents": "\\"Title\\"\\nText"}
    KILT         {"_id": "290", "wikipedia_title": "A", "text": ["A\\n", "First paragraph.\\n", ...]}
    HotpotQA     {"id": "12", "title": "Anarchism", "text": [["First sentence.", ...], ...]}
    plain, BEIR  {"id" or "_id": ..., "title": ..., "text": ...}

A row without an id gets its position as id. Ids are stored in the form in which they are shown (see `plain_id`). A row without
text raises DataError with its line number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ....errors import DataError
from ....tools.text import clean
from ...jsonl import read_lines
from .types import Passage

IDS = ("id", "_id", "wikipedia_id", "docid", "pid")
TITLES = ("title", "wikipedia_title")
TEXTS = ("text", "contents", "content", "passage")
MAX_ID = 2_000
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


def read_passages(path: str | Path) -> Iterator[tuple[int, Passage]]:
    """The passages of a file, each with its line number. Raises DataError for a malformed row."""
    for place, (number, row) in enumerate(read_lines(path)):
        yield number, to_passage(row, place, f"{path}: line {number}")


def to_passage(row: Mapping[str, Any], place: int, where: str) -> Passage:
    if not isinstance(row, dict):
        raise DataError(f"{where}: a passage is an object with fields, this is a {type(row).__name__}")
    given_id = next((row[name] for name in IDS if row.get(name) is not None), place)
    id_text = plain_id(str(given_id)) if isinstance(given_id, str | int) and not isinstance(given_id, bool) else ""
    if not id_text or len(id_text) > MAX_ID:
        shown = repr(given_id)[:100]
        raise DataError(f"{where}: the id must be a number or a non-empty string of at most {MAX_ID} characters, not {shown}")
    name = next((name for name in TEXTS if name in row), None)
    if name is None:
        raise DataError(f"{where}: has no field 'text'; its fields: {', '.join(map(str, row)) or 'none'}")
    text = _joined(row[name])
    if text is None or not text.strip():
        raise DataError(f"{where}: {name!r} must be a non-empty string, or a list of strings")
    title = next((row[field] for field in TITLES if row.get(field) is not None), "")
    if not isinstance(title, str):
        raise DataError(f"{where}: the title must be a string, not a {type(title).__name__}")
    text = text.strip()
    first, newline, rest = text.partition("\n")
    if not title and name == "contents" and newline and rest.strip():
        title, text = first.strip().strip('"'), rest.strip()
    elif title and first.strip() == title and rest.strip():  # KILT's first paragraph is the title again
        text = rest.strip()
    return Passage(_encodable(id_text), _encodable(title.strip()), _encodable(text))


def plain_id(text: str) -> str:
    """The form in which an id is stored, shown and read: one line, without surrounding brackets."""
    if text.isalnum():
        return text
    text = one_line(text)
    while len(text) > 1 and text[0] == "[" and text[-1] == "]":
        text = text[1:-1].strip()
    return text


def one_line(text: str) -> str:
    """The text on one line, without control characters."""
    return " ".join(_CONTROL.sub(" ", clean(text)).split())


def _joined(value: object) -> str | None:
    """The text of a string, of a list of paragraphs, or of paragraphs that are lists of sentences; None for other types."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return None
    parts: list[str] = []
    for part in value:
        inner = _joined(part) if isinstance(part, str | list) else None
        if inner is None:
            return None
        parts.append(inner)
    paragraphs = any(isinstance(part, list) for part in value) or any("\n" in part for part in parts)
    joined = "\n".join(part.strip("\n") for part in parts if part.strip()) if paragraphs else "".join(parts)
    return joined.replace("BULLET::::", "- ")


def _encodable(text: str) -> str:
    """The text without lone surrogates, which JSON can contain and UTF-8 cannot."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
