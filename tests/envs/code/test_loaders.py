"""GSM8K-, MBPP- and HumanEval-shaped files: rows that can be trained on, and mistakes named by their line."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from agentfly.data import load_tasks
from agentfly.envs.code.loaders import load_gsm8k, load_humaneval, load_mbpp
from agentfly.envs.code.reward import code_answer, unit_tests_reward
from agentfly.envs.code.solver import solve
from agentfly.errors import DataError
from agentfly.types import Task, Trajectory

SHARED = Path(__file__).parents[4] / "shared" / "data"
GSM8K = {"question": "Ann has 3 boxes of 400 pens. How many pens?", "answer": "3 * 400 = <<3*400=1200>>1200\n#### 1,200"}
MBPP = {
    "task_id": 7,
    "text": "Write a function to double a number.",
    "code": "import math\r\ndef double(n):\r\n    return 2 * n",
    "test_list": ["assert double(2) == 4", "assert double(SEVEN) == 14"],
    "test_setup_code": "SEVEN = 7",
    "challenge_test_list": [],
}
HUMANEVAL = {
    "task_id": "HumanEval/3",
    "prompt": "from typing import List\n\ndef helper(n: int) -> int:\n    return n + 1\n\ndef total(xs: List[int]) -> int:\n"
    '    """Sum of xs, each plus one."""\n',
    "entry_point": "total",
    "canonical_solution": "    return sum(helper(x) for x in xs)\n",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 5\n    assert candidate([]) == 0\n",
}


def write(folder: Path, *rows: Any, name: str = "rows.jsonl") -> Path:
    path = folder / name
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def score(row: dict[str, Any], prediction: str) -> float:
    trajectory = Trajectory("c", Task("t", (), row), prediction=prediction)
    reward = code_answer if row["kind"] == "gsm8k" else unit_tests_reward()
    return asyncio.run(reward.score(trajectory)).reward


def test_gsm8k_rows_have_the_number_after_the_marks(tmp_path):
    (row,) = load_gsm8k(write(tmp_path, GSM8K))
    assert row["question"] == GSM8K["question"]
    assert row["answer"] == "1200"
    assert score(row, "1,200") == 1.0
    assert score(row, "1201") == 0.0


@pytest.mark.skipif(os.name != "posix", reason="sessions need a Unix")
def test_mbpp_rows_show_one_test_and_are_solved_by_their_own_code(tmp_path):
    (row,) = load_mbpp(write(tmp_path, MBPP, name="mbpp.jsonl.gz"))
    assert row["question"].endswith("assert double(2) == 4")
    assert "SEVEN" not in row["question"]
    assert "\r" not in row["solution"]
    assert score(row, f"```python\n{solve(row)[0]}\n```") == 1.0
    assert score(row, "def double(n): return 4") == 0.0


@pytest.mark.skipif(os.name != "posix", reason="sessions need a Unix")
def test_humaneval_rows_run_what_stands_before_the_function(tmp_path):
    (row,) = load_humaneval(write(tmp_path, HUMANEVAL))
    assert "def helper" in row["prelude"]
    assert "def total" not in row["prelude"]
    assert row["id"] == "humaneval/3"
    assert score(row, solve(row)[0]) == 1.0
    assert score(row, "def total(xs: List[int]) -> int:\n    return sum(map(helper, xs))") == 1.0
    assert score(row, "def total(xs):\n    return 5") == 0.0


def test_the_rows_load_as_tasks(tmp_path):
    rows = load_gsm8k(write(tmp_path, GSM8K, {**GSM8K, "question": "Another?"}))
    assert [task.id for task in load_tasks(rows)] == ["gsm8k/1", "gsm8k/2"]


@pytest.mark.parametrize(
    ("load", "rows", "sentence"),
    [
        (load_gsm8k, [GSM8K, "{not json"], "line 2 is not valid JSON"),
        (load_gsm8k, [GSM8K, "", [1]], "line 3: a row is an object with fields, this is a list"),
        (load_gsm8k, [{"question": "?"}], "line 1: has no field 'answer'; its fields: question"),
        (load_gsm8k, [{**GSM8K, "answer": "1200"}], "line 1: 'answer' must end with '#### ' and a number"),
        (load_gsm8k, [{**GSM8K, "answer": "#### many"}], "line 1: 'answer' must end with '#### ' and a number"),
        (load_gsm8k, [{**GSM8K, "question": " "}], "line 1: 'question' must be a non-empty string"),
        (load_gsm8k, [], "the file has no rows"),
        (load_mbpp, [MBPP, {**MBPP, "test_list": []}], "line 2: 'test_list' must be a non-empty list of strings"),
        (load_mbpp, [{**MBPP, "test_list": ["assert ("]}], "line 1: 'test_list' is not Python"),
        (load_mbpp, [{**MBPP, "code": "def f(:"}], "line 1: 'code' is not Python"),
        (load_humaneval, [{**HUMANEVAL, "entry_point": "sum_up"}], "line 1: 'prompt' does not define the entry_point 'sum_up'"),
        (load_humaneval, [{**HUMANEVAL, "test": "def check(:"}], "line 1: 'test' is not Python"),
    ],
)
def test_a_malformed_row_is_named_by_its_line(tmp_path, load, rows, sentence):
    with pytest.raises(DataError) as caught:
        load(write(tmp_path, *rows))
    assert sentence in str(caught.value)


def test_a_missing_file_a_broken_archive_and_bytes_that_are_not_text_are_refused(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        load_gsm8k(tmp_path / "nothing.jsonl")
    (tmp_path / "bad.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(DataError, match="line 1 cannot be read: Not a gzipped file"):
        load_gsm8k(tmp_path / "bad.jsonl.gz")
    (tmp_path / "bad.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="not UTF-8 text"):
        load_gsm8k(tmp_path / "bad.jsonl")


@pytest.mark.skipif(not (SHARED / "math" / "gsm8k_train.jsonl.gz").is_file(), reason=f"no GSM8K in {SHARED}")
def test_the_real_gsm8k_loads():
    rows = load_gsm8k(SHARED / "math" / "gsm8k_train.jsonl.gz")
    assert len(rows) > 7000
    assert all(float(row["answer"].replace("/", "e-")) is not None for row in rows[:500])


@pytest.mark.skipif(not (SHARED / "code" / "mbpp.jsonl.gz").is_file(), reason=f"no MBPP in {SHARED}")
def test_the_real_mbpp_loads_and_its_solutions_pass():
    rows = load_mbpp(SHARED / "code" / "mbpp.jsonl.gz")
    assert len(rows) > 900
    reward = unit_tests_reward(timeout_s=20)

    async def main() -> list[float]:
        found = []
        for row in rows[::40]:
            trajectory = Trajectory("c", Task("t", (), row), prediction=f"```python\n{solve(row)[0]}\n```")
            found.append((await reward.score(trajectory)).reward)
        return found

    assert set(asyncio.run(main())) == {1.0}
