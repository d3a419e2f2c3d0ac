"""ToolAgent: which parser it takes, and what it makes of replies and of a server's own calls."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from agentfly.agents.tool import ToolAgent
from agentfly.errors import ConfigError, UnknownName
from agentfly.render.parsers import ParsedReply
from agentfly.render.template_marks import Marks
from agentfly.rollout import make_plan
from agentfly.testing import ByteRenderer, ScriptedEngine
from agentfly.tools import tool
from agentfly.types import Action, Completion, Message, ToolCall, ToolResult

CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 12, "b": 7}}</tool_call>'


@tool
def multiply(a: float, b: float, note: str = "") -> float:
    """Multiply two numbers."""
    return a * b


def agent(**options) -> ToolAgent:
    return ToolAgent(ScriptedEngine([]), tools=[multiply], renderer=options.pop("renderer", ByteRenderer()), **options)


def bare(action: Action) -> list[tuple[str, dict]]:
    return [(call.name, call.arguments) for call in action.calls]


def test_a_call_in_the_reply_is_made_and_has_an_id():
    action = agent().parse(Completion(text=f"I multiply.\n{CALL}\n{CALL}"))
    assert bare(action) == [("multiply", {"a": 12, "b": 7})] * 2
    first, second = (call.id for call in action.calls)
    assert first != second
    assert len(first) == len(second) == 9
    assert first.isalnum()
    assert agent().parse(Completion(text=CALL)).calls[0].id == first


def test_a_reply_without_a_call_is_the_answer_less_its_thinking():
    assert agent().parse(Completion(text=f"<think>{CALL}</think>\n\n84\n")) == Action(answer="84")


def test_a_reply_that_is_only_thinking_leaves_it_to_the_policy():
    assert agent().parse(Completion(text="<think>hm</think>")) == Action()
    assert agent().parse(Completion(text="<think>never closed")) == Action()


def test_a_call_quoted_in_thinking_that_the_prompt_opened_is_not_made_if_the_reply_is_cut_off():
    class Opening(ByteRenderer):
        marks = Marks(thinking=(("<think>", "</think>"),), opened=True)

    opening = agent(renderer=Opening())
    assert opening.parse(Completion(text=f"I could write {CALL}", stop="length")) == Action()
    assert bare(opening.parse(Completion(text=f"hm</think>{CALL}", stop="length"))) == [("multiply", {"a": 12, "b": 7})]
    assert bare(opening.parse(Completion(text=CALL))) == [("multiply", {"a": 12, "b": 7})]


def test_the_calls_that_a_server_has_read_win_over_the_text():
    given = ToolCall("multiply", {"a": 1, "b": 2}, "call_1")
    action = agent().parse(Completion(text=CALL, tool_calls=(given,)))
    assert action == Action(calls=(given,))


def test_a_broken_call_is_told_to_the_model():
    (call,) = agent().parse(Completion(text='<tool_call>{"name": "multiply", "arg')).calls
    assert call.name == "multiply"
    assert call.error


def test_results_come_back_in_the_role_of_a_tool():
    messages = agent().observe([ToolCall("multiply", {}, "c1")], [ToolResult(observation="84")])
    assert messages == [Message("tool", "84", name="multiply", tool_call_id="c1")]


def test_the_tools_go_to_the_chat_template():
    assert agent().schemas == [multiply.schema]


def test_raw_values_are_typed_by_the_schema():
    text = "<function=multiply><parameter=a>12</parameter><parameter=b>7.5</parameter><parameter=note>1</parameter></function>"
    action = agent(parser="qwen3_coder").parse(Completion(text=text))
    assert bare(action) == [("multiply", {"a": 12, "b": 7.5, "note": "1"})]
    unknown = agent(parser="qwen3_coder").parse(Completion(text=text.replace("multiply", "add")))
    assert unknown.calls[0].arguments["a"] == "12"


NAMED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}\n{% endfor %}{{ tools }}"
)


@pytest.mark.parametrize(
    "renderer",
    [
        SimpleNamespace(chat_template=NAMED),
        SimpleNamespace(tokenizer=SimpleNamespace(chat_template={"default": "{{ messages }}", "tool_use": NAMED})),
    ],
)
def test_auto_takes_the_parser_that_belongs_to_the_template(renderer):
    assert bare(agent(renderer=renderer).parse(Completion(text='[TOOL_CALLS]multiply[ARGS]{"a": 1}'))) == [
        ("multiply", {"a": 1})
    ]


def test_a_template_that_cannot_be_read_stops_the_run_before_it_starts():
    with pytest.raises(ConfigError, match="not known here: give parser= one of .*, or a function"):
        make_plan(
            agent(renderer=SimpleNamespace(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"))
        )
    with pytest.raises(UnknownName, match="did you mean 'mistral'"):
        agent(parser="mistrall")


def test_a_fenced_call_counts_only_for_a_tool_of_the_agent():
    fenced = '```json\n{"name": "multiply", "arguments": {"a": 12, "b": 7}}\n```'
    assert bare(agent().parse(Completion(text=fenced))) == [("multiply", {"a": 12, "b": 7})]
    other = fenced.replace("multiply", "add")
    assert agent().parse(Completion(text=other)) == Action(answer=other)


def test_a_custom_parser_is_a_function_of_the_text():
    def commands(text: str) -> ParsedReply:
        words = text.split()
        return ParsedReply("", (ToolCall(words[0], {"a": words[1]}),)) if words[0] == "multiply" else ParsedReply(text)

    own = agent(parser=commands)
    assert bare(own.parse(Completion(text="multiply 3"))) == [("multiply", {"a": "3"})]
    assert own.parse(Completion(text="it is 84")) == Action(answer="it is 84")
    with pytest.raises(ConfigError, match="the parser raised IndexError"):
        own.parse(Completion(text=""))
    with pytest.raises(ConfigError, match=r"returns a ParsedReply\(content, calls\), not str"):
        agent(parser=str.upper).parse(Completion(text="x"))


def test_a_chain_of_calls_runs_to_its_answer():
    engine = ScriptedEngine([CALL, "<think>done</think>It is 84."])
    result = ToolAgent(engine, tools=[multiply]).run_sync([{"question": "What is 12 times 7?"}])
    trajectory = result.trajectories[0]
    assert trajectory.prediction == "It is 84."
    assert [message.role for message in trajectory.messages] == ["user", "assistant", "tool", "assistant"]
    assert trajectory.messages[2].content == "84"
