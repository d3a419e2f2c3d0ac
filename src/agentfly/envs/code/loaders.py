"""Loads files in the shape of GSM8K, MBPP and HumanEval (JSONL, also gzipped) as rows for training.

    load_gsm8k      question, answer ("... #### 72")                      -> question, answer           for code_answer
    load_mbpp       text, code, test_list                                 -> question, tests            for unit_tests
    load_humaneval  prompt, entry_point, canonical_solution, test         -> question, tests, prelude   for unit_tests

Every row also has `id`, `kind` and, if the file has one, `solution`. A malformed row raises DataError with its line. Code of a
file is compiled and never run; nothing is downloaded.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import DataError
from ..jsonl import read_lines

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:/\d+)?")


class DataLine:
    """One row of a file, with its line number for errors."""

    def __init__(self, path: Path, number: int, row: object) -> None:
        self.where, self.number = f"{path}: line {number}", number
        if not isinstance(row, dict):
            raise self.refuse(f"a row is an object with fields, this is a {type(row).__name__}")
        self.row = row

    def refuse(self, what: str) -> DataError:
        return DataError(f"{self.where}: {what}")

    def text(self, *names: str) -> str:
        """Returns the first of these fields that the row has. Raises DataError if it has none."""
        for name in names:
            if name in self.row:
                value = self.row[name]
                if not isinstance(value, str) or not value.strip():
                    raise self.refuse(f"{name!r} must be a non-empty string")
                return value.replace("\r\n", "\n")
        raise self.refuse(f"has no field {names[0]!r}; its fields: {', '.join(map(str, self.row)) or 'none'}")

    def texts(self, name: str, *, needed: bool = True) -> list[str]:
        value = self.row.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value) or (needed and not value):
            raise self.refuse(f"{name!r} must be a{' non-empty' if needed else ''} list of strings")
        return [item.replace("\r\n", "\n") for item in value]

    def python(self, source: str, name: str) -> ast.Module:
        """Returns the syntax tree. Raises DataError for source that is not Python."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old code is full of "\\d" in plain strings
                return ast.parse(source)
        except (SyntaxError, ValueError) as error:
            raise self.refuse(f"{name!r} is not Python: {error}") from error


def _rows(path: str | Path) -> Iterator[DataLine]:
    """Yields the rows of a JSONL file. Raises DataError for an empty or malformed file."""
    return (DataLine(Path(path), number, row) for number, row in read_lines(path))


def load_gsm8k(path: str | Path) -> list[dict[str, Any]]:
    """Loads word problems. The answer is the number after "####"."""
    rows = []
    for line in _rows(path):
        worked, mark, answer = line.text("answer").rpartition("####")
        answer = answer.strip().replace(",", "").removeprefix("$")
        if not mark or not _NUMBER.fullmatch(answer):
            raise line.refuse("'answer' must end with '#### ' and a number")
        question = line.text("question")
        rows.append(
            {"id": _id(line, "gsm8k"), "question": question, "answer": answer, "kind": "gsm8k", "worked": worked.strip()}
        )
    return rows


def load_mbpp(path: str | Path) -> list[dict[str, Any]]:
    """Loads functions to write from one sentence. The question shows the first test, for the name and the arguments."""
    rows = []
    for line in _rows(path):
        tests = line.texts("test_list")
        setup = "\n".join([*line.texts("test_imports", needed=False), line.row.get("test_setup_code") or ""]).strip()
        tests = [f"{setup}\n{test}".strip() for test in tests]
        for test in tests:
            line.python(test, "test_list")
        shown = line.texts("test_list")[0]
        row: dict[str, Any] = {
            "id": _id(line, "mbpp"),
            "question": f"{line.text('text', 'prompt').strip()}\nThe code must pass tests such as:\n{shown}",
            "tests": tests,
            "kind": "mbpp",
        }
        if "code" in line.row:
            row["solution"] = line.text("code")
            line.python(row["solution"], "code")
        rows.append(row)
    return rows


def load_humaneval(path: str | Path) -> list[dict[str, Any]]:
    """Loads functions to complete from signature and docstring. What stands before the function is the row's `prelude`."""
    rows = []
    for line in _rows(path):
        prompt, name, test = line.text("prompt"), line.text("entry_point").strip(), line.text("test")
        solution = prompt + line.text("canonical_solution") if "canonical_solution" in line.row else f"{prompt}\n    pass\n"
        tree = line.python(solution, "prompt")
        function = next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name), None)
        if function is None:
            raise line.refuse(f"'prompt' does not define the entry_point {name!r}")
        first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
        tests = [f"{test}\ncheck({name})"]
        line.python(tests[0], "test")
        row: dict[str, Any] = {
            "id": _id(line, "humaneval"),
            "question": f"Complete this function. Reply with all of it.\n```python\n{prompt.strip()}\n```",
            "tests": tests,
            "prelude": "\n".join(solution.split("\n")[: first - 1]),
            "kind": "humaneval",
        }
        if "canonical_solution" in line.row:
            row["solution"] = solution
        rows.append(row)
    return rows


def _id(line: DataLine, kind: str) -> str:
    return f"{kind}/{str(line.row.get('task_id', line.number)).rpartition('/')[2]}"
