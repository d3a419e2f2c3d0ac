"""The table of cheats: what a chain does to be paid without a repair earns nothing, and the honest repair is paid."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from agentfly.envs.workspace.env import Workspace
from agentfly.envs.workspace.grade import GradedTests
from agentfly.types import Task

from .cheats import CHEATS, FILES, HIDDEN, REPAIR

FEW = (
    "conftest at the top", "rewrites the tests", "exits with 0 in the call", "patches the report", "equal to everything",
    "forges the report with the key", "the tests' file is a folder",
)  # fmt: skip


def judged(script: str, fields: dict[str, object]) -> GradedTests:
    async def main() -> GradedTests:
        work = Workspace(limit_s=60)
        task = Task("t", (), fields)
        try:
            await work.reset(task)
            await work.bash(script)
            return await work.grade()
        finally:
            await work.close()

    return asyncio.run(main())


def with_tests(script: str) -> GradedTests:
    return judged(script, {"files": FILES, "tests": HIDDEN, "tests_limit_s": 20})


def with_cases(script: str) -> GradedTests:
    cases = [{"call": "calc:mean", "args": [values], "expected": mean} for values, mean in (([1, 3], 2.0), ([4], 4.0))]
    return judged(script, {"files": FILES, "cases": cases, "tests_limit_s": 20})


@pytest.mark.parametrize("way", [with_tests, with_cases])
def test_the_honest_repair_is_paid_in_full(way: Callable[[str], GradedTests]) -> None:
    verdict = way(REPAIR)
    assert verdict.passed == verdict.tests > 0, verdict


@pytest.mark.parametrize("way", [with_tests, with_cases])
@pytest.mark.parametrize("name", FEW)
def test_a_cheat_of_each_kind_earns_nothing(name: str, way: Callable[[str], GradedTests]) -> None:
    verdict = way(CHEATS[name])
    assert verdict.passed < verdict.tests, verdict


@pytest.mark.nightly
@pytest.mark.parametrize("way", [with_tests, with_cases])
@pytest.mark.parametrize("name", CHEATS)
def test_every_cheat_earns_nothing(name: str, way: Callable[[str], GradedTests]) -> None:
    verdict = way(CHEATS[name])
    assert verdict.passed < verdict.tests, verdict


def test_the_table_has_the_cheats_that_were_asked_for() -> None:
    assert len(CHEATS) >= 27 + 20


def test_a_task_that_nothing_can_judge_is_refused_in_one_sentence() -> None:
    from agentfly.envs.workspace.grade import check_tests
    from agentfly.errors import DataError

    for fields, sentence in (
        ({}, "needs 'cases', or 'tests'"),
        ({"cases": []}, "at least one case"),
        ({"cases": [{"call": "f", "args": []}]}, r"cases\[0\] needs 'call'"),
        ({"tests": {"../x.py": ""}}, "not a path inside the tree"),
        ({"tests": {"test_x.py": "def test_a(): pass"}}, "compares anything"),
        ({"tests": {"test_x.py": "def test_a(:"}}, "test_x.py is not Python"),
    ):
        with pytest.raises(DataError, match=sentence):
            check_tests(fields)
