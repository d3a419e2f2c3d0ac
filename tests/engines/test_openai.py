"""The OpenAI engine against a small server on loopback."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from agentfly.engines import open_engine
from agentfly.engines.openai import OpenAIEngine
from agentfly.errors import ConfigError, EngineError
from agentfly.protocols import Engine
from agentfly.runs.bodies import packed
from agentfly.types import Completion, Message, Request, Sampling, Task, ToolCall, Trajectory, Turn
from agentfly.watch.metrics import rollout_metrics

from .fake_server import chat_server, piece, said

KEY = "sk-canary-4711"
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
HI = (Message("user", "hi"),)


def ask(url: str, request: Request | None = None, **options) -> Completion:
    async def main() -> Completion:
        engine = OpenAIEngine("m", base_url=url, **{"api_key": KEY, "retry_s": 0.001, "deadline_s": 20.0, **options})
        try:
            return await engine.generate(request or Request([], Sampling(), messages=HI))
        finally:
            await engine.close()

    return asyncio.run(main())


def test_it_is_an_engine_that_reads_messages():
    engine, renderer = open_engine("openai:m@http://127.0.0.1:9/v1", api_key="k", max_context=99)
    assert isinstance(engine, Engine)
    assert (engine.reads, engine.max_context, engine.base_url, renderer) == ("messages", 99, "http://127.0.0.1:9/v1", None)


def test_a_conversation_is_sent_and_the_reply_read():
    sampling = Sampling(temperature=0.5, top_p=0.9, max_tokens=7, stop=("X",), seed=3)
    with chat_server(said("hello", finish="length")) as server:
        done = ask(server.url, Request([1, 2], sampling, messages=(Message("system", "be kind"), *HI)))
    assert (done.text, done.stop, done.token_ids, done.tool_calls) == ("hello", "length", [], ())
    assert server.bodies[0] == {
        "model": "m",
        "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}],
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 7,
        "stop": ["X"],
        "seed": 3,
    }
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"


def test_tool_calls_go_both_ways():
    history = (
        *HI,
        Message("assistant", "", tool_calls=(ToolCall("add", {"a": 1}, "c1"),)),
        Message("tool", "2", name="add", tool_call_id="c1"),
    )
    answer = said(None, [("c2", "add", '{"a": 5}'), ("c3", "add", "{oops"), ("c4", "add", "[1]"), ("c5", "add", "")])
    with chat_server(answer) as server:
        done = ask(server.url, Request([], Sampling(), messages=history, tools=(ADD,)))
    body = server.bodies[0]
    assert body["tools"] == [ADD]
    assert body["messages"][1]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    ]
    assert body["messages"][2] == {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"}
    good, bad_json, bad_shape, empty = done.tool_calls
    assert good == ToolCall("add", {"a": 5}, "c2")
    assert "not JSON" in bad_json.error
    assert "must be a JSON object" in bad_shape.error
    assert empty == ToolCall("add", {}, "c5")
    assert done.text == ""


def test_calls_that_were_read_out_of_the_text_are_not_sent_twice():
    history = (
        *HI,
        Message("assistant", "Action: add", tool_calls=(ToolCall("add", {"a": 1}),)),
        Message("user", "Observation: 2"),
    )
    with chat_server(said("ok")) as server:
        ask(server.url, Request([], Sampling(), messages=history))
    assert server.bodies[0]["messages"][1] == {"role": "assistant", "content": "Action: add"}


def test_extensions_are_sent_only_where_set():
    with chat_server(said("a")) as server:
        ask(server.url, Request([], Sampling(top_k=5, min_p=0.1, stop_ids=(2,)), messages=HI), extra_body={"effort": "low"})
    body = server.bodies[0]
    assert (body["top_k"], body["min_p"], body["stop_token_ids"], body["effort"]) == (5, 0.1, [2], "low")


def test_images_are_sent_as_addresses_or_data():
    message = Message("user", "look", images=("http://x/y.png", b"png"))
    with chat_server(said("a")) as server:
        ask(server.url, Request([], Sampling(), messages=(message,)))
    urls = [part["image_url"]["url"] for part in server.bodies[0]["messages"][0]["content"][1:]]
    assert urls == ["http://x/y.png", "data:image/png;base64,cG5n"]


def stream(*lines: str) -> tuple[list[str], Completion, dict]:
    heard: list[str] = []
    with chat_server(list(lines)) as server:
        done = ask(server.url, Request([], Sampling(), messages=HI, tools=(ADD,), on_text=heard.append))
    return heard, done, server.bodies[0]


def test_a_streamed_reply_is_heard_piece_by_piece():
    heard, done, body = stream(
        piece({"role": "assistant"}),
        ": keep-alive",
        piece({"content": "hel"}),
        piece({"content": "lo"}),
        piece({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "add", "arguments": '{"a"'}}]}),
        piece({"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]}, "tool_calls"),
        'data: {"choices": [], "usage": {}}',
        "data: [DONE]",
    )
    assert heard == ["hel", "lo"]
    assert done.text == "hello"
    assert done.tool_calls == (ToolCall("add", {"a": 1}, "c"),)
    assert body["stream"] is True


@pytest.mark.parametrize("begun", [True, False])
def test_a_streamed_reply_that_is_cut_off_is_handed_over(begun: bool):
    """A limit of the chain or the turn cancels the call."""
    asked, kept = asyncio.Event(), []

    async def main(url: str) -> None:
        engine = OpenAIEngine("m", base_url=url, api_key=KEY)
        request = Request([], Sampling(), messages=HI, on_text=lambda text: asked.set(), on_cut=kept.append)
        call = asyncio.create_task(engine.generate(request))
        if begun:
            await asyncio.wait_for(asked.wait(), 60)
        else:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await engine.close()

    call = {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "add", "arguments": '{"a"'}}]}
    with chat_server([piece(call), piece({"content": "half a re"}), None]) as server:
        asyncio.run(main(server.url))
    assert kept == ([Completion(text="half a re", stop="length")] if begun else [])


def test_the_tokens_that_the_server_counted_are_recorded():
    usage = {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15}
    with chat_server({**said("a b c"), "usage": usage}) as server:
        whole = ask(server.url, Request([], Sampling(), messages=HI))
    chunk = "data: " + json.dumps({"choices": [], "usage": usage})
    _, streamed, _ = stream(piece({"content": "a b c"}, "stop"), chunk, "data: [DONE]")
    assert (whole.prompt_tokens, whole.reply_tokens, whole.num_sampled) == (12, 3, 3)
    assert (streamed.prompt_tokens, streamed.reply_tokens) == (12, 3)
    chain = Trajectory("0-0", Task("0", HI), turns=[Turn([], True, whole), Turn([], False, whole)])
    assert chain.num_sampled == 6
    assert rollout_metrics([chain], 2.0).items() >= {
        "rollout/tokens": 6.0, "rollout/tokens_per_s": 3.0, "rollout/prompt_tokens": 24.0, "rollout/reply_tokens": 3.0
    }.items()  # fmt: skip
    assert packed.decode(packed.encode(chain)).turns[0].completion == whole


@pytest.mark.parametrize("usage", [None, 3, {}, {"prompt_tokens": "12", "completion_tokens": -1}, {"completion_tokens": True}])
def test_a_server_that_counts_no_tokens_gives_a_reply_all_the_same(usage: Any):
    with chat_server({**said("a"), "usage": usage}) as server:
        done = ask(server.url, Request([], Sampling(), messages=HI))
    assert (done.text, done.prompt_tokens, done.num_sampled) == ("a", 0, 0)


def test_a_stream_that_ends_too_early_is_an_error():
    with pytest.raises(EngineError, match="ended before"):
        stream(piece({"content": "hel"}))


def test_a_stream_that_reports_an_error_is_an_error():
    with pytest.raises(EngineError, match="broke off: too hot"):
        stream(piece({"content": "hel"}), 'data: {"error": {"message": "too hot"}}')


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again(status):
    with chat_server((status, {}, "busy"), (status, {"Retry-After": "0"}, "busy"), said("there")) as server:
        assert ask(server.url).text == "there"
    assert len(server.bodies) == 3


def test_a_server_that_stays_busy_is_given_up_with_its_reason():
    busy = (500, {}, '{"error": {"message": "melting"}}')
    sentence = "failed 3 times, the last time: HTTP 500: melting"
    with chat_server(busy, busy, busy) as server, pytest.raises(EngineError, match=sentence):
        ask(server.url, max_retries=2)


def test_a_refusal_is_not_repeated_and_does_not_tell_the_key(caplog):
    caplog.set_level(logging.DEBUG)
    refusal = (401, {}, f'{{"error": {{"message": "bad key {KEY}"}}}}')
    with chat_server(refusal) as server, pytest.raises(EngineError, match=r"HTTP 401: bad key \*\*\*") as caught:
        ask(server.url)
    assert len(server.bodies) == 1
    engine = OpenAIEngine("m", base_url=server.url, api_key=KEY)
    assert KEY not in f"{caught.value!r} {engine!r} {caplog.text}"


def test_a_server_that_is_not_there_is_an_engine_error():
    with chat_server() as server:
        url = server.url
    with pytest.raises(EngineError, match="failed 2 times, the last time: ConnectError"):
        ask(url, max_retries=1)


def test_a_silent_server_is_given_up_at_the_deadline():
    with chat_server(30.0) as server, pytest.raises(EngineError, match=r"no reply within 0\.3 s"):
        ask(server.url, deadline_s=0.3)


@pytest.mark.parametrize("text", ["<html>", "[]", '{"choices": []}', '{"choices": [{"message": 3}]}'])
def test_an_answer_that_makes_no_sense_is_an_engine_error(text):
    with chat_server((200, {}, text)) as server, pytest.raises(EngineError, match="not a chat completion"):
        ask(server.url)


def test_a_listener_that_raises_is_heard():
    def listener(text):
        raise ValueError("no ears")

    with chat_server([piece({"content": "a"}), "data: [DONE]"]) as server, pytest.raises(ValueError, match="no ears"):
        ask(server.url, Request([], Sampling(), messages=HI, on_text=listener))


def test_one_engine_serves_several_event_loops():
    with chat_server(said("a"), said("b")) as server:
        engine = OpenAIEngine("m", base_url=server.url)
        texts = [asyncio.run(engine.generate(Request([], Sampling(), messages=HI))).text for _ in range(2)]
    assert texts == ["a", "b"]


def test_the_key_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-env")
    with chat_server(said("a")) as server:
        ask(server.url, api_key=None)
    assert server.headers[0]["Authorization"] == "Bearer sk-env"


def test_a_server_that_wants_no_key_gets_none(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with chat_server(said("a")) as server:
        ask(server.url, api_key=None)
    assert "Authorization" not in server.headers[0]


@pytest.mark.parametrize("url", ["ftp://x/v1", "localhost:80", "http://user:pa55@host/v1"])
def test_an_address_that_is_none_is_refused_without_repeating_it(url):
    with pytest.raises(ConfigError, match="base_url must be an address like") as caught:
        OpenAIEngine("m", base_url=url)
    assert "pa55" not in str(caught.value)


@pytest.mark.parametrize("name", ["openai:", "openai:@http://x/v1"])
def test_a_model_must_be_named(name):
    with pytest.raises(ConfigError, match="needs a model"):
        open_engine(name)


def test_a_request_without_messages_is_refused():
    with pytest.raises(EngineError, match="needs messages"):
        ask("http://127.0.0.1:9/v1", Request([1], Sampling()))
