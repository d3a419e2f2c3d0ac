"""Chains whose agent rewrites the history: the rows, what each request holds, and what is trained."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from agentfly.agents.base import BaseAgent
from agentfly.agents.history import BEGINS, Fold, LastSteps
from agentfly.errors import ConfigError
from agentfly.learn.samples import check_tokens, to_samples
from agentfly.rollout.chat import ChatSession
from agentfly.rows import Aside, rows_of
from agentfly.testing import ByteRenderer, ScriptedEngine
from agentfly.types import Message, Outcome, Trajectory, Turn
from tests.rollout.test_chain import ANSWER, CALL, agent_for, play, right


def contents(agent: BaseAgent) -> list[list[str]]:
    """The contents of the messages of each request, without the system text."""
    return [[message.content for message in request.messages[1:]] for request in agent.engine.requests]  # type: ignore[attr-defined]


def checked(trajectory: Trajectory, agent: BaseAgent) -> list[str]:
    """The training rows as texts. What precedes each reply is what the engine read."""
    rows = to_samples(trajectory)
    check_tokens(trajectory, rows, versions=range(1))
    for turn, request in zip(trajectory.turns, agent.engine.requests, strict=True):  # type: ignore[attr-defined]
        assert any(
            row.token_ids.tolist()[: len(request.prompt_ids)] == request.prompt_ids
            and row.token_ids.tolist()[len(request.prompt_ids) :][: len(turn.completion.token_ids)] == turn.completion.token_ids
            for row in rows
        )
    return [agent.renderer.decode(row.token_ids.tolist()) for row in rows]  # type: ignore[union-attr]


def test_with_the_last_steps_each_request_holds_the_opening_and_those() -> None:
    agent = agent_for([CALL, CALL, CALL, ANSWER], history={"kind": "last", "steps": 1})
    trajectory = play(agent)
    step = [CALL, "Observation: 42"]
    assert contents(agent) == [["6 x 7?"], ["6 x 7?", *step], ["6 x 7?", *step], ["6 x 7?", *step]]
    assert [turn.why for turn in trajectory.turns] == ["first", "", "rewritten", "rewritten"]
    assert rows_of(trajectory) == [[0, 1], [2], [3]]
    assert len(checked(trajectory, agent)) == 3
    assert [message.content for message in trajectory.messages[1:]] == ["6 x 7?", *step * 3, ANSWER], "all that was said"


def test_examples_before_the_task_are_no_steps() -> None:
    examples = [{"role": "user", "content": "1 x 1?"}, {"role": "assistant", "content": "Answer: 1"}]
    agent = agent_for([CALL, CALL, ANSWER], history=LastSteps(1), examples=examples)
    play(agent)
    assert contents(agent)[-1] == ["1 x 1?", "Answer: 1", "6 x 7?", CALL, "Observation: 42"]


def test_a_history_is_folded_into_the_summary_that_the_model_writes() -> None:
    summaries = iter(("six by seven\n", "again"))

    def reply(request: Any) -> str:
        if "Write only the summary" in request.messages[-1].content:
            return next(summaries)
        return ANSWER if "again" in request.messages[1].content else CALL

    agent = agent_for(reply, history={"kind": "fold", "at": 500}, max_turns=20)
    trajectory = play(agent)
    assert trajectory.outcome is Outcome.FINISHED and trajectory.prediction == "42"
    openings = [request[0] for request in contents(agent)]
    assert list(dict.fromkeys(openings)) == ["6 x 7?", f"6 x 7?{BEGINS}six by seven", f"6 x 7?{BEGINS}again"]
    asked = [turn for turn in trajectory.turns if turn.text in ("six by seven\n", "again")]
    assert [turn.why for turn in asked] == ["", ""], "a summary is written in the row that it is of"
    assert [turn.why for turn in trajectory.turns if turn.why] == ["first", "rewritten", "rewritten"]
    rows = checked(trajectory, agent)
    assert len(rows) == 3 and rows[0].count("six by seven") == 1
    trained = "".join(chr(i) for row in to_samples(trajectory) for i, flag in zip(row.token_ids, row.mask, strict=True) if flag)
    assert "six by seven" in trained, "the policy learns to write it"


def test_a_summary_of_a_chat_server_is_asked_for_by_the_tokens_that_it_reports() -> None:
    fold = Fold(at=100)
    turn = Turn([], True, ScriptedEngine(["x"])._complete("x"), row=0)
    object.__setattr__(turn.completion, "prompt_tokens", 99)
    object.__setattr__(turn.completion, "token_ids", [])
    messages = [Message("user", "q"), Message("assistant", "x"), Message("tool", "y")]
    assert fold.rewrite(messages, [turn]) is None
    object.__setattr__(turn.completion, "reply_tokens", 2)
    asked = fold.rewrite(messages, [turn])
    assert isinstance(asked, Aside) and [message.role for message in asked] == ["user", "assistant", "tool", "user"]


class Rewriting(BaseAgent):
    """Returns what a test wants."""

    wanted: Any = None

    def rewrite(self, messages: Sequence[Message], turns: Sequence[Turn]) -> list[Message] | None:
        return self.wanted(messages) if callable(self.wanted) else self.wanted


def rewriting(wanted: Any, replies: Sequence[str] = ("a", "b", "c")) -> Rewriting:
    engine = ScriptedEngine(replies, record=True)
    agent = Rewriting(engine, renderer=ByteRenderer(), reward=right, max_turns=3, on_no_tool_call="continue")
    agent.wanted = wanted
    agent.parse = lambda completion: agent_for([]).parse(completion)  # type: ignore[method-assign]
    return agent


def test_messages_that_the_model_has_not_read_can_be_replaced_within_the_row() -> None:
    agent = rewriting(lambda messages: [*messages[:-1], Message("user", "Hurry.")])
    trajectory = play(agent)
    assert [turn.why for turn in trajectory.turns] == ["first", "", ""]
    assert [message.content for message in trajectory.messages][:6] == ["6 x 7?", "a", "Hurry.", "b", "Hurry.", "c"]
    assert len(checked(trajectory, agent)) == 1


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ([], "Rewriting.rewrite returns None or a list of Message, the last one not the assistant's, not \\[\\]"),
        ([Message("user", "q"), Message("assistant", "r")], "the last one not the assistant's"),
        (["text"], "returns None or a list of Message"),
        (lambda messages: Aside([*messages, Message("user", "?")]) if messages[-1].role == "user" else None,
         "Rewriting.rewrite returned None after the reply to its Aside"),
    ],
)  # fmt: skip
def test_a_history_that_no_reply_can_follow_is_refused(wanted: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        play(rewriting(wanted))


@pytest.mark.parametrize(
    ("history", "sentence"),
    [
        ("fold", 'history is a table such as {kind = "last", steps = 4} or'),
        ({"kind": "window"}, "history is a table such as"),
        ({"kind": ["fold"]}, "history is a table such as"),
        ({"kind": "fold"}, "history of kind 'fold': .*'at'"),
        ({"kind": "last", "steps": 0}, "history: steps is a whole number of at least 1, not 0"),
        ({"kind": "fold", "at": 1.5}, "history: at is a whole number of at least 1, not 1.5"),
    ],
)
def test_a_history_that_does_not_exist_is_answered_with_those_that_do(history: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        agent_for([], history=history)


def test_a_conversation_with_a_person_goes_on_with_the_rewritten_history() -> None:
    agent = agent_for([CALL, CALL, ANSWER, ANSWER], history=LastSteps(1))

    async def talk() -> None:
        async with await ChatSession.open(agent) as chat:
            for text in ("6 x 7?", "Sure?"):
                async for _ in chat.send(text):
                    pass
            assert contents(agent)[-1] == ["6 x 7?", CALL, "Observation: 42", ANSWER, "Sure?"]
            assert [turn.row for turn in chat.trajectory.turns] == [0, 0, 1, 1]
            chat.trajectory.reward = 1.0
            checked(chat.trajectory, agent)
            with pytest.raises(ConfigError, match="cannot be forked at turn 2: its history was replaced before"):
                await ChatSession.fork(agent, chat.trajectory, 2)

    asyncio.run(talk())
