"""How the history of a client is matched with what its chain has read: which row a call is in, why, and which ids it reads."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from agentfly.endpoint.calls import Answer, Call, Refused
from agentfly.endpoint.lineage import Lineage
from agentfly.endpoint.replies import Replies
from agentfly.learn.samples import check_tokens, to_samples
from agentfly.rows import rows_of
from agentfly.testing import ByteRenderer
from agentfly.types import Completion, Message, Outcome, Task, ToolCall, Trajectory

from .test_dialects import RECORDED, REWRITES, exchange

SYSTEM, USER = Message("system", "be brief"), Message("user", "6 x 7?")
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}}}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


class Session:
    """A client's calls on one chain: `says` sends messages, samples a text, and returns the answer."""

    def __init__(self, **options: Any) -> None:
        self.renderer = ByteRenderer()
        self.replies = Replies(self.renderer, "hermes")
        self.lineage = Lineage("c", self.renderer, self.replies, **options)
        self.trajectory = Trajectory("c", Task("t", ()), outcome=Outcome.FINISHED, reward=1.0)
        self.time = 0.0

    def asks(self, *messages: Message, tools: tuple[dict[str, Any], ...] = (), thinking: dict[int, str] | None = None) -> Any:
        self.time += 1
        call = Call(dialect="chat", messages=messages, tools=tools, thinking=thinking or {})
        return self.lineage.place(call, self.time), tools

    def gets(self, asked: Any, text: str) -> Answer:
        place, tools = asked
        ids = [*text.encode(), self.renderer.stop_ids[0]]
        completion = Completion(text=text, token_ids=ids, logprobs=[-0.5] * len(ids), versions=[0] * len(ids))
        turn = place.row.turn(completion)
        answer = self.replies.read(completion, tools, (), 0)
        turn.calls = answer.message.tool_calls
        self.trajectory.turns.append(turn)
        self.time += 1
        self.lineage.add(place, completion, answer, turn, self.time)
        return answer

    def says(self, *messages: Message, text: str = "ok", **options: Any) -> Message:
        return self.gets(self.asks(*messages, **options), text).message

    @property
    def whys(self) -> list[str]:
        return [turn.why for turn in self.trajectory.turns]

    def rows(self) -> list[str]:
        """The training rows as texts, after a check of all their contexts."""
        samples = to_samples(self.trajectory)
        check_tokens(self.trajectory, samples, versions=range(1))
        return [self.renderer.decode(sample.token_ids.tolist()) for sample in samples]


def test_a_client_that_appends_is_one_row_and_its_reply_is_not_encoded_again() -> None:
    session = Session()
    first = session.says(SYSTEM, USER, text="\n\n  forty two ")
    assert first.content.strip() == "forty two"
    returned = replace(first, content="forty two")  # a client that strips
    session.says(SYSTEM, USER, returned, Message("user", "sure?"))
    assert session.whys == ["first", ""]
    (row,) = session.rows()
    assert "\n\n  forty two " in row, "the ids are those that were sampled"


def test_calls_are_recognised_by_their_meaning_and_results_reach_the_turn_of_their_call() -> None:
    session = Session()
    called = session.says(USER, text=CALLED, tools=(ADD,))
    (call,) = called.tool_calls
    assert (call.name, call.arguments) == ("add", {"a": 1, "b": 2}) and call.id
    rewritten = Message("assistant", "", (ToolCall("add", {"b": 2, "a": 1}, "their-id"),))
    session.says(USER, rewritten, Message("tool", "3", tool_call_id=call.id), tools=(ADD,))
    assert session.whys == ["first", ""]
    turn = session.trajectory.turns[0]
    assert [result.observation for result in turn.results] == ["3"] and turn.tools_s == 1.0
    assert session.trajectory.tool_counts == {"add": 1}


def test_results_without_ids_are_those_of_the_calls_in_order_and_with_ids_in_any_order() -> None:
    for ids in (False, True):
        session = Session()
        called = session.says(USER, text=CALLED + CALLED.replace("1", "5"), tools=(ADD,))
        results = [
            Message("tool", name, tool_call_id=call.id if ids else None)
            for name, call in zip("xy", called.tool_calls, strict=True)
        ]
        session.says(USER, called, *(results[::-1] if ids else results), tools=(ADD,))
        assert [result.observation for result in session.trajectory.turns[0].results] == ["x", "y"]


def test_two_agents_that_take_turns_are_two_rows() -> None:
    session, sub = Session(), Message("system", "you look things up")
    parent = session.says(SYSTEM, USER, text="ask")
    child = session.says(sub, Message("user", "what?"), text="here")
    session.says(SYSTEM, USER, parent, Message("user", "found"), text="done")
    session.says(sub, Message("user", "what?"), child, Message("user", "more"), text="there")
    assert session.whys == ["first", "first", "", ""]
    assert rows_of(session.trajectory) == [[0, 2], [1, 3]]
    one, two = session.rows()
    assert "here" not in one and "ask" not in two


def test_calls_at_once_from_one_reply_begin_rows_with_its_very_ids() -> None:
    session = Session()
    reply = session.says(USER, text=" a ")
    left, right = (session.asks(USER, reply, Message("user", name)) for name in ("left", "right"))
    session.gets(right, "R")
    session.gets(left, "L")
    assert session.whys == ["first", "history cut", ""]
    assert all("\n a <" in row for row in session.rows()), "both read the sampled ids"
    assert len(session.lineage.sessions) == 2


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda said, more: (replace(SYSTEM, content="be long"), USER, said, more), "system changed"),
        (lambda said, more: (USER, said, more), "system changed"),
        (lambda said, more: (SYSTEM, USER, replace(said, content="other"), more), "reply edited"),
        (lambda said, more: (SYSTEM, USER, more), "history cut"),
        (lambda said, more: (SYSTEM, USER), "history cut"),
        (lambda said, more: (SYSTEM, Message("user", "8 x 9?"), said, more), "first"),
    ],
)  # fmt: skip
def test_what_a_client_changes_begins_a_row_for_a_stated_reason(change: Any, why: str) -> None:
    session = Session()
    said = session.says(SYSTEM, USER, text="forty two")
    session.says(*change(said, Message("user", "sure?")))
    assert session.whys == ["first", why]
    assert len(session.rows()) == 2


def test_other_tools_begin_a_row() -> None:
    session = Session()
    said = session.says(USER, tools=(ADD,))
    session.says(USER, said, Message("user", "more"), tools=(ADD, LOOK))
    assert session.whys == ["first", "tools changed"]


def test_thinking_that_does_not_come_back_begins_a_row_unless_it_is_kept() -> None:
    for keeps, whys in ((False, ["first", "thinking dropped", ""]), (True, ["first", "", ""])):
        session = Session(keeps_thinking=keeps)
        answer = session.gets(session.asks(USER), "<think>\nhm\n</think>\n\nforty two")
        assert (answer.thinking, answer.message.content) == ("hm", "forty two")
        said = session.says(USER, answer.message, Message("user", "sure?"), text="yes")
        session.says(USER, answer.message, Message("user", "sure?"), said, Message("user", "really?"))
        assert session.whys == whys
        session.rows()
    session = Session()
    answer = session.gets(session.asks(USER), "<think>\nhm\n</think>\n\nforty two")
    session.says(USER, answer.message, Message("user", "sure?"), thinking={1: "hm"})
    assert session.whys == ["first", ""], "it came back"


def test_a_row_whose_call_was_lost_is_not_gone_on_with() -> None:
    session = Session()
    said = session.says(USER)
    session.asks(USER, said, Message("user", "lost"))
    session.says(USER, said, Message("user", "again"))
    assert session.whys == ["first", "history cut"]
    assert "lost" not in "".join(session.rows())


@pytest.mark.parametrize("client", sorted(set(RECORDED) - {"openai_responses_previous"}))  # which sends no history
def test_what_real_clients_send_back_is_one_row_for_all_but_those_that_rewrite(client: str) -> None:
    session = Session()
    replies = [*RECORDED[client]["replies"], ["The end.", []]]
    sent = [exchange(request["path"], request["body"]).call for request in RECORDED[client]["requests"]]
    for call, after, (text, calls) in zip(sent, [*sent[1:], None], replies, strict=True):
        thought = after.thinking.get(len(call.messages)) if after else None  # the reply had it, and the client sent it back
        made = [f"<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n</tool_call>" for name, given in calls]
        said = "\n".join([*([text] if text else []), *made])
        session.gets(
            (session.lineage.place(call, 0.0), call.tools), f"<think>\n{thought}\n</think>\n\n{said}" if thought else said
        )
    rewritten = ["reply edited"] if client in REWRITES else [""] * (len(replies) - 1)
    assert session.whys == ["first", *rewritten]
    assert len(session.rows()) == len(set(session.whys) - {""})
    if client not in REWRITES:
        counts = Counter(name for _, calls in replies for name, _ in calls)
        assert session.trajectory.tool_counts == counts and all(turn.results for turn in session.trajectory.turns[:-1])


def test_messages_are_logged_once() -> None:
    session = Session()
    (place, _) = session.asks(SYSTEM, USER)
    assert place.new == [SYSTEM, USER]
    said = session.gets((place, ()), "a").message
    place, _ = session.asks(SYSTEM, USER, replace(said, content="b"), Message("user", "c"))
    assert place.new == [Message("user", "c")]


def test_a_reply_with_given_words_is_refused() -> None:
    with pytest.raises(Refused, match="the last message is one of the assistant"):
        Session().asks(USER, Message("assistant", "The answer is"))
