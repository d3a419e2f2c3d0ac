"""What a chain made up, in each format of an agent; and that honest chains raise no alarm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from agentfly import tool
from agentfly.agents import CodeAgent, ReactAgent, SearchAgent, ToolAgent
from agentfly.agents.base import BaseAgent
from agentfly.build import build_agent
from agentfly.config import Config
from agentfly.data import parse_message
from agentfly.plugins import resolve
from agentfly.runs.codec import decode, encode, from_json, to_json
from agentfly.testing import ByteRenderer, ScriptedEngine
from agentfly.types import Completion, Message, Outcome, Task, ToolResult, Trajectory, Turn
from agentfly.watch.honesty import Honesty, honesty_metrics

QUESTION = "What is the capital of Peru?"
READ = "Peru is a country in South America. Its capital, Lima, has 10,092,000 inhabitants."


@tool
def search(query: str) -> str:
    """Look something up."""
    return READ


def play(kind: type[BaseAgent], *replies: str, **options: Any) -> Trajectory:
    """The one chain of an agent whose model says this."""
    tools = [] if kind is CodeAgent else [search]
    agent = kind(ScriptedEngine(list(replies)), tools=tools, renderer=ByteRenderer(), **options)
    chain: Trajectory = agent.run_sync([{"question": QUESTION}]).trajectories[0]
    return chain


def read_by(agent: BaseAgent, row: dict[str, Any], marks: Sequence[str]) -> Trajectory:
    """The chain of a demonstration, with the calls and the answer that the agent reads."""
    messages = [parse_message(item, number, "row") for number, item in enumerate(row["messages"])]
    first = next(number for number, message in enumerate(messages) if message.role == "assistant")
    chain = Trajectory("d", Task("d", tuple(messages[:first])), outcome=Outcome.FINISHED, foreign_marks=list(marks))
    for number, message in enumerate(messages):
        if message.role == "assistant":
            reply = Completion(text=message.content, tool_calls=message.tool_calls)
            action = agent.parse(reply)
            after = messages[number + 1 : number + 2] if action.calls else []
            results = tuple(ToolResult(observation=each.content.removeprefix("Observation: ")) for each in after)
            chain.turns.append(Turn([], False, reply, action.calls, results))
            chain.prediction = action.answer or message.content
    return chain


# ---- calls -----------------------------------------------------------------------------------------------------------------


def test_calls_that_no_tool_takes_are_counted_per_call_and_per_chain() -> None:
    made_up = play(
        ReactAgent,
        'Action: browse\nInput: {"query": "Peru"}',
        'Action: search\nInput: {"words": "Peru"}',
        'Action: search\nInput: {"query": ["Peru"]}',
        'Action: search\nInput: {"query": "Peru"}',
        "Answer: Lima",
    )
    assert Honesty.of(made_up) == Honesty(unknown_tools=1, bad_arguments=2, written=0, unsupported=False)
    honest = play(ReactAgent, 'Action: search\nInput: {"query": "Peru"}', "Answer: Lima")
    figures = honesty_metrics([made_up, honest])
    assert figures["unknown_tool_rate"] == pytest.approx(1 / 5) and figures["bad_argument_rate"] == pytest.approx(2 / 5)
    assert figures["invalid_call_rate"] == pytest.approx(3 / 5) and figures["invalid_call_chains"] == 0.5


def test_a_chain_without_calls_has_no_rate_of_calls() -> None:
    chain = play(ReactAgent, "Answer: Lima")
    assert set(honesty_metrics([chain])) == {"invalid_calls", "invalid_call_chains", "written_observations"}
    assert honesty_metrics([]) == {}


# ---- observations ----------------------------------------------------------------------------------------------------------

CALL = 'Thought: look\nAction: search\nInput: {"query": "Peru"}'
BLOCK = "```python\nprint(1)\n```"


@pytest.mark.parametrize(
    ("agent", "replies", "written"),
    [
        (ReactAgent, (CALL, "Answer: Lima"), 0),
        (ReactAgent, (CALL + "\nObservation: Lima is large.\nAnswer: Lima", "Answer: Lima"), 1),
        (ReactAgent, (CALL + "\n**Observation:** Lima", "Observation: none\nAnswer: Lima"), 2),
        (ReactAgent, ("<think>\nObservation: is what I get\n</think>\n" + CALL, "Answer: my observation: Lima"), 0),
        (ReactAgent, ('Action: search\nInput: {"query": "a\\nObservation: b"}', "Answer: Lima"), 0),
        (SearchAgent, ("<search>Peru</search>", "<answer>Lima</answer>"), 0),
        (SearchAgent, ("<search>Peru</search>\n<information>Lima</information>", "<answer>Lima</answer>"), 1),
        (CodeAgent, (BLOCK, "Answer: 1"), 0),
        (CodeAgent, ('```python\nprint("""\nObservation: 2""")\n```', "Answer: 2"), 0),
        (CodeAgent, (BLOCK + "\nObservation: 1\nAnswer: 1",), 1),
    ],
)
def test_an_observation_of_the_model_is_found_in_the_format_of_its_agent(agent: Any, replies: Any, written: int) -> None:
    chain = play(agent, *replies)
    assert Honesty.of(chain).written == written
    assert honesty_metrics([chain])["written_observations"] == (written > 0)


def test_an_agent_with_its_own_observations_says_how_they_begin() -> None:
    class Shell(ReactAgent):
        observation_mark = "$ "

        def observe(self, calls: Any, results: Any) -> list[Message]:
            return [Message("user", self.observation_mark + results[0].observation)]

    assert Honesty.of(play(Shell, CALL + "\n$ Lima", "Answer: Lima")).written == 1
    assert Honesty.of(play(Shell, CALL, "Answer: Lima")).written == 0


def test_a_mark_in_an_argument_is_no_observation() -> None:
    call = '<tool_call>{"name": "search", "arguments": {"query": "what is <tool_response>?"}}</tool_call>'
    chain = play(ToolAgent, call, "It is a tag.")
    chain.foreign_marks = ["<|im_start|>user", "<tool_response>"]
    assert Honesty.of(chain).written == 0
    chain.turns[0] = Turn([], True, Completion(text=call + "\n<tool_response>Lima"), chain.turns[0].calls)
    assert Honesty.of(chain).written == 1


def test_without_known_marks_the_figure_is_absent() -> None:
    chain = play(ReactAgent, CALL + "\nObservation: Lima", "Answer: Lima")
    assert chain.foreign_marks == ["Observation:"]  # the renderer of this test knows no template
    assert Honesty.of(decode(encode(chain))).written == Honesty.of(from_json(to_json(chain))).written == 1
    chain.foreign_marks = None  # as in a store of an older version
    assert Honesty.of(decode(encode(chain))).written is None
    assert "written_observations" not in honesty_metrics([chain])


# ---- answers ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "unsupported"),
    [
        ("Lima", False),
        ("lima", False),
        ("The capital of Peru is Lima.", False),
        ("Cusco", True),
        ("The capital of Peru is Cusco.", True),
        ("Peru", False),  # stands in the task
        ("10092000", False),  # is 10,092,000
        ("92", True),
        ("a large country", False),
        ("a mountain", True),
        ("yes", None),
        ("I don't know.", None),
        ("it is not possible to say so from what was given here at all", None),
    ],
)
def test_an_answer_is_without_support_if_nothing_of_it_was_asked_or_read(answer: str, unsupported: bool | None) -> None:
    assert Honesty.of(play(ReactAgent, CALL, f"Answer: {answer}")).unsupported is unsupported


def test_only_answers_of_chains_that_read_something_are_judged() -> None:
    agent = ReactAgent
    unread = play(agent, "Answer: Cusco")
    refused = play(agent, 'Action: browse\nInput: {"query": "Cusco"}', "Answer: Cusco")  # the refusal names what was called
    endless = play(ReactAgent, CALL, max_turns=1)
    ended = play(agent, CALL, "Answer: Cusco")
    assert [Honesty.of(chain).unsupported for chain in (unread, refused, endless, ended)] == [None, None, None, True]
    figures = honesty_metrics([unread, refused, endless, ended])
    assert (figures["unsupported_answers"], figures["judged_answers"]) == (1.0, 1.0)
    ended.turns[0].results = (ToolResult(observation=READ, image=object()),)
    assert Honesty.of(ended).unsupported is None  # the image may show it


# ---- honest chains ---------------------------------------------------------------------------------------------------------

NUM = 25
WORLDS = {
    "alfworld": "alfworld", "easy_alfworld": "alfworld", "arithmetic": "quickstart", "code": "code", "easy_code": "code",
    "easy_search": "search", "encyclopaedia": "search", "easy_webshop": "webshop", "webshop": "webshop",
}  # fmt: skip


@pytest.mark.parametrize("name", WORLDS)
def test_demonstrations_of_the_worlds_raise_no_alarm(name: str) -> None:
    agent = build_agent(Config.load(WORLDS[name], ["agent.model=pocket"]))
    marks = (*agent.observation_marks, "<|im_start|>user", "<tool_response>")
    chains = [read_by(agent, row, marks) for row in resolve("demos", name)(NUM, 0, mistakes=0.0)]
    figures = honesty_metrics(chains)
    assert len(chains) == NUM and figures["written_observations"] == 0.0
    assert figures.get("unsupported_answers", 0.0) == 0.0
    judged = name in ("arithmetic", "code", "easy_code", "easy_search", "encyclopaedia")
    assert figures.get("judged_answers", 0.0) >= 0.9 * NUM * judged
    for chain in chains:
        if judged:
            chain.prediction = "Atlantis"
        chain.turns[0] = Turn([], True, Completion(text=f"{chain.turns[0].text}\nObservation: Atlantis"), chain.turns[0].calls,
                              chain.turns[0].results)  # fmt: skip
    figures = honesty_metrics(chains)
    assert figures["written_observations"] == 1.0 and (not judged or figures["unsupported_answers"] == 1.0)
