"""The generated repairs: right first, then broken, hidden cases that tell them apart, splits that share nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from agentfly import BashAgent, ReactAgent
from agentfly.config import Config
from agentfly.data import load_tasks
from agentfly.envs.workspace.env import Workspace
from agentfly.envs.workspace.repair.bugs import run
from agentfly.envs.workspace.repair.demos import easy_repair_demos, repair_demos
from agentfly.envs.workspace.repair.solver import solve
from agentfly.envs.workspace.repair.tasks import easy_repair_tasks, repair_tasks
from agentfly.errors import ConfigError
from agentfly.testing import ByteRenderer, ScriptedEngine
from agentfly.types import Task


def modules(row: dict[str, Any]) -> dict[str, str]:
    """The modules of a row, the imported ones first."""
    files = {path: text for path, text in row["files"].items() if path != "test_all.py"}
    return dict(sorted(files.items(), key=lambda item: item[1].startswith("from ")))


def passes(row: dict[str, Any], files: dict[str, str]) -> bool:
    entry = row["cases"][0]["call"].partition(":")[2]
    inputs = [case["args"][0] for case in row["cases"]]
    return run(files, entry, inputs) == [case["expected"] for case in row["cases"]]


def test_every_task_is_broken_until_its_edits_are_undone_and_some_are_right_already() -> None:
    rows = repair_tasks("train", 300)
    right = [row for row in rows if not row["edits"]]
    assert 0.02 < len(right) / len(rows) < 0.2
    assert [row["level"] for row in rows[:8]] == [1, 2, 3, 4, 1, 2, 3, 4]
    for row in rows:
        files = modules(row)
        assert passes(row, files) == (not row["edits"])
        for edit in row["edits"]:
            assert files[edit["path"]].count(edit["old"]) == 1
            files[edit["path"]] = files[edit["path"]].replace(edit["old"], edit["new"])
        assert passes(row, files)


def test_one_of_two_edits_is_no_repair() -> None:
    rows = [row for row in repair_tasks("train", 120) if len(row["edits"]) == 2]
    assert rows
    failing = 0
    for row in rows:
        for edit in row["edits"]:
            files = modules(row)
            files[edit["path"]] = files[edit["path"]].replace(edit["old"], edit["new"])
            failing += not passes(row, files)
    assert failing >= 1.7 * len(rows)  # the other bug shows on all inputs together, if not on every hidden one


def test_hidden_cases_and_edits_are_not_in_the_tree_and_no_task_is_in_two_splits() -> None:
    seen: dict[str, str] = {}
    for split in ("train", "validation", "test"):
        for row in easy_repair_tasks(split, 100):  # type: ignore[arg-type]
            text = repr(row["files"])
            assert seen.setdefault(text, split) == split
            shown = row["files"]["test_all.py"]
            assert not any(f"({case['args'][0]}, {case['expected']})" in shown for case in row["cases"])
            assert row["edits"][0]["new"] not in text
    assert (
        easy_repair_tasks("train", 5, seed=1) == easy_repair_tasks("train", 5, seed=1) != easy_repair_tasks("train", 5, seed=2)
    )


def test_guessing_one_answer_for_all_cases_passes_no_task() -> None:
    for row in repair_tasks("test", 100):
        assert len({json.dumps(case["expected"]) for case in row["cases"]}) > 1


def test_the_solver_is_paid_and_submitting_at_once_is_not() -> None:
    rows = [row for row in repair_tasks("test", 12) if row["edits"]][:4]

    async def play(row: dict[str, Any], solved: bool) -> bool:
        work = Workspace()
        try:
            await work.reset(Task("t", (), row))
            for name, arguments in solve(row) if solved else [("submit", {})]:
                await getattr(work, name)(**arguments)
            return (await work.grade()).success
        finally:
            await work.close()

    assert [asyncio.run(play(row, True)) for row in rows] == [True] * len(rows)
    assert [asyncio.run(play(row, False)) for row in rows] == [False] * len(rows)
    with pytest.raises(ConfigError, match="no solution is known"):
        solve({"files": {}})


def test_demonstrations_are_what_an_agent_would_have_seen() -> None:
    """The tools answer in a chain what the demonstration says."""
    for row in [*easy_repair_demos(2), *repair_demos(4)]:
        replies = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        task = {key: value for key, value in row.items() if key != "messages"} | {"question": row["messages"][0]["content"]}
        agent = ReactAgent(
            ScriptedEngine(replies), renderer=ByteRenderer(), tools=["read", "edit", "submit"], reward="workspace_success"
        )
        (chain,) = agent.run_sync([task])
        assert chain.reward == 1.0, chain
        shown = [message["content"].removeprefix("Observation: ") for message in row["messages"][2::2]]
        assert [turn.results[0].observation for turn in chain.turns][: len(shown)] == shown


def test_mistakes_make_the_share_of_wrong_lines_that_was_asked_for() -> None:
    rows = easy_repair_demos(200, mistakes=0.5)
    wrong = sum(
        row["edits"][0]["new"] != json.loads(row["messages"][1]["content"].partition("Input: ")[2])["new"] for row in rows
    )
    assert 60 < wrong < 140
    with pytest.raises(ConfigError, match="mistakes is a share"):
        easy_repair_demos(1, mistakes=2)


def test_a_block_of_bash_is_a_command_and_the_word_submit_ends_the_chain() -> None:
    (row,) = easy_repair_tasks("train", 1)
    replies = [
        "I look first.",
        "```bash\nls",
        "```bash\n\n```",
        "```python\n1\n```",
        "```sh\npython test_all.py\n```",
        "```bash\n submit \n```",
    ]
    agent = BashAgent(ScriptedEngine(replies), renderer=ByteRenderer(), reward="workspace_success")
    (chain,) = agent.run_sync([row])
    assert chain.reward == 0.0
    shown = [result.observation for turn in chain.turns for result in turn.results]
    assert "not closed" in shown[0] and "empty" in shown[1] and "[exit 1]" in shown[2] and shown[3] == "Submitted."
    with pytest.raises(ConfigError, match="cannot call 'read'"):
        BashAgent(ScriptedEngine([]), renderer=ByteRenderer(), tools=["read"])


def test_the_recipe_reads_and_its_tasks_fit_its_agent() -> None:
    config = Config.load("repair", ["data.train_count=4", "data.validation_count=2"])
    assert load_tasks(config.data.train, split="train", count=4)[0].fields["level"] == 1
