"""ThinkAgent and SearchAgent: what stands in tags."""

from __future__ import annotations

import pytest

from agentfly.agents.search import SearchAgent
from agentfly.agents.think import ThinkAgent
from agentfly.errors import ConfigError
from agentfly.testing import ScriptedEngine
from agentfly.tools import tool
from agentfly.types import Action, Completion, Message, Outcome, Task, ToolCall, ToolResult


@tool
def search(question: str, limit: int = 3) -> str:
    """Search the web."""
    return f"{limit} pages on {question}"


@tool
def now() -> str:
    """The time."""
    return "noon"


THINKER = ThinkAgent(ScriptedEngine([]))
SEARCHER = SearchAgent(ScriptedEngine([]), tools=[search])
TASK = Task("0", (Message("user", "Hi"),))


def answer(text: str, stop: str = "stop") -> str | None:
    action = THINKER.parse(Completion(text=text, stop=stop))  # type: ignore[arg-type]
    assert action.calls == ()
    return action.answer


def read(text: str, stop: str = "stop") -> Action:
    return SEARCHER.parse(Completion(text=text, stop=stop))  # type: ignore[arg-type]


def queries(text: str) -> list[str]:
    """What a reply searches for."""
    action = read(text)
    assert action.answer is None
    assert all(call.name == "search" and call.error is None for call in action.calls)
    return [call.arguments["question"] for call in action.calls]


# ThinkAgent


def test_the_answer_stands_in_its_tag():
    assert answer("<think>12 by 7</think>\n<answer> 84 </answer>") == "84"
    assert answer("opened in the prompt</think><answer>84</answer>") == "84"
    assert answer("<answer></answer>") == ""


def test_the_last_answer_counts():
    assert answer("<answer>83</answer> no, <answer>84</answer>") == "84"
    assert answer("I write <answer> and then <answer>84</answer>") == "84"


def test_an_answer_inside_the_thinking_does_not_count():
    assert answer("<think><answer>83</answer></think>") is None
    assert answer("<think><answer>83</answer>") is None
    assert answer("It is 84.") is None


def test_an_answer_whose_closing_tag_a_stop_string_ate_counts_but_not_one_that_was_cut_off():
    assert answer("<answer>84", stop="stop") == "84"
    assert answer("<answer>84", stop="length") is None


def test_a_thinker_has_no_tools():
    with pytest.raises(ConfigError, match="calls no tools, so not 'now': use ReactAgent or ToolAgent"):
        ThinkAgent(ScriptedEngine([]), tools=[now])


def test_a_thinker_may_think_over_several_turns():
    engine = ScriptedEngine(["<think>hm", "<think>84</think><answer>84</answer>"])
    trajectory = ThinkAgent(engine, on_no_tool_call="continue").run_sync([{"question": "12 by 7?"}]).trajectories[0]
    assert (trajectory.outcome, trajectory.prediction) == (Outcome.FINISHED, "84")
    assert trajectory.messages[3] == Message("user", "Go on, and give your answer inside <answer> and </answer>.")


def test_the_prompts_show_the_tags_and_system_replaces_their_first_line():
    assert "<think>your reasoning</think>\n<answer>the answer</answer>" in THINKER.start(TASK)[0].content
    assert "<search>your query</search>" in SEARCHER.start(TASK)[0].content
    terse = SearchAgent(ScriptedEngine([]), tools=[search], system="Be terse.")
    assert terse.start(TASK)[0].content.startswith("Be terse.\nTo search, reply:")


# SearchAgent


def test_a_query_is_a_call_of_the_search_tool_with_its_first_argument():
    assert read("<think>Where?</think>\n<search> capital of Peru </search>") == Action(
        calls=(ToolCall("search", {"question": "capital of Peru"}),)
    )


def test_several_queries_are_several_calls():
    assert queries("<search>a</search>\n<search>b</search>") == ["a", "b"]


def test_what_the_model_imagined_is_ignored():
    assert queries("<search>a</search><information>Lima</information><search>b</search><answer>Lima</answer>") == ["a"]


def test_whichever_comes_first_wins():
    assert queries("<search>a</search><answer>Lima</answer>") == ["a"]
    assert read("<answer>Lima</answer><search>a</search>") == Action(answer="Lima")


def test_tags_inside_the_thinking_do_not_count():
    assert read("<think><search>a</search></think><answer>Lima</answer>") == Action(answer="Lima")
    assert queries("<think>a</think><search>b</search><think><search>c</search></think>") == ["b"]


def test_neither_leaves_it_to_the_policy():
    for text in ("", "Lima", "<search", "<information>x</information><answer>y</answer>", "<think>hm</think>"):
        assert read(text) == Action(), text


def test_a_query_that_is_empty_or_cut_off_is_told_to_the_model():
    (call,) = read("<search> </search>").calls
    assert call == ToolCall("search", error="This tool call could not be read: the query is empty.")
    (call,) = read("<search>capital of", stop="length").calls
    assert call == ToolCall("search", error="This tool call could not be read: the query is not closed with </search>.")
    assert queries("<search>capital of Peru") == ["capital of Peru"]


def test_results_come_back_as_information():
    results = [ToolResult(observation="Lima"), ToolResult(observation="Cusco")]
    assert SEARCHER.observe([ToolCall("search")] * 2, results) == [
        Message("user", "<information>Lima</information>\n<information>Cusco</information>")
    ]


def test_a_searcher_needs_its_tool_and_no_other():
    with pytest.raises(ConfigError, match="needs a tool called 'search'"):
        SearchAgent(ScriptedEngine([]))
    with pytest.raises(ConfigError, match="cannot call 'now'"):
        SearchAgent(ScriptedEngine([]), tools=[search, now])
    with pytest.raises(ConfigError, match="a parameter that takes the query"):
        SearchAgent(ScriptedEngine([]), tools=[tool(name="search", description="x")(lambda: "")])


def test_a_search_runs_to_its_answer():
    engine = ScriptedEngine(["<search>Peru</search>", "<answer>Lima</answer>"])
    trajectory = SearchAgent(engine, tools=[search]).run_sync([{"question": "The capital of Peru?"}]).trajectories[0]
    assert (trajectory.outcome, trajectory.prediction) == (Outcome.FINISHED, "Lima")
    assert trajectory.messages[-2].content == "<information>3 pages on Peru</information>"
