"""ReactAgent: the prompt it writes, and how it reads replies that follow it more or less."""

from __future__ import annotations

from enum import Enum
from typing import Literal

import pytest

from agentfly.agents.react import ReactAgent, describe_tools
from agentfly.testing import ScriptedEngine
from agentfly.tools import tool
from agentfly.types import Action, Completion, Message, Task, ToolCall, ToolResult


@tool
def multiply(a: float, b: float) -> float:
    """Multiply two numbers.

    Args:
        a: first factor
        b: second factor
    """
    return a * b


@tool
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


@tool
def search(query: str, limit: int = 3) -> str:
    """Search the web."""
    return query * limit


@tool
def now() -> str:
    """The time."""
    return "noon"


@tool
def total(numbers: list[int]) -> int:
    """Add up."""
    return sum(numbers)


AGENT = ReactAgent(ScriptedEngine([]), tools=[multiply, add, search, now, total])


def read(text: str, agent: ReactAgent = AGENT) -> Action:
    return agent.parse(Completion(text=text))


def calls(text: str) -> list[tuple[str, dict]]:
    """The calls of a reply, all of them good."""
    action = read(text)
    assert action.answer is None
    assert [call.error for call in action.calls] == [None] * len(action.calls)
    return [(call.name, call.arguments) for call in action.calls]


def complaint(text: str) -> str:
    """Returns the error message for the only call of a reply."""
    (call,) = read(text).calls
    assert call.arguments == {}
    assert call.error is not None
    return call.error.removeprefix("This tool call could not be read: ")


TWELVE_BY_SEVEN = [("multiply", {"a": 12, "b": 7})]

# The prompt


def test_the_prompt_is_written_out():
    agent = ReactAgent(ScriptedEngine([]), tools=[multiply, add])
    messages = agent.start(Task("0", (Message("user", "What is 12 times 7?"),)))
    assert [message.role for message in messages] == ["system", "user"]
    assert messages[1].content == "What is 12 times 7?"
    assert (
        messages[0].content
        == """You solve tasks step by step with tools.
Tools:
- multiply(a: number, b: number): Multiply two numbers. a: first factor; b: second factor
- add(a: number, b: number): Add two numbers.
To use a tool, reply:
Thought: what to do next
Action: the tool's name
Input: its arguments as JSON
When you know the answer, reply:
Thought: why
Answer: the answer"""
    )


def test_without_tools_the_prompt_says_only_how_to_answer():
    agent = ReactAgent(ScriptedEngine([]))
    expected = "You solve tasks step by step.\nWhen you know the answer, reply:\nThought: why\nAnswer: the answer"
    assert agent.start(Task("0", (Message("user", "Hi"),)))[0].content == expected


def test_system_replaces_the_first_line_and_a_row_may_bring_its_own():
    agent = ReactAgent(ScriptedEngine([]), tools=[now], system="You are a clock.")
    assert agent.prompt.startswith("You are a clock.\nTools:\n- now(): The time.\nTo use a tool, reply:\n")
    messages = agent.start(Task("0", (Message("system", "Be brief."), Message("user", "Hi"))))
    assert messages[0].content == f"Be brief.\n\n{agent.prompt}"
    assert [message.role for message in messages] == ["system", "user"]


class Unit(Enum):
    KM = "km"
    MILE = "mile"


@tool
def route(
    start: str,
    stops: list[str],
    by: Literal["car", "foot"] = "car",
    unit: Unit = Unit.KM,
    limit: int | None = None,
    x: float = 2,
) -> str:
    """Plan a route

    Args:
        stops: places
            on the way
        limit: how far
    """
    return start


def test_signatures_show_types_choices_defaults_and_what_may_be_left_out():
    assert describe_tools([route.schema]) == (
        '- route(start: string, stops: array of string, by: "car"|"foot" = "car", unit: "km"|"mile" = "km", limit?: integer, '
        "x: number = 2): Plan a route. stops: places on the way; limit: how far"
    )


def test_a_schema_with_nothing_to_say_is_one_bare_signature():
    assert describe_tools([{"name": "f", "parameters": {"properties": {"a": {}, "b": {"$ref": "#/$defs/P"}}}}]) == (
        "- f(a?: any, b?: object)"
    )


def test_results_come_back_as_one_user_message():
    messages = AGENT.observe([ToolCall("add"), ToolCall("now")], [ToolResult(observation="84"), ToolResult(observation="noon")])
    assert messages == [Message("user", "Observation: 84\nObservation: noon")]


# Replies that follow the prompt


def test_an_action_with_its_input_is_a_call():
    assert calls('Thought: I multiply.\nAction: multiply\nInput: {"a": 12, "b": 7}') == TWELVE_BY_SEVEN


def test_an_answer_ends_the_chain():
    assert read("Thought: It is clear.\nAnswer: 84") == Action(answer="84")
    assert read("Answer: one\ntwo\nInput: three") == Action(answer="one\ntwo\nInput: three")
    assert read("Thought: hm\nAnswer: 5\nThought: no\nAnswer: 84\nThought: done") == Action(answer="84")


def test_several_actions_are_several_calls():
    text = 'Action: multiply\nInput: {"a": 1, "b": 2}\nThought: and\nAction: now\nAction: add\nInput: {"a": 3, "b": 4}'
    assert calls(text) == [("multiply", {"a": 1, "b": 2}), ("now", {}), ("add", {"a": 3, "b": 4})]


# Replies that follow it less


@pytest.mark.parametrize(
    "text",
    [
        'action: multiply\ninput: {"a": 12, "b": 7}',
        'ACTION : Multiply\nACTION INPUT : {"a": 12, "b": 7}',
        '  **Action:** `multiply`\n  **Action Input:** {"a": 12, "b": 7}',
        'Action:\nmultiply\nInput:\n{"a": 12,\n "b": 7}\n',
        'Action: "multiply"\nInput: ```json\n{"a": 12, "b": 7}\n```',
        'Action: [multiply]\nInput:\n```\n{"a": 12, "b": 7}\n```\nThat should do.',
        'Action: multiply\nInput: {"a": 12, "b": 7} and then I will see.',
        'Action: multiply\r\nInput: {"a": 12, "b": 7}\r\n',
        '<think>Action: add\nInput: {}</think>\nAction: multiply\nInput: {"a": 12, "b": 7}',
        'Action: multiply\nInput: {"a": 12, "b": 7}\nObservation: 85\nAction: add\nInput: {"a": 85, "b": 1}\nAnswer: 86',
    ],
)
def test_small_slips_are_forgiven(text: str):
    assert calls(text) == TWELVE_BY_SEVEN


def test_what_the_model_imagined_is_ignored():
    assert read("Thought: I wait.\nObservation: 84\nAnswer: 84") == Action()


def test_whichever_comes_first_wins():
    assert calls('Action: multiply\nInput: {"a": 12, "b": 7}\nAnswer: 84') == TWELVE_BY_SEVEN
    assert read('Answer: 84\nAction: multiply\nInput: {"a": 12, "b": 7}\nAnswer: 85') == Action(answer="84")


def test_an_action_that_says_none_is_no_call():
    assert read("Thought: I know.\nAction: none\nInput: {}") == Action()
    assert read("Action: None\nAnswer: 84") == Action(answer="84")


def test_neither_an_action_nor_an_answer_leaves_it_to_the_policy():
    for text in ("", "I think it is 84.", "Thought: hm", 'Input: {"a": 1}', "My Action: none at all"):
        assert read(text) == Action(), text
    assert AGENT.on_no_tool_call == "end"


def test_a_tool_with_one_argument_takes_it_plain():
    assert calls("Action: search\nInput: rivers of Peru") == [("search", {"query": "rivers of Peru"})]
    assert calls('Action: search\nInput: "rivers"') == [("search", {"query": "rivers"})]
    assert calls("Action: search\nInput: 84") == [("search", {"query": "84"})]
    assert calls("Action: search\nInput: two\nlines") == [("search", {"query": "two\nlines"})]
    assert calls("Action: total\nInput: [1, 2]") == [("total", {"numbers": [1, 2]})]
    assert calls("Action: total\nInput: 1 and 2") == [("total", {"numbers": "1 and 2"})]


def test_a_tool_without_arguments_needs_no_input():
    assert calls("Action: now") == calls("Action: now\nInput:") == calls("Action: now\nInput: {}") == [("now", {})]


# Replies that cannot be read


def test_an_unknown_tool_is_left_for_the_tools_to_refuse():
    assert calls('Action: divide\nInput: {"a": 1}') == [("divide", {})]
    assert calls("Action: " + "x" * 1000)[0][0] == "x" * 128


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Action: multiply", 'write its arguments on a line Input: {"a": ..., "b": ...}.'),
        ("Action: multiply\nInput: 12 and 7", 'its Input must be a JSON object: {"a": ..., "b": ...}.'),
        ("Action: multiply\nInput:", 'its Input must be a JSON object: {"a": ..., "b": ...}.'),
        ('Action: multiply\nInput: {"a": 12, "b": 7', "the JSON is not valid at its end: expecting ',' delimiter."),
        (
            "Action: multiply\nInput: {'a': 12}",
            "the JSON is not valid at character 2: expecting property name enclosed in double quotes.",
        ),
        ('Action: multiply\nInput: {"a": NaN, "b": 1}', "NaN is not JSON; use a number or null."),
        ('Action: multiply\nInput: {"a": 1, "a": 2}', "the key 'a' is given twice."),
        ("Action: multiply\nInput: " + '{"a":' * 1000, "the JSON is nested deeper than 64 levels."),
        ("Action:\nInput: {}", "after Action: comes the name of a tool."),
    ],
)
def test_what_cannot_be_read_is_told_to_the_model(text: str, sentence: str):
    assert complaint(text) == sentence


def test_a_reply_with_too_many_actions_is_read_in_part_and_says_so():
    action = read("Action: now\n" * 100)
    assert len(action.calls) == 65
    assert action.calls[-1].error == "This tool call could not be read: only the first 64 actions of a reply are read."
