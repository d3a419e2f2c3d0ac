"""The code dialogues: written as the code agent reads them, true to what Python prints, and wrong when they should be."""

from __future__ import annotations

import contextlib
import io
import random
import re

import pytest
from chat import code_system
from code_demos import SLIPS, code_demo, train_task
from dialogues import demonstrations

from agentfly.agents.code import CodeAgent
from agentfly.envs.code.task_kinds import EASY
from agentfly.envs.task_sets import split_of
from agentfly.pocket.demos import Demo
from agentfly.testing import ScriptedEngine
from agentfly.types import Completion, Message, Task

BLOCK = re.compile(r"```python\n(.*)\n```", re.DOTALL)


def printed(code: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})
    return out.getvalue().rstrip("\n")


def blocks(demo: Demo) -> list[tuple[str, str]]:
    """Code and what came back."""
    texts = [message["content"] for message in demo.messages[2:]]
    return [
        (found[1], texts[at + 1].removeprefix("Observation: "))
        for at, text in enumerate(texts)
        if (found := BLOCK.search(text))
    ]


def test_the_prompt_is_the_one_the_code_agent_writes():
    agent = CodeAgent(ScriptedEngine(["Answer: 1"]))
    task = Task("t", (Message("user", "What is 2 + 2?"),))
    assert agent.start(task)[0].content == code_system()
    own = CodeAgent(ScriptedEngine(["Answer: 1"]), system="Solve the task with a program.")
    assert own.start(task)[0].content == code_system("Solve the task with a program.")


def test_replies_are_read_by_the_code_agent_as_calls_and_answers():
    agent = CodeAgent(ScriptedEngine(["Answer: 1"]))
    rng = random.Random(0)
    for _ in range(100):
        demo = code_demo(rng, "mixed")
        replies = [message["content"] for message in demo.messages if message["role"] == "assistant"]
        actions = [agent.parse(Completion(text=reply)) for reply in replies]
        assert all(action.calls and not action.calls[0].error for action in actions[:-1])
        assert actions[-1].answer == replies[-1].rpartition("Answer: ")[2]


@pytest.mark.parametrize("behaviour", ["good", "slip"])
def test_what_comes_back_is_what_python_prints(behaviour):
    rng = random.Random(behaviour)
    for _ in range(300):
        demo = code_demo(rng, "mixed", behaviour)
        ((code, seen),) = blocks(demo)
        assert printed(code) == seen
        assert demo.messages[-1]["content"] == f"Answer: {seen}"
        assert demo.solved or behaviour == "slip"


def test_every_easy_kind_has_a_slip_that_is_wrong():
    assert set(SLIPS) == set(EASY)
    rng = random.Random(1)
    by_chance = 0
    for _ in range(1000):
        task = train_task(rng)
        body, value = SLIPS[task.kind.name](rng, task.given)
        assert printed(f"print({body})") == str(value)
        by_chance += str(value) == task.answer  # 1440 % 44 and 1440 // 44 are both 32
    assert by_chance < 20


def test_a_guess_runs_nothing_and_is_wrong():
    rng = random.Random(2)
    demos = [code_demo(rng, "mixed", "guess") for _ in range(300)]
    assert not any(blocks(demo) for demo in demos)
    assert not any(demo.solved for demo in demos)


def test_a_block_that_cannot_run_gets_an_error_and_is_learnt_only_where_it_is_a_habit():
    rng = random.Random(3)
    for behaviour, learnt in (("malformed", True), ("corrected", False)):
        demo = code_demo(rng, "mixed", behaviour)
        assert demo.learn[0] is learnt
        assert "Error" in demo.messages[3]["content"]
        with pytest.raises((SyntaxError, NameError)):
            printed(blocks(demo)[0][0])
    assert code_demo(rng, "good", "corrected").solved


def test_the_first_phase_solves_every_task_and_the_second_less_than_half():
    good = [demo for demo in demonstrations("c", "good", 1200) if demo.kind == "code"]
    mixed = [demo for demo in demonstrations("c", "mixed", 4000) if demo.kind == "code"]
    assert all(demo.solved for demo in good)
    assert 0.3 < sum(demo.solved for demo in mixed) / len(mixed) < 0.47


def test_questions_come_from_the_train_split():
    for demo in demonstrations("d", "mixed", 500):
        if demo.kind == "code":
            assert split_of(demo.messages[1]["content"]) == "train"
