"""CodeAgent: which block of a reply runs, and what is the answer."""

from __future__ import annotations

import pytest

from agentfly.agents.code import CodeAgent
from agentfly.errors import ConfigError
from agentfly.testing import ScriptedEngine
from agentfly.tools import Tool, tool
from agentfly.types import Action, Completion, Message, Task, ToolCall


def echo(source: str) -> str:
    """Run Python."""
    return source


# Not by the decorator, which would make it the interpreter of the whole process.
interpreter = Tool(echo, name="python")


@tool
def search(query: str) -> str:
    """Search."""
    return query


AGENT = CodeAgent(ScriptedEngine([]), tools=[interpreter])


def read(text: str) -> Action:
    return AGENT.parse(Completion(text=text))


def code(text: str) -> str:
    """The code that a reply runs."""
    (call,) = read(text).calls
    assert (call.name, call.error) == ("python", None)
    return call.arguments["source"]


def complaint(text: str) -> str | None:
    (call,) = read(text).calls
    assert (call.name, call.arguments) == ("python", {})
    return call.error


def test_a_block_is_run():
    assert code("I compute.\n```python\nx = 6\nprint(x * 7)\n```\nLet us see.") == "x = 6\nprint(x * 7)\n"


@pytest.mark.parametrize("info", ["python", "py", "Python", "python3", " python ", "python title=x"])
def test_a_block_may_be_labelled_in_several_ways(info: str):
    assert code(f"```{info}\nprint(1)\n```") == "print(1)\n"


def test_the_last_block_is_run():
    assert code("```python\nprint(1)\n```\nNo:\n```python\nprint(2)\n```") == "print(2)\n"
    assert code("```python\nprint(1)\n```\n```json\n{}\n```") == "print(1)\n"
    assert code("```python\nprint(1)\n```python\nprint(2)\n```") == "print(2)\n"


def test_backticks_inside_the_code_do_not_end_it():
    assert code("```python\nprint('```')\nx = '''\n   `````\n'''\n```") == "print('```')\nx = '''\n   `````\n'''\n"


def test_code_that_was_only_thought_of_is_not_run():
    assert read("<think>\n```python\nprint(1)\n```\n</think>\n84") == Action(answer="84")


def test_a_reply_without_code_is_the_answer():
    assert read("It is 84.") == Action(answer="It is 84.")
    assert read("```json\n{}\n```") == Action(answer="```json\n{}\n```")
    assert read("") == Action()


def test_an_answer_outside_a_block_wins():
    assert read("```python\nprint(1)\n```\nAnswer: 84") == Action(answer="84")
    assert read("**Final Answer:** 1\nor rather\nanswer: 84\n") == Action(answer="84")
    assert code("```python\nprint('''\nAnswer: 84\n''')\n```") == "print('''\nAnswer: 84\n''')\n"


def test_a_block_that_is_not_closed_or_is_empty_is_told_to_the_model():
    assert complaint("```python\nprint(1)") == "This tool call could not be read: the code block is not closed with ```."
    assert (
        complaint("```python\nprint(1)\n```\n```python\nx")
        == "This tool call could not be read: the code block is not closed with ```."
    )
    assert complaint("```python\n\n```") == "This tool call could not be read: the code block is empty."


def test_the_prompt_says_how_and_system_replaces_its_first_line():
    task = Task("0", (Message("user", "What is 6 times 7?"),))
    assert "```python\nprint(6 * 7)\n```" in AGENT.start(task)[0].content
    agent = CodeAgent(ScriptedEngine([]), tools=[interpreter], system="You are terse.")
    assert agent.start(task)[0].content.startswith("You are terse.\nTo run code,")


def test_the_interpreter_is_added_by_itself():
    agent = CodeAgent(ScriptedEngine([]))
    assert list(agent.tools) == ["python"]
    (call,) = agent.parse(Completion(text="```python\nprint(1)\n```")).calls
    assert call == ToolCall("python", {"code": "print(1)\n"})


def test_other_tools_are_refused():
    with pytest.raises(ConfigError, match="cannot call 'search': use ReactAgent or ToolAgent"):
        CodeAgent(ScriptedEngine([]), tools=[interpreter, search])
    with pytest.raises(ConfigError, match="tools is a list"):
        CodeAgent(ScriptedEngine([]), tools="python")


def test_a_chain_keeps_its_names_from_block_to_block():
    engine = ScriptedEngine(["```python\nx = 6\n```", "```python\nprint(x * 7)\n```", "Answer: 42"])
    trajectory = CodeAgent(engine).run_sync([{"question": "What is 6 times 7?"}]).trajectories[0]
    assert trajectory.prediction == "42"
    assert "42" in trajectory.messages[-2].content
