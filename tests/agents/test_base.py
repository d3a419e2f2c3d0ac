"""Building and running an agent: the public seam, and what it refuses before the first token."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentfly import Action, BaseAgent, Completion, Message, ReactAgent, SearchAgent, Task, ToolCall, reward, tool
from agentfly.errors import ConfigError, DataError, UnknownName
from agentfly.testing import ByteRenderer, ScriptedEngine
from agentfly.types import Trajectory


@tool(name="shout")
def shout(text: str) -> str:
    """Shout."""
    return text.upper()


@reward(name="exact")
def exact(prediction: str, trajectory: Any, answer: str) -> float:
    return float(prediction.strip() == answer)


class EchoAgent(BaseAgent):
    """A custom agent: `say X` calls a tool, anything else is the answer."""

    def start(self, task: Task) -> list[Message]:
        return [Message("system", "Reply `say X`, or the answer."), *task.messages]

    def parse(self, completion: Completion) -> Action:
        if completion.text.startswith("say "):
            return Action(calls=(ToolCall("shout", {"text": completion.text[4:]}),))
        return Action(answer=completion.text)


def test_a_custom_agent_overrides_two_methods() -> None:
    agent = EchoAgent(ScriptedEngine(["say hello", "HELLO"]), tools=[shout], reward=exact, renderer=ByteRenderer())
    (trajectory,) = agent.run_sync([{"question": "greet", "answer": "HELLO"}])
    assert trajectory.messages[0].content.startswith("Reply")
    assert trajectory.messages[3].content == "Observation: HELLO"
    assert trajectory.reward == 1.0


EXAMPLES = [{"role": "user", "content": "greet"}, {"role": "assistant", "content": "say hello"}]


def test_examples_stand_between_the_system_text_and_the_task_in_every_prompt() -> None:
    agent = EchoAgent(ScriptedEngine(["HI"]), reward=exact, examples=EXAMPLES, renderer=ByteRenderer())
    (trajectory,) = agent.run_sync([{"question": "part", "answer": "HI"}])
    opening = [(message.role, message.content) for message in trajectory.messages[:-1]]
    assert opening == [
        ("system", "Reply `say X`, or the answer."), ("user", "greet"), ("assistant", "say hello"), ("user", "part"),
    ]  # fmt: skip
    assert ByteRenderer().decode(trajectory.turns[0].context_ids).count("say hello") == 1
    assert trajectory.task.messages == (Message("user", "part"),)


@pytest.mark.parametrize(
    ("examples", "sentence"),
    [
        (EXAMPLES[:1], "examples begin with a user message and end with the assistant's reply"),
        (EXAMPLES[1:], "examples begin with a user message and end with the assistant's reply"),
        (
            [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}, EXAMPLES[1]],
            "examples hold no system message",
        ),
        ([{"role": "user"}], "examples: message 0 must be an object with 'role' and 'content'"),
    ],
)
def test_examples_that_are_no_dialogue_are_refused(examples: list[dict[str, str]], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        EchoAgent(ScriptedEngine([]), examples=examples)


def test_run_is_async_and_run_sync_works_inside_a_loop_too() -> None:
    agent = EchoAgent(ScriptedEngine(["hi"]), reward=exact, renderer=ByteRenderer())
    rows = [{"question": "greet", "answer": "hi"}]

    async def inside() -> None:
        assert (await agent.run(rows)).rewards == [1.0]
        assert agent.run_sync(rows).rewards == [1.0]

    asyncio.run(inside())


@pytest.mark.parametrize(
    ("options", "kind", "sentence"),
    [
        ({"tools": ["shuot"]}, UnknownName, "did you mean 'shout'"),
        ({"tools": "shout"}, ConfigError, "tools is a list"),
        ({"tools": [shout, shout]}, ConfigError, "two tools are called 'shout'"),
        ({"reward": "exact_mach"}, UnknownName, "exact_match"),
        ({"on_tool_error": "stop"}, ConfigError, "on_tool_error"),
        ({"max_turns": 0}, ConfigError, "max_turns"),
        ({"sampling": {"temprature": 1}}, ConfigError, "temprature"),
        ({"env": 3}, ConfigError, "an environment is a class"),
        ({"resources": {"ram": 3}}, ConfigError, "resources has no key"),
    ],
)
def test_a_bad_argument_is_refused_when_the_agent_is_built(
    options: dict[str, Any], kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind, match=sentence):
        ReactAgent(ScriptedEngine(["x"]), **options)


def test_an_agent_that_needs_a_tool_says_which() -> None:
    with pytest.raises(ConfigError, match="needs a tool called 'search'"):
        SearchAgent(ScriptedEngine(["x"]))


def test_a_field_that_the_reward_asks_for_and_the_data_lacks_is_an_error_before_the_run() -> None:
    engine = ScriptedEngine(["hi"], record=True)
    agent = ReactAgent(engine, reward=exact, renderer=ByteRenderer())
    with pytest.raises(ConfigError, match="answer"):
        agent.run_sync([{"question": "q", "anwser": "typo"}])
    with pytest.raises(DataError, match="row 1"):
        agent.run_sync([{"question": "q", "answer": "a"}, {"question": "r"}])
    assert engine.requests == []


def test_an_engine_that_reads_ids_needs_a_renderer() -> None:
    engine = ScriptedEngine(["x"])
    del engine.renderer
    with pytest.raises(ConfigError, match="renderer"):
        ReactAgent(engine).run_sync([{"question": "q"}])


def test_a_chat_engine_needs_none_and_leaves_nothing_to_train_on() -> None:
    agent = ReactAgent(ScriptedEngine(["Answer: 4"], reads="messages"), reward=exact)
    (trajectory,) = agent.run_sync([{"question": "2 + 2?", "answer": "4"}])
    assert trajectory.reward == 1.0
    assert not trajectory.trainable


@pytest.mark.parametrize("options", [{"num_chains": 0}, {"max_concurrency": 0}, {"max_turns": 0}])
def test_a_run_of_nothing_is_refused(options: dict[str, int]) -> None:
    agent = ReactAgent(ScriptedEngine(["Answer: 4"]), renderer=ByteRenderer())
    with pytest.raises(ConfigError, match="at least 1"):
        agent.run_sync([{"question": "q"}], **options)


def test_results_are_short_in_print_and_can_be_walked_through() -> None:
    script = ['Thought: add\nAction: add\nInput: {"a": 1, "b": 2}', "Thought: done\nAnswer: " + "3" * 300]
    agent = ReactAgent(ScriptedEngine(script), renderer=ByteRenderer(), tools=["add"], reward="exact_match")
    result = agent.run_sync([{"question": "What is 1 plus 2?", "answer": "3" * 300}], num_chains=1)
    trajectory = result[0]
    assert result.best is trajectory
    assert [turn.text for turn in trajectory] == script
    assert (trajectory[-1], len(trajectory), trajectory[:1]) == (trajectory.turns[1], 2, trajectory.turns[:1])
    for thing in (result, trajectory, trajectory[1], trajectory[1].completion):
        assert len(repr(thing)) < 250
    assert "1 chains, 1 per task: mean reward 1; 1 finished" in repr(result)
    assert "add -> '3'" in repr(trajectory[0])
    (row,) = result.to_rows()
    assert (row["turns"], row["tool_calls"], row["reward"], row["exact_match"]) == (2, 1, 1.0, 1.0)


def test_a_trajectory_without_turns_is_true() -> None:
    assert Trajectory("c", Task("t", ()))
