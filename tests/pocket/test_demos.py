"""Demonstrations: good ones are replayed call by call with real arithmetic, bad ones are bad in the way their name says."""

from __future__ import annotations

import json
import random
import re

import pytest
from chat import react_system
from dialogues import arithmetic_demo, demonstrations, lookup, lookup_demo

from agentfly.pocket.demos import CANONICAL, Demo, DemoTool
from agentfly.pocket.tasks import split_of


def calls_of(demo: Demo) -> list[tuple[str, str]]:
    """(name, arguments as written) of every call, in either form."""
    text = "\n".join(message["content"] for message in demo.messages if message["role"] == "assistant")
    react = re.findall(r"Action: (.*)\nInput: (.*)", text)
    return react or re.findall(r'\{"name": "(.*?)", "arguments": (.*)\}\n</tool_call>', text)


def observations_of(demo: Demo) -> list[str]:
    said = [message["content"] for message in demo.messages if message["role"] in ("user", "tool")]
    return [text.removeprefix("Observation: ") for text in said[1:]]


def answer_of(demo: Demo) -> str:
    return demo.messages[-1]["content"].rpartition("Answer: ")[2]


def meaning(demo: Demo, name: str) -> str:
    """What a tool does, read from its description in the prompt as a model must."""
    shown = next((s["function"]["description"] for s in demo.schemas if s["function"]["name"] == name), None)
    described = shown or next(line for line in demo.messages[0]["content"].splitlines() if line.startswith(f"- {name}("))
    words = described.partition(": ")[2].lower() if shown is None else described.lower()
    kinds = {"add": ("add", "sum"), "subtract": ("subtract", "difference"), "multiply": ("multipl", "product")}
    return next(kind for kind, marks in kinds.items() if any(mark in words for mark in marks))


@pytest.mark.parametrize("steps", [1, 2])
def test_good_dialogues_follow_from_real_arithmetic(steps):
    rng = random.Random(steps)
    for _ in range(300):
        demo = arithmetic_demo(rng, steps, "good", "good")
        calls, seen = calls_of(demo), observations_of(demo)
        assert len(calls) == len(seen) == steps
        for (name, written), observation in zip(calls, seen, strict=True):
            left, right = json.loads(written).values()
            apply = {"add": left + right, "subtract": left - right, "multiply": left * right}
            assert float(observation) == apply[meaning(demo, name)]
        assert answer_of(demo) == str(int(float(seen[-1])))
        assert demo.solved
        assert all(demo.learn)


def test_the_first_phase_solves_everything_and_the_second_does_not():
    assert all(demo.solved for demo in demonstrations("a", "good", 500))
    two_step = [demo for demo in demonstrations("a", "mixed", 1500) if demo.kind == "two_step"]
    assert 0.3 < sum(demo.solved for demo in two_step) / len(two_step) < 0.5


def test_a_forgetful_dialogue_answers_with_the_intermediate_value():
    demo = arithmetic_demo(random.Random(1), 2, "mixed", "forgetful")
    assert len(calls_of(demo)) == 1
    assert answer_of(demo) == str(int(float(observations_of(demo)[0])))
    assert not demo.solved


def test_a_guess_uses_no_tool_and_is_wrong():
    demo = arithmetic_demo(random.Random(1), 2, "mixed", "guess")
    assert not calls_of(demo)
    assert not demo.solved


def test_a_mistake_shown_for_its_correction_is_not_learnt_itself():
    demo = arithmetic_demo(random.Random(2), 2, "good", "corrected")
    assert demo.learn == [False, True, True, True]
    assert demo.solved


def test_questions_of_demonstrations_come_from_the_train_split():
    for demo in demonstrations("b", "mixed", 300):
        if demo.kind in ("one_step", "two_step"):
            question = next(message["content"] for message in demo.messages if message["role"] == "user")
            assert split_of(question) == "train"


def test_look_ups_copy_what_they_found():
    rng = random.Random(5)
    for _ in range(100):
        demo = lookup_demo(rng)
        assert answer_of(demo) == observations_of(demo)[-1]
    task = lookup(random.Random(7))
    assert task.answer == task.calls[-1][2]


def test_the_same_seed_gives_the_same_dialogues():
    assert list(demonstrations("s", "mixed", 40)) == list(demonstrations("s", "mixed", 40))


def test_the_prompt_is_the_one_the_react_agent_writes():
    from agentfly.agents.react import ReactAgent
    from agentfly.testing import ScriptedEngine
    from agentfly.tools.arithmetic import add, multiply, subtract

    agent = ReactAgent(ScriptedEngine(["Answer: 1"]), tools=[add, subtract, multiply])
    trio = [DemoTool(kind, kind, CANONICAL[kind], (("a", "number"), ("b", "number"))) for kind in CANONICAL]
    assert agent.prompt == react_system([tool.line() for tool in trio])
    assert ReactAgent(ScriptedEngine(["Answer: 1"])).prompt == react_system([])
