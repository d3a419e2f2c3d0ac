"""`agentfly check-tests`: rows that cannot be passed, rows that are free, and tests that nothing satisfies."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from agentfly.cli import main
from agentfly.data import load_tasks
from agentfly.envs.code.check_tests import check_rows, lint, read_data

posix = pytest.mark.skipif(os.name != "posix", reason="sessions need a Unix")
ROWS = [
    {"id": "good", "question": "square", "tests": ["assert square(3) == 9",
    "assert square(2) == 4"], "solution": "def square(n): return n * n"},
    {"id": "wrong", "question": "square", "tests": ["assert square(3) == 10"], "solution": "def square(n): return n * n"},
    {"id": "constant", "question": "f", "tests": ["assert f(3) == 0"], "solution": "def f(n): return n - n"},
    {"id": "nothing", "question": "f", "tests": ["for x in f(3):\n    assert x > 0"], "solution": "def f(n): return [n]"},
    {"id": "argument", "question": "f",
    "tests": ["x = [2, 1]\nassert f(x) == sorted(x)"], "solution": "def f(x): return sorted(x)"},
    {"id": "raises", "question": "f",
    "tests": ["try:\n    f(1)\n    assert False\nexcept Exception:\n    pass"], "solution": "def f(x): raise ValueError"},
    {"id": "broken", "question": "f", "tests": ["assert f(1 == 2"], "solution": "def f(x): return 2"},
]  # fmt: skip


@posix
def test_rows_that_cannot_be_passed_and_rows_that_are_free_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert main(["check-tests", str(path), "--json"]) == 1
    report = {row["row"].split("'")[1]: row for row in json.loads(capsys.readouterr().out)["faulty"]}
    assert set(report) == {"wrong", "constant", "nothing", "argument", "raises", "broken"}
    assert report["wrong"]["own"] == 0.0
    assert "returns 0" in report["constant"]["free"]
    assert "returns []" in report["nothing"]["free"]
    assert any("empty result" in text for text in report["nothing"]["lint"])
    assert "empties its argument" in report["argument"]["free"]
    assert "raises" in report["raises"]["free"]
    assert "is not Python" in report["broken"]["error"]
    assert main(["check-tests", str(path), "--count", "1"]) == 0
    assert "1 rows: 0 broken or free" in capsys.readouterr().out


def test_rows_with_answers_are_checked_with_their_answers_and_with_empty_copied_and_hedged_ones() -> None:
    tasks = load_tasks([
        {"id": "good", "question": "What is 37 * 48?", "answer": "1776"},
        {"id": "copied", "question": "nothing", "answer": "nothing"},
    ])  # fmt: skip
    good, copied = asyncio.run(check_rows(tasks))
    assert (good.own, good.lines) == (1.0, [])
    assert list(copied.free) == ["a copy of the question"]


def test_files_in_the_shape_of_published_sets_are_read(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(
        json.dumps({"task_id": 1, "text": "Add.", "code": "def f(): return 1", "test_list": ["assert f() == 1"]}) + "\n"
    )
    assert read_data(str(path))[0].fields["solution"] == "def f(): return 1"
    path.write_text(json.dumps({"question": "How many?", "answer": "so\n#### 72"}) + "\n")
    assert read_data(str(path))[0].fields["answer"] == "72"


@pytest.mark.parametrize(
    ("test", "told"),
    [
        ("for a, b in zip(f(3), [1, 2]):\n    assert a == b", "empty result"), ("assert all(x > 0 for x in f(3))",
        "all() of nothing"),
        ("r = f(3)\nfor x in r:\n    assert x", "empty result"),
        ("import numpy as np\nassert np.allclose(f(3), [[1, 2, 3]])", "empty array"),
        ("x = [2, 1]\nassert f(x) == sorted(x)", "expects from 'x'"), ("assert (f(3), 9)", "a tuple"), ("f(3)",
        "asserts nothing"),
        ("assert f(3) == f(3)", "with itself"), ("try:\n    assert f(1) == 2\nexcept Exception:\n    pass",
        "failure of its own assert"),
        ("assert True", "a constant"),
    ],
)  # fmt: skip
def test_an_assert_that_nothing_satisfies_is_named(test: str, told: str) -> None:
    assert any(told in text for text in lint([test]))


@pytest.mark.parametrize(
    "test",
    [
        "assert f(3) == 9", "r = f(3)\nassert len(r) == 2\nfor x in r:\n    assert x",
        "for n in range(3):\n    assert f(n) == n",
        "def check(c):\n    assert c(1) == 2\ncheck(f)", "import math\nassert math.isclose(f(1), 0.5)",
        "x = [2, 1]\nassert f(x) == [1, 2]",
        "import unittest\nunittest.TestCase().assertEqual(f(1), 2)", "assert all(f(n) == n for n in range(3))",
    ],
)  # fmt: skip
def test_an_ordinary_assert_is_not_named(test: str) -> None:
    assert lint([test]) == []
