"""Answers of a chat server that are not what they should be end one chain, never the run."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from agentfly import ReactAgent
from agentfly.engines.openai import OpenAIEngine
from agentfly.engines.openai_wire import MAX_CALLS, ChatStream, from_answer
from agentfly.errors import EngineError
from agentfly.net.json_body import MAX_MARKS, load_json

from .fake_server import chat_server, said

CONTENTS: list[Any] = [5, 1.5, True, {"text": "x"}, [5], [{"type": "text"}], [{"type": "text", "text": 3}], [[]]]


def answer(message: Any, **choice: Any) -> bytes:
    return json.dumps({"choices": [{"message": message, **choice}]}).encode()


def call(**function: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}", **function}}


@pytest.mark.parametrize("content", CONTENTS, ids=str)
def test_content_that_is_no_text_is_an_engine_error(content: Any) -> None:
    with pytest.raises(EngineError, match="not a chat completion"):
        from_answer(answer({"content": content}))
    with pytest.raises(EngineError, match="not a chat completion"):
        ChatStream(lambda text: None).line("data: " + json.dumps({"choices": [{"delta": {"content": content}}]}))


@pytest.mark.parametrize(
    "message",
    [
        {"tool_calls": 5},
        {"tool_calls": {"a": 1}},
        {"tool_calls": [5]},
        {"tool_calls": [{}]},
        {"tool_calls": [call(name=5)]},
        {"tool_calls": [call(name=["add"])]},
        {"tool_calls": [call(arguments=[1])]},
        {"tool_calls": [{**call(), "id": 7}]},
        "text",
        None,
        [],
    ],
    ids=str,
)
def test_messages_of_another_shape_are_engine_errors(message: Any) -> None:
    with pytest.raises(EngineError):
        from_answer(answer(message))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"choices": []}',
        b'{"choices": 3}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"choices":[null]}',
        b"1" * 5_000,
    ],
    ids=lambda body: repr(body[:20]),
)
def test_bodies_of_another_shape_are_engine_errors(body: bytes) -> None:
    with pytest.raises(EngineError):
        from_answer(body)


def test_parts_and_object_arguments_are_read_as_servers_send_them() -> None:
    parts = [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]
    done = from_answer(answer({"content": parts, "tool_calls": [call(arguments={"a": 1})]}, finish_reason="tool_calls"))
    assert (done.text, done.tool_calls[0].arguments) == ("42", {"a": 1})


def test_half_a_surrogate_pair_is_replaced() -> None:
    done = from_answer(b'{"choices": [{"message": {"content": "a\\ud800b"}}]}')
    assert done.text.encode() == "a\ufffdb".encode()


def test_a_reply_has_a_limited_number_of_calls() -> None:
    done = from_answer(answer({"tool_calls": [call()] * 5_000}))
    assert len(done.tool_calls) == MAX_CALLS + 1
    assert "only the first" in (done.tool_calls[-1].error or "")


@pytest.mark.parametrize("value", ["[]", "{}", "1", '"a"', '{"a":1}'])
def test_the_largest_json_that_is_parsed_does_not_hold_the_loop_up(value: str) -> None:
    most = MAX_MARKS // (1 + value.count("{") + value.count("["))
    inside = ("[" + ",".join([value] * (most - 1)) + "]").encode()
    best = min(_seconds(inside) for _ in range(5))
    assert best < 0.5  # of processor time, whatever else runs; 0.05 on a quiet core
    beyond = ("[" + ",".join([value] * (MAX_MARKS + 1)) + "]").encode()
    with pytest.raises(ValueError, match="values"):
        load_json(beyond)


def _seconds(data: bytes) -> float:
    began = time.thread_time()
    load_json(data)
    return time.thread_time() - began


def test_a_malformed_answer_ends_one_chain_and_the_others_go_on() -> None:
    bad = {"choices": [{"message": {"content": {"not": "text"}}, "finish_reason": "stop"}]}
    with chat_server(bad, said("Answer: 4")) as server:
        engine = OpenAIEngine("m", base_url=server.url, api_key="k", retry_s=0.001)
        trajectories = list(ReactAgent(engine).run_sync([{"question": "q"}], num_chains=2, max_concurrency=1))
    assert [each.outcome for each in trajectories] == ["world_failure", "finished"]
    assert "not a chat completion" in (trajectories[0].error or "")


def test_an_endless_line_of_a_stream_is_cut_off() -> None:
    from agentfly.net.client import HttpClient, Rejected

    async def main(url: str) -> None:
        client = HttpClient(url, max_body=1 << 16)
        try:
            with pytest.raises(Rejected, match="more than"):
                await anext(client.lines("POST", f"{url}/chat/completions", json={}))
        finally:
            await client.close()

    with chat_server((200, {}, "data: " + "x" * (1 << 20))) as server:
        asyncio.run(main(server.url))
