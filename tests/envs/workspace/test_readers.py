"""Tasks in the formats of others: what is read, what is refused in one sentence, and that the honest solution is paid."""

# ruff: noqa: E501 - files of others in texts

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentfly.envs.workspace.env import Workspace
from agentfly.envs.workspace.grade import GradedTests
from agentfly.envs.workspace.readers import read_harbor, read_swe
from agentfly.errors import DataError, WorldError
from agentfly.types import Task


def harbor(folder: Path) -> Path:
    files = {
        "task.toml": 'schema_version = "1.4"\n[task]\nname = "me/hello"\n[verifier]\ntimeout_sec = 30\n',
        "instruction.md": "Write hello into hello.txt.\n",
        "environment/Dockerfile": "FROM ubuntu:24.04\n# a comment\nWORKDIR /app\nENV WORD=hello\nCOPY data/ ./data/\nCOPY one.txt /app/\n",
        "environment/data/a.txt": "a\n",
        "environment/one.txt": "one\n",
        "tests/test.sh": '#!/bin/bash\ncd /app\nif [ "$(cat hello.txt)" = "$WORD" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n',
    }
    for name, text in files.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return folder


def graded(row: dict[str, Any], script: str) -> GradedTests:
    async def main() -> GradedTests:
        work = Workspace()
        try:
            await work.reset(Task("t", (), row))
            await work.bash(script)
            return await work.grade()
        finally:
            await work.close()

    return asyncio.run(main())


def test_a_harbor_task_is_read_and_judged_by_its_script(tmp_path: Path) -> None:
    harbor(tmp_path / "tasks" / "hello")
    (row,) = read_harbor(tmp_path / "tasks")
    assert row["question"] == "Write hello into hello.txt." and row["name"] == "me/hello"
    assert row["files"] == {"data/a.txt": "a\n", "one.txt": "one\n"} and row["variables"] == {"WORD": "hello"}
    assert graded(row, "cat data/a.txt one.txt > /dev/null && echo hello > hello.txt").success
    assert not graded(
        row, "echo 1 > /logs/verifier/reward.txt; mkdir -p /tmp/logs/verifier; echo 1 > /tmp/logs/verifier/reward.txt"
    ).success
    with pytest.raises(WorldError, match="wrote no number"):
        graded(row | {"verifier": {"tests/test.sh": "true"}}, "true")


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("task.toml", "not = [toml", "is not TOML"),
        (
            "environment/Dockerfile",
            "FROM x\nRUN apt-get install -y cowsay\n",
            "a workspace cannot do `RUN apt-get install -y cowsay`",
        ),
        ("environment/Dockerfile", "FROM x\nCOPY ../secret /app/\n", "which is not in its folder"),
        ("environment/docker-compose.yaml", "services: {}\n", "several containers"),
        ("task.toml", "[environment]\ngpus = 1\n", "the task has GPUs"),
        ("task.toml", "[verifier]\nenvironment_mode = 'separate'\n", "an environment of its own"),
    ],
)
def test_what_a_workspace_cannot_give_is_one_sentence(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    folder = harbor(tmp_path / "task")
    (folder / name).write_text(text)
    with pytest.raises(DataError, match=sentence):
        read_harbor(folder)
    assert read_harbor(folder, skip=True) == []


def test_folders_that_hold_no_task_are_one_sentence(tmp_path: Path) -> None:
    for path, sentence in ((tmp_path / "nothing", "no such folder"), (tmp_path, "has a task.toml")):
        with pytest.raises(DataError, match=sentence):
            read_harbor(path)
    folder = harbor(tmp_path / "task")
    (folder / "tests" / "test.sh").unlink()
    with pytest.raises(DataError, match="a task needs tests/test.sh"):
        read_harbor(folder)


@pytest.fixture
def swe(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    repo = tmp_path / "repos" / "me__calc"
    (repo / "tests").mkdir(parents=True)
    (repo / "calc.py").write_text("def mean(values):\n    return sum(values) / len(values) + 1\n")
    (repo / "tests" / "test_calc.py").write_text("from calc import mean\n\n\ndef test_old():\n    assert mean([2]) > 0\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(repo)]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True, capture_output=True)
    with (repo / "tests" / "test_calc.py").open("a") as file:
        file.write("\n\ndef test_mean():\n    assert mean([1, 3]) == 2\n")
    patch = subprocess.run([*git, "diff"], check=True, capture_output=True, text=True).stdout
    row = {
        "repo": "me/calc", "base_commit": "HEAD", "problem_statement": "mean is off by one", "test_patch": patch,
        "FAIL_TO_PASS": json.dumps(["tests/test_calc.py::test_mean"]), "PASS_TO_PASS": ["tests/test_calc.py::test_old"],
    }  # fmt: skip
    return tmp_path, row


def write(folder: Path, *rows: object) -> Path:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "rows.jsonl"


def test_a_row_of_swe_bench_is_read_and_the_repair_is_paid(swe: tuple[Path, dict[str, Any]]) -> None:
    folder, row = swe
    (task,) = read_swe(write(folder, row), repos=folder / "repos")
    assert "def test_mean" in task["tests"]["tests/test_calc.py"] and "def test_old" in task["tests"]["tests/test_calc.py"]
    assert graded(task, "sed -i 's/ + 1//' calc.py") == GradedTests(2, 2)
    assert graded(task, "true").passed == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"repo": ""}, "the field 'repo' is missing"),
        ({"repo": "you/other"}, "no clone of you/other"),
        ({"base_commit": "abcdef"}, "git cannot read"),
        ({"test_patch": "nothing"}, "changes no file"),
        (
            {"test_patch": "diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n@@ -1,1 +1,1 @@\n-other\n+x\n"},
            "does not fit calc.py",
        ),
        ({"FAIL_TO_PASS": []}, "names no test"),
        ({"FAIL_TO_PASS": 5}, "is not a list of names"),
    ],
)
def test_a_row_that_cannot_be_used_is_one_sentence(
    swe: tuple[Path, dict[str, Any]], change: dict[str, Any], sentence: str
) -> None:
    folder, row = swe
    with pytest.raises(DataError, match=sentence):
        read_swe(write(folder, row | change), repos=folder / "repos")
    (folder / "rows.jsonl").write_text("{")
    with pytest.raises(DataError, match="line 1 is not JSON"):
        read_swe(folder / "rows.jsonl", repos=folder)
