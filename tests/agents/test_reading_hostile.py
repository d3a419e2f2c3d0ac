"""Agents against any reply: reading never raises, and a megabyte is one pass."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly import plugins
from agentfly.agents import BaseAgent
from agentfly.testing import ScriptedEngine
from agentfly.tools import Tool, tool
from agentfly.types import Completion


@tool
def search(query: str) -> str:
    """Search."""
    return query


def echo(code: str) -> str:
    """Run Python."""
    return code


@tool
def multiply(a: float, b: float) -> float:
    """Multiply."""
    return a * b


TOOLS: dict[str, list[Tool]] = {"code": [Tool(echo, name="python")], "think": [], "search": [search]}
AGENTS: dict[str, BaseAgent] = {
    name: plugins.resolve("agents", name)(ScriptedEngine([]), tools=TOOLS.get(name, [search, multiply]))
    for name in plugins.BUILTIN["agents"]
    if name != "outside"  # it reads no replies: its code does
}
UNITS = [
    *("Action: multiply\nInput: {", 'Action: search\nInput: "', "Action:", "Action: none\n", "Action: search\n", "Input: [\n"),
    *("Answer: ", "Answer:\n", "Final Answer: x\n", "Observation", "Thought:\n", "**", " \n", "\n", "    ", "- ", "Input:\n"),
    *("```python\n", "```\n", "```", "`", "```python\n```\n", "<search>", "</search>", "<search></search>", "<answer>"),
    *(
        "</answer>",
        "<answer></answer>",
        "<information>",
        "<think>",
        "</think>",
        "<think></think>",
        "<tool_call>{",
        "{",
        "[",
        "\\",
        '"',
    ),
]


def check(agent: BaseAgent, text: str, stops: tuple[str, ...] = ("stop", "length")) -> None:
    for stop in stops:
        action = agent.parse(Completion(text=text, stop=stop))  # type: ignore[arg-type]
        assert not (action.calls and action.answer is not None)
        assert len(action.calls) <= 65
        for call in action.calls:
            call.name.encode()
            json.dumps(call.arguments, ensure_ascii=False, allow_nan=False).encode()
            assert call.error is None or (call.arguments == {} and len(call.error) < 400)


@pytest.mark.timeout(600)  # reading that is quadratic needs minutes for one of these
@pytest.mark.parametrize("kind", AGENTS)
def test_a_megabyte_of_anything_is_read(kind: str):
    for unit in UNITS:
        check(AGENTS[kind], unit * (1_000_000 // len(unit)), stops=("stop",))


pieces = st.one_of(
    st.sampled_from(UNITS),
    st.sampled_from(
        ['{"a": 1, "b": 2}', "multiply", "search", "NaN", "}", '"query"', ":", "Action Input: ", "Observation:", "\r\n"]
    ),
    st.text(max_size=6),
    st.characters(codec=None, categories=["Cs"]),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(pieces, max_size=30).map("".join))
def test_no_reply_makes_an_agent_raise(text: str):
    for agent in AGENTS.values():
        check(agent, text)
