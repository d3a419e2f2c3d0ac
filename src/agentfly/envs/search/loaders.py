"""Question files: HotpotQA-, 2Wiki-, NQ- and KILT-shaped rows from a JSON list or JSONL, gzipped or not.

    HotpotQA, 2Wiki   _id, question, answer, type, supporting_facts [["Title", 0], ...] or {"title": [...]}
    NQ                question, answer ["..."] or golden_answers ["..."]
    KILT              id, input, output [{"answer": ..., "provenance": [{"title": ...}]}]
    plain             question, answer, gold_titles ["..."] or "One | Other"

A row becomes `id`, `question`, `answer` (one text, or a list of alternatives), `kind` and, if the file has them,
`gold_titles`. A malformed row raises DataError with its line or row number.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...errors import DataError
from ..jsonl import read_lines

QuestionRow = dict[str, Any]
ANSWERS = ("answer", "golden_answers", "answers", "output")
MAX_FILE = 4 << 30


def load_questions(path: str | Path) -> list[QuestionRow]:
    """The questions of a file. Raises DataError for a malformed row or a repeated id."""
    rows: list[QuestionRow] = []
    seen: dict[str, str] = {}
    for place, (where, row) in enumerate(_items(Path(path))):
        made = question_row(row, place, f"{path}: {where}")
        if made["id"] in seen:
            raise DataError(f"{path}: {seen[made['id']]} and {where} have the same id {made['id']!r}")
        seen[made["id"]] = where
        rows.append(made)
    return rows


def question_row(row: Mapping[str, Any], place: int, where: str) -> QuestionRow:
    """One question with the fields that the world uses. `place` is its id if the row has none."""
    if not isinstance(row, dict):
        raise DataError(f"{where}: a question is an object with fields, this is a {type(row).__name__}")
    question = next((row[name] for name in ("question", "input", "query") if name in row), None)
    if not isinstance(question, str) or not question.strip():
        raise DataError(f"{where}: 'question' must be a non-empty string; its fields: {', '.join(map(str, row)) or 'none'}")
    made: QuestionRow = {
        "id": str(next((row[name] for name in ("_id", "id", "qid") if row.get(name) is not None), place)),
        "question": question.strip(),
        "answer": _answer(row, where),
        "kind": str(row.get("type") or row.get("kind") or "question"),
    }
    if titles := _titles(row, where):
        made["gold_titles"] = titles
    return made


def _items(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a file, each with its line or row number as text."""
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    if ".json" not in path.suffixes:
        for number, row in read_lines(path):
            yield f"line {number}", row
        return
    if path.stat().st_size > MAX_FILE:
        raise DataError(f"{path}: a JSON list of more than {MAX_FILE >> 30} GB; give it as JSONL")
    try:
        data = path.read_bytes()
        rows = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{path}: a .json file of questions is a list with at least one row")
    yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))


def _answer(row: QuestionRow, where: str) -> str | list[str]:
    name = next((name for name in ANSWERS if name in row), None)
    if name is None:
        raise DataError(f"{where}: has no field 'answer'; its fields: {', '.join(map(str, row)) or 'none'}")
    answer = row[name]
    if name == "output" and isinstance(answer, list):
        answer = [each.get("answer") for each in answer if isinstance(each, dict) and each.get("answer")]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | list):
        raise DataError(f"{where}: {name!r} must be a text or a list of texts, not a {type(answer).__name__}")
    many = answer if isinstance(answer, list) else [answer]
    texts = [str(each).strip() for each in many if isinstance(each, str | int | float) and not isinstance(each, bool)]
    if len(texts) != len(many) or not texts or not all(texts):
        raise DataError(f"{where}: {name!r} must be a non-empty text, or a list of such")
    return texts[0] if len(texts) == 1 else texts


def _titles(row: QuestionRow, where: str) -> list[str]:
    """The titles of the pages that contain the answer, without duplicates, in order."""
    about = row.get("metadata")
    facts = row.get("supporting_facts") or (about.get("supporting_facts") if isinstance(about, dict) else None)
    if isinstance(facts, dict):
        titles = facts.get("title", [])
    elif isinstance(facts, list):
        titles = [fact[0] if isinstance(fact, list) and fact else fact for fact in facts]
    elif isinstance(row.get("output"), list):
        outputs = [each for each in row["output"] if isinstance(each, dict)]
        sources = [source for each in outputs for source in each.get("provenance") or () if isinstance(source, dict)]
        titles = [source["title"] for source in sources if "title" in source]
    else:
        titles = row.get("gold_titles") or []
    if not isinstance(titles, str | list) or any(not isinstance(title, str) for title in titles):
        raise DataError(f"{where}: the titles of its pages must be a list of strings, not {titles!r}"[:400])
    return list(dict.fromkeys(names_of(titles)))


def names_of(value: Any) -> list[str]:
    """A list of names from one name, a list, or one text with " | " between the names."""
    if hasattr(value, "tolist"):  # a column of a Parquet file
        value = value.tolist()
    if isinstance(value, str):
        value = value.split(" | ")
    return [text for each in value or () if (text := str(each).strip())]
