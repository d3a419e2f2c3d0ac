"""Demonstrations become trajectories with the masks of reinforcement learning; bad ones are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentfly import Message, ReactAgent, Task
from agentfly.errors import DataError
from agentfly.learn.samples import to_samples
from agentfly.rollout import opening_messages
from agentfly.training.demonstrations import to_trajectory

ROW = {
    "messages": [
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": 'Thought: add\nAction: add\nInput: {"a": 2, "b": 3}'},
        {"role": "user", "content": "Observation: 5"},
        {"role": "assistant", "content": "Answer: 5"},
    ]
}


@pytest.fixture(scope="module")
def agent() -> ReactAgent:
    return ReactAgent("pocket", tools=["add"])


def convert(agent: ReactAgent, row: Any) -> Any:
    return to_trajectory(row, 4, agent, agent.renderer, agent.schemas)


def test_a_demonstration_is_trained_on_its_replies_and_their_ends_alone(agent: ReactAgent) -> None:
    (row,) = to_samples(convert(agent, ROW))
    renderer: Any = agent.renderer
    trained = row.token_ids[row.mask].tolist()
    text = "".join(renderer.tokenizer.decode(trained, skip_special_tokens=False))
    assert text == 'Thought: add\nAction: add\nInput: {"a": 2, "b": 3}<|im_end|>Answer: 5<|im_end|>'
    context = row.token_ids[~row.mask].tolist()
    assert "Observation: 5" in renderer.tokenizer.decode(context, skip_special_tokens=False)


def test_the_prompt_is_the_one_that_the_agent_writes_when_it_acts(agent: ReactAgent) -> None:
    trajectory = convert(agent, ROW)
    renderer: Any = agent.renderer
    assert trajectory.turns[0].context_ids == renderer.start(agent.start(trajectory.task), agent.schemas)
    assert "- add(" in trajectory.messages[0].content


def test_the_examples_of_the_prompt_are_not_trained_and_an_exported_chain_gets_them_once(agent: ReactAgent) -> None:
    shown = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "Answer: 2"}]
    taught = ReactAgent("pocket", tools=["add"], examples=shown)
    taught.use_engine(agent.engine, agent.renderer)
    trajectory = convert(taught, ROW)
    (row,) = to_samples(trajectory)
    renderer: Any = agent.renderer
    assert renderer.tokenizer.decode(row.token_ids[row.mask].tolist()).count("Answer: ") == 1
    assert renderer.tokenizer.decode(row.token_ids.tolist()).count("Answer: 2") == 1
    opening = opening_messages(taught, Task("4", (Message("user", "2 + 3?"),)))
    exported = [{"role": each.role, "content": each.content} for each in opening] + ROW["messages"][1:]
    assert convert(taught, {"messages": exported}).messages == trajectory.messages


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([{"role": "user", "content": "q"}], "at least one message before"),
        ([{"role": "assistant", "content": "a"}], "at least one message before"),
        ([ROW["messages"][0], ROW["messages"][1], ROW["messages"][3]], "both the assistant's"),
        ("text", "list 'messages'"),
        ([ROW["messages"][0], ROW["messages"][1] | {"weight": 0}], "message 1 has the weight 0"),
        ([ROW["messages"][0], {"role": "assistant", "content": "", "function_call": {"name": "add"}}], "give 'tool_calls'"),
        (
            [ROW["messages"][0], {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {"a": 2, "b": 3}}]}],
            "tool calls that ReactAgent does not read",
        ),
        ([{"role": "user"}], "'role' and 'content'"),
    ],
)
def test_a_bad_demonstration_is_named_by_its_row(agent: ReactAgent, messages: Any, what: str) -> None:
    with pytest.raises(DataError, match="row 4") as error:
        convert(agent, {"messages": messages})
    assert what in str(error.value)


def test_native_tool_calls_are_written_as_the_template_writes_them(tmp_path: Path) -> None:
    from agentfly import ToolAgent

    agent = ToolAgent("pocket", tools=["add"])
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}],
    }
    row = {"messages": [ROW["messages"][0], call, {"role": "tool", "content": "5"}, {"role": "assistant", "content": "5"}]}
    trajectory = to_trajectory(row, 0, agent, agent.renderer, agent.schemas)
    assert trajectory.turns[0].completion.text.startswith("<tool_call>")
    assert len(to_samples(trajectory)) == 1
