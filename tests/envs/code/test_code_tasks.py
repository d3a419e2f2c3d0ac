"""The tasks of the code world: right, the same for the same seed, never in two splits, and solved by their solver."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
from collections import Counter

import pytest

from agentfly import CodeAgent, ReactAgent, plugins
from agentfly.data import load_tasks
from agentfly.envs.code.reward import code_answer
from agentfly.envs.code.solver import PROGRAMS, solve
from agentfly.envs.code.task_kinds import EASY, KINDS
from agentfly.envs.code.tasks import code_tasks, easy_code_tasks
from agentfly.envs.code.tools import python
from agentfly.envs.task_sets import SPLITS, split_of
from agentfly.errors import ConfigError
from agentfly.testing import ScriptedEngine
from agentfly.types import Request


@pytest.mark.parametrize("tasks", [code_tasks, easy_code_tasks])
def test_the_same_seed_gives_the_same_rows_and_a_smaller_count_their_beginning(tasks):
    assert tasks("train", 50, seed=3) == tasks("train", 50, seed=3)
    assert tasks("train", 50, seed=3) != tasks("train", 50, seed=4)
    assert tasks("test", 60)[:20] == tasks("test", 20)


@pytest.mark.parametrize("tasks", [code_tasks, easy_code_tasks])
def test_no_question_is_in_two_splits_or_twice_in_one(tasks):
    questions = {split: [row["question"] for seed in (0, 1) for row in tasks(split, 500, seed)] for split in SPLITS}
    for split in SPLITS:
        assert len(set(questions[split][:500])) == 500
        assert {split_of(question) for question in questions[split]} == {split}
        assert all(set(questions[split]).isdisjoint(questions[other]) for other in SPLITS if other != split)


def test_every_kind_and_family_comes_up_and_has_a_program():
    rows = code_tasks("train", 1500)
    assert {row["kind"] for row in rows} == set(KINDS) == set(PROGRAMS)
    assert set(Counter(row["family"] for row in rows)) == {"arithmetic", "string", "list", "algorithm"}
    assert {row["kind"] for row in easy_code_tasks("train", 300)} == set(EASY)


def test_every_answer_is_what_the_program_of_the_solver_prints():
    for row in code_tasks("train", 1000) + code_tasks("test", 300, seed=5):
        names: dict[str, object] = {}
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            for cell in solve(row):
                exec(cell, names)
        assert printed.getvalue().strip() == row["answer"], row


@pytest.mark.skipif(os.name != "posix", reason="sessions need a Unix")
def test_the_solver_earns_the_full_reward_in_the_world_and_doing_nothing_earns_none():
    one_of_each = list({row["kind"]: row for row in code_tasks("validation", 300)}.values())
    assert len(one_of_each) == len(KINDS)

    async def score(row: dict[str, str], cells: list[str]) -> float | None:
        def reply(request: Request) -> str:
            turn = sum(message.role == "assistant" for message in request.messages)
            if turn < len(cells):
                return f"```python\n{cells[turn]}\n```"
            return f"Answer: {request.messages[-1].content.removeprefix('Observation: ')}"

        agent = CodeAgent(ScriptedEngine(reply, reads="messages"), tools=[python], reward=code_answer)
        return (await agent.run([row])).rewards[0]

    async def main() -> tuple[list[float | None], list[float | None]]:
        solved = [await score(row, solve(row)) for row in one_of_each]
        lazy = ReactAgent(ScriptedEngine(["Answer:"], reads="messages"), reward=code_answer)
        return solved, (await lazy.run(one_of_each)).rewards

    solved, nothing = asyncio.run(main())
    assert solved == [1.0] * len(one_of_each)
    assert nothing == [0.0] * len(one_of_each)


def test_the_task_sets_have_names_and_load_as_tasks():
    assert plugins.resolve("tasks", "code") is code_tasks
    assert plugins.resolve("tasks", "easy_code") is easy_code_tasks
    assert solve(load_tasks("code", count=3)[0])


def test_an_unknown_split_an_impossible_count_and_a_foreign_task_are_refused():
    with pytest.raises(ConfigError, match="no split is called 'dev'"):
        code_tasks("dev")
    with pytest.raises(ConfigError, match="count must be from 1 to 10000, not 0"):
        code_tasks("train", 0)
    with pytest.raises(ConfigError, match="no solution is known for a task of kind 'chess'"):
        solve({"question": "?", "kind": "chess"})
