"""A model and an agent behind the endpoint's answerers: prompts, replies, limits, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from agentfly import ReactAgent, tool
from agentfly.endpoint.agent import open_agent
from agentfly.endpoint.calls import Answer, Asked, Call, Refused
from agentfly.endpoint.model import ModelAnswerer
from agentfly.endpoint.replies import Replies, Sayer
from agentfly.engines import open_engine
from agentfly.errors import ConfigError
from agentfly.testing import ScriptedEngine
from agentfly.types import Completion, Message, Sampling, ToolCall

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALLS = '<tool_call>\n{"name": "add", "arguments": {"b": 1, "a": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def pocket() -> Iterator[Any]:
    engine, renderer = open_engine("pocket")
    yield engine, renderer
    asyncio.run(engine.close())


def asks(*said: str, **fields: Any) -> Call:
    roles = ["assistant" if at % 2 else "user" for at in range(len(said))]
    return Call(dialect="chat", messages=tuple(map(Message, roles, said)), **fields)


def replies(engine: ScriptedEngine, *calls: Call, **options: Any) -> list[Answer]:
    async def main() -> list[Answer]:
        answerer = ModelAnswerer(engine, engine.renderer, **options)
        return [await answerer.answer(call) for call in calls]

    return asyncio.run(main())


def test_a_request_is_rendered_sampled_and_counted() -> None:
    engine = ScriptedEngine(["It is 3."], record=True)
    (answer,) = replies(engine, asks("2 + 1?", asked=Asked(temperature=0.5, max_tokens=9, seed=4, stop=("#",))))
    request = engine.requests[0]
    assert engine.renderer.decode(request.prompt_ids) == "<|im_start|>user\n2 + 1?<|im_end|>\n<|im_start|>assistant\n"
    sampling = request.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.seed, sampling.stop) == (0.5, 9, 4, ("#",))
    assert (answer.message, answer.finish) == (Message("assistant", "It is 3."), "stop")
    assert (answer.prompt_tokens, answer.completion_tokens) == (len(request.prompt_ids), 9)
    assert engine.released == [request.session]


def test_a_reply_may_fill_the_context_unless_a_run_says_how_long_it_is() -> None:
    engine = ScriptedEngine(lambda request: "a", max_context=100, record=True)
    replies(engine, asks("hi"), asks("hi", asked=Asked(max_tokens=5000)))
    replies(engine, asks("hi"), sampling=Sampling(max_tokens=7), fills_context=False)
    room = 100 - len(engine.requests[0].prompt_ids)
    assert [request.sampling.max_tokens for request in engine.requests] == [room, room, 7]
    with pytest.raises(Refused, match=r"the prompt has \d+ tokens and the context 100: send less"):
        replies(engine, asks("x" * 200))


def test_the_text_ends_before_a_stop_string() -> None:
    call = asks("hi", asked=Asked(stop=("</code>",)))
    (answer,) = replies(ScriptedEngine(["<code>x = 1</code> and more"]), call)
    assert answer.message.content == "<code>x = 1"
    assert answer.finish == "stop"


def read(text: str, renderer: Any, tools: Sequence[Any] = (), stop: Any = "stop") -> Answer:
    return Replies(renderer).read(Completion(text=text, stop=stop), tools, (), 5)


def test_calls_are_read_in_the_format_of_the_template(pocket: Any) -> None:
    answer = read(f"Look.\n{CALLS}\n{CALLS}", pocket[1], [ADD])
    assert (answer.message.content, answer.finish) == ("Look.", "tool_calls")
    assert [json.dumps(call.arguments) for call in answer.message.tool_calls] == ['{"b": 1, "a": 2}'] * 2
    assert len({call.id for call in answer.message.tool_calls}) == 2


def test_a_call_that_cannot_be_read_stays_text(pocket: Any) -> None:
    broken = '<tool_call>\n{"name": "add", "arguments": {"b": \n</tool_call>'
    answer = read(broken, pocket[1], [ADD])
    assert (answer.message.content, answer.message.tool_calls, answer.finish) == (broken, (), "stop")
    assert read(CALLS, pocket[1]).message.content == CALLS  # no tools were offered


def test_thinking_is_told_apart_from_the_text(pocket: Any) -> None:
    for text, thought, said in (
        ("<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("Hm.\n</think>\nYes.", "Hm.", "Yes."),
        ("<think>Hm", "Hm", ""),
        ("Yes.", "", "Yes."),
    ):
        answer = read(text, pocket[1])
        assert (answer.thinking, answer.message.content) == (thought, said)
    assert read(f"<think>I call {CALLS}</think>No.", pocket[1], [ADD]).message == Message("assistant", "No.")


def test_thinking_that_comes_back_stands_in_its_place(pocket: Any) -> None:
    call = asks("a", "b", "c", thinking={1: "hm"})
    assert [message.content for message in Replies(pocket[1]).with_thinking(call)] == ["a", "<think>\nhm\n</think>\n\nb", "c"]


def test_a_conversation_with_tools_is_rendered_by_the_template(pocket: Any) -> None:
    engine, renderer = pocket

    async def main() -> tuple[int, Answer]:
        answerer = ModelAnswerer(engine, renderer)
        said = Message("assistant", "", (ToolCall("add", {"a": 1, "b": 2}, "c1"),))
        result = Message("tool", "3", name="add", tool_call_id="c1")
        call = Call(dialect="chat", messages=(Message("user", "1+2?"), said, result), tools=(ADD,), asked=Asked(max_tokens=4))
        return await answerer.count(call), await answerer.answer(call)

    counted, answer = asyncio.run(main())
    assert answer.prompt_tokens == counted > 20
    assert answer.completion_tokens <= 4


def test_what_the_template_refuses_is_the_clients_mistake(pocket: Any) -> None:
    odd = Call(dialect="chat", messages=(Message("user", "hi", images=("x",)),))
    with pytest.raises(Refused, match="a tokenizer renders text alone"):
        asyncio.run(ModelAnswerer(*pocket).answer(odd))


def test_a_model_behind_another_server_is_passed_on() -> None:
    engine = ScriptedEngine(["hello"], reads="messages", record=True)
    answerer = ModelAnswerer(engine, None)
    answer = asyncio.run(answerer.answer(asks("hi")))
    assert (answer.message.content, [*engine.requests[0].messages]) == ("hello", [Message("user", "hi")])
    with pytest.raises(Refused, match="does not count"):
        asyncio.run(answerer.count(asks("hi")))


# ---- agents --------------------------------------------------------------------------------------------------------------


@tool(name="double", register=False)
def double(number: int) -> int:
    """Double a number."""
    return 2 * number


@tool(name="peek", register=False, inject=("answer",))
def peek(answer: str) -> str:
    """Tell the answer."""
    return answer


def agent_of(engine: ScriptedEngine, **options: Any) -> ReactAgent:
    return ReactAgent(engine, tools=[double], renderer=engine.renderer, reward="exact_match", **options)


def play(agent: ReactAgent, *calls: Call) -> list[Answer]:
    async def main() -> list[Answer]:
        async with open_agent(agent, Sampling(max_tokens=50)) as answerer:
            assert await answerer.count(asks("hi")) > len("hi")
            return list(await asyncio.gather(*(answerer.answer(call) for call in calls)))

    return asyncio.run(main())


def test_an_agent_plays_a_chain_with_its_tools_and_says_its_answer() -> None:
    engine = ScriptedEngine(['Action: double\nInput: {"number": 21}', "Thought: done\nAnswer: 42"], record=True)
    calls = [asks("Hello", "Hi.", "Double 21?"), asks("Double 21?", asked=Asked(temperature=0.0, max_tokens=40))]
    answers = play(agent_of(engine), *calls)
    assert [answer.message for answer in answers] == [Message("assistant", "42")] * 2
    first = next(request for request in engine.requests if len(request.messages) == 4)
    assert answers[0].prompt_tokens == len(first.prompt_ids)
    assert answers[0].completion_tokens == answers[1].completion_tokens > 40
    assert {request.sampling.temperature for request in engine.requests} == {0.0, 1.0}
    assert any("Observation: 42" in message.content for request in engine.requests for message in request.messages)


def test_an_agent_that_reaches_a_limit_says_so() -> None:
    engine = ScriptedEngine(lambda request: 'Action: double\nInput: {"number": 21}')
    (answer,) = play(agent_of(engine, max_turns=2), asks("Double 21?"))
    assert answer.finish == "length"


def test_an_agent_takes_no_tools_of_others() -> None:
    engine = ScriptedEngine(["Answer: 1"])
    for call, sentence in (
        (asks("hi", tools=(ADD,)), "has its own tools"),
        (asks("hi", asked=Asked(stop=("x",))), "stop is not supported"),
        (Call(dialect="chat", messages=(Message("user", "a"), Message("tool", "1"))), "no calls and results"),
    ):
        with pytest.raises(Refused, match=sentence):
            play(agent_of(engine), call)


def test_a_tool_that_needs_a_task_cannot_be_served() -> None:
    engine = ScriptedEngine(["Answer: 1"])
    agent = ReactAgent(engine, tools=[peek], renderer=engine.renderer)
    with pytest.raises(ConfigError, match="the tool 'peek' needs the field 'answer' of a task"):
        play(agent, asks("hi"))


# ---- streams -------------------------------------------------------------------------------------------------------------


def told(*pieces: str) -> tuple[str, bool]:
    """What a listener hears of a reply with these pieces, and whether it hears any."""
    heard: list[str] = []
    sayer = Sayer(heard.append, ("<think>",))
    for piece in pieces:
        sayer.hear(piece)
    return "".join(heard), sayer.begun


def test_a_reply_is_told_as_it_is_sampled_unless_it_begins_with_thinking() -> None:
    assert told("It", " is 3.") == ("It is 3.", True)
    assert told("\n", "<", "b>bold") == ("\n<b>bold", True)
    assert told("\n<", "thi", "nk>hm</think>", "Yes.") == ("", False)
    assert told("<th") == ("", False)


def test_what_was_told_is_the_beginning_of_the_answer(pocket: Any) -> None:
    heard: list[str] = []
    call = asks("What is 12 times 7?", asked=Asked(temperature=0.0, max_tokens=24), on_text=heard.append)
    answer = asyncio.run(ModelAnswerer(*pocket).answer(call))
    assert answer.message.content and answer.message.content.startswith("".join(heard))
    assert len(heard) > 1
    for whole in (asks("hi", tools=(ADD,), on_text=heard.append), asks("hi", asked=Asked(stop=("x",)), on_text=heard.append)):
        assert Replies(pocket[1]).sayer(whole, Sampling(stop=whole.asked.stop)) is None


def test_text_that_was_told_is_not_taken_back_as_thinking(pocket: Any) -> None:
    completion = Completion(text="Yes. </think> No.")
    assert Replies(pocket[1]).read(completion, (), (), 1, said=True).message.content == "Yes. </think> No."
    assert Replies(pocket[1]).read(completion, (), (), 1).message.content == " No."
