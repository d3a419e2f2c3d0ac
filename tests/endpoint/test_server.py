"""The endpoint over real connections on loopback: keys, errors in the client's shape, streams, disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'agentfly[serve]'")

from agentfly.endpoint.calls import Closed, Refused
from agentfly.endpoint.server import EndpointServer, Keys
from agentfly.errors import EngineError

from .scripted import Scripted, says
from .test_dialects import read_events

DEADLINE_S = 240.0
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
}
Body = Callable[[EndpointServer, httpx.AsyncClient, Keys], Awaitable[Any]]


def serve(answerer: Scripted, body: Body, **options: Any) -> Any:
    """Run `body` with a server and a client that has the answerer's key."""

    async def main() -> Any:
        keys = Keys()
        headers = {"Authorization": f"Bearer {keys.open(answerer)}"}
        async with (
            asyncio.timeout(DEADLINE_S),
            EndpointServer(keys, **options) as server,
            httpx.AsyncClient(base_url=server.url, headers=headers, trust_env=False, timeout=60) as client,
        ):
            return await body(server, client, keys)

    return asyncio.run(main())


def message_of(path: str, answer: httpx.Response) -> str:
    """The sentence of an error, in the shape of the vendor whose dialect the path is."""
    body = answer.json()
    if path.startswith(MESSAGES):
        assert body["type"] == "error" and set(body["error"]) == {"type", "message"}
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    return str(body["error"]["message"])


@pytest.mark.parametrize("path", BODIES)
def test_a_key_comes_in_either_header_and_a_wrong_one_is_refused(path: str) -> None:
    async def body(server: EndpointServer, client: httpx.AsyncClient, keys: Keys) -> None:
        key = keys.open(Scripted(says("other")))
        assert (await client.post(path, json=BODIES[path])).status_code == 200
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as bare:
            assert (await bare.post(path, json=BODIES[path], headers={"x-api-key": key})).status_code == 200
            for headers in ({}, {"x-api-key": key[:-1]}, {"Authorization": "Bearer"}, {"Authorization": f"Basic {key}"}):
                refused = await bare.post(path, json=BODIES[path], headers=headers)
                assert refused.status_code == 401
                assert "key is missing or wrong" in message_of(path, refused)
        keys.close(key)
        refused = await client.post(path, json=BODIES[path], headers={"Authorization": f"Bearer {key}"})
        assert refused.status_code == 401

    serve(Scripted(says("hello")), body)


def test_nothing_of_one_key_is_read_with_another() -> None:
    async def body(server: EndpointServer, client: httpx.AsyncClient, keys: Keys) -> None:
        first = (await client.post(RESPONSES, json={"input": "secret"})).json()["id"]
        other = {"Authorization": f"Bearer {keys.open(Scripted(says('x')))}"}
        asked = {"input": "what was it?", "previous_response_id": first}
        refused = await client.post(RESPONSES, json=asked, headers=other)
        assert refused.status_code == 400 and "of this key" in message_of(RESPONSES, refused)
        assert (await client.post(RESPONSES, json=asked)).status_code == 200
        unstored = (await client.post(RESPONSES, json={"input": "a", "store": False})).json()["id"]
        refused = await client.post(RESPONSES, json={"input": "b", "previous_response_id": unstored})
        assert refused.status_code == 400

    answerer = Scripted(says("noted"))
    serve(answerer, body)
    assert [message.content for message in answerer.calls[1].messages] == ["secret", "noted", "what was it?"]


@pytest.mark.parametrize(("path", "status"), [(CHAT, 401), (RESPONSES, 400), (MESSAGES, 403)])
@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_chain_ends_a_client_at_its_first_request(path: str, status: int, stream: bool) -> None:
    async def body(server: EndpointServer, client: httpx.AsyncClient, keys: Keys) -> None:
        refused = await client.post(path, json={**BODIES[path], "stream": stream})
        assert (refused.status_code, message_of(path, refused)) == (status, "the chain has ended")
        assert refused.headers["x-should-retry"] == "false"

    serve(Scripted(Closed("the chain has ended")), body)


@pytest.mark.parametrize("path", BODIES)
def test_errors_have_the_shape_that_the_client_reads(path: str, caplog: pytest.LogCaptureFixture) -> None:
    script = [Refused(400, "too hot"), EngineError("no memory"), RuntimeError("a secret of the server")]

    async def body(server: EndpointServer, client: httpx.AsyncClient, keys: Keys) -> None:
        found = [await client.post(path, json=BODIES[path]) for _ in script]
        sentences = [(each.status_code, message_of(path, each)) for each in found]
        assert sentences == [
            (400, "too hot"),
            (500, "the model gave no reply: no memory"),
            (500, "the server failed; its log says how"),
        ]
        broken = await client.post(path, content=b'{"messages": ')
        assert broken.status_code == 400 and "not a JSON object" in message_of(path, broken)
        large = await client.post(path, content=b"x" * 2001)
        assert large.status_code == 413 and "2000 bytes" in message_of(path, large)
        assert (await client.get(path)).status_code == 405
        page = await client.post(path, json=BODIES[path], headers={"Origin": "http://evil.example"})
        assert page.status_code == 403 and "other origins" in message_of(path, page)
        name = await client.post(path, json=BODIES[path], headers={"Host": "evil.example"})
        assert name.status_code == 403

    serve(Scripted(*script), body, max_body=2000)
    assert "a secret of the server" in caplog.text


def test_a_wrong_base_address_is_explained() -> None:
    async def body(server: EndpointServer, client: httpx.AsyncClient, keys: Keys) -> list[str]:
        paths = ("/chat/completions", "/v1/v1/messages", "/v1/embeddings")
        return [message_of(path, await client.post(path, json={})) for path in paths]

    no_version, two_versions, unknown = serve(Scripted(says("x")), body)
    assert "ends in /v1" in no_version
    assert "has no /v1 at its end" in two_versions
    assert "/v1/chat/completions, /v1/responses" in unknown


def test_models_tokens_and_greetings_are_answered() -> None:
    async def body(server: EndpointServer, client: httpx.AsyncClient, keys: Keys) -> None:
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert (model["id"], model["object"], model["type"]) == ("tiny", "model", "model")
        assert (await client.get("/v1/models/any")).json()["id"] == "any"
        counted = await client.post(f"{MESSAGES}/count_tokens?beta=true", json={"messages": BODIES[MESSAGES]["messages"]})
        assert counted.json() == {"input_tokens": 2}
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as bare:
            assert [(await bare.head(path)).status_code for path in ("/", "/api/hello")] == [200, 200]
            assert (await bare.get("/v1/models")).status_code == 401

    serve(Scripted(says("x")), body, model="tiny")


@pytest.mark.parametrize("path", BODIES)
def test_a_silent_stream_is_kept_alive_by_events_that_the_client_counts(path: str) -> None:
    answerer = Scripted(says("late"))

    async def body(server: EndpointServer, client: httpx.AsyncClient, keys: Keys) -> bytes:
        answerer.gate = asyncio.Event()
        found, quiet = b"", {CHAT: b": waiting", RESPONSES: b"event: response.in_progress", MESSAGES: b"event: ping"}[path]
        async with client.stream("POST", path, json={**BODIES[path], "stream": True}) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            async for piece in answer.aiter_raw():
                found += piece
                if found.count(quiet) >= 3:
                    answerer.gate.set()
        return found

    found = serve(answerer, body, alive_s=0.01)
    assert b"late" in found
    names = [event.get("type") for event in read_events(found)]
    if path == CHAT:
        assert found.endswith(b"data: [DONE]\n\n")
    else:
        assert names[-1] == {RESPONSES: "response.completed", MESSAGES: "message_stop"}[path]
    if path == MESSAGES:
        assert next(name for name in names if name != "ping") == "message_start"


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_tells_the_text_before_the_answer_is_there(path: str) -> None:
    answerer = Scripted(says("Hello you."))

    async def body(server: EndpointServer, client: httpx.AsyncClient, keys: Keys) -> bytes:
        answerer.gate, found = asyncio.Event(), b""
        answerer.pieces = ["Hel", "lo"]
        async with client.stream("POST", path, json={**BODIES[path], "stream": True}) as answer:
            async for piece in answer.aiter_raw():
                found += piece
                if b"lo" in found:  # so the answer comes after its beginning has been read
                    answerer.gate.set()
        return found

    found = serve(answerer, body)
    assert found.count(b"Hel") == (1 if path == CHAT else 1 if path == MESSAGES else 5)
    assert b" you." in found
    if path == RESPONSES:
        numbers = [event["sequence_number"] for event in read_events(found)]
        assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("path", BODIES)
def test_a_failure_after_a_stream_has_begun_is_an_event(path: str) -> None:
    answerer = Scripted(EngineError("no memory"))

    async def body(server: EndpointServer, client: httpx.AsyncClient, keys: Keys) -> bytes:
        answerer.gate = asyncio.Event()
        async with client.stream("POST", path, json={**BODIES[path], "stream": True}) as answer:
            answerer.gate.set()
            return b"".join([piece async for piece in answer.aiter_raw()])

    last = read_events(serve(answerer, body, alive_s=0.0))[-1]
    error = last["response"]["error"] if path == RESPONSES else last["error"]
    assert error["message"] == "the model gave no reply: no memory"
    assert last.get("type") == {CHAT: None, RESPONSES: "response.failed", MESSAGES: "error"}[path]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_its_call(stream: bool) -> None:
    answerer = Scripted(says("x"))

    async def body(server: EndpointServer, client: httpx.AsyncClient, keys: Keys) -> None:
        answerer.gate = asyncio.Event()
        asking = asyncio.create_task(client.post(CHAT, json={**BODIES[CHAT], "stream": stream}))
        await answerer.waiting.wait()
        asking.cancel()
        await asyncio.wait([asking])
        while not answerer.cancelled:
            await asyncio.sleep(0.005)
        answerer.gate.set()
        assert (await client.post(CHAT, json=BODIES[CHAT])).status_code == 200

    serve(answerer, body)


def test_the_server_ends_the_calls_that_wait_when_it_closes() -> None:
    answerer = Scripted(says("x"))

    async def body(server: EndpointServer, client: httpx.AsyncClient, keys: Keys) -> None:
        answerer.gate = asyncio.Event()
        asking = asyncio.create_task(client.post(CHAT, json=BODIES[CHAT]))
        await answerer.waiting.wait()
        await server.close()
        await server.close()
        refused = await asking
        assert refused.status_code == 401 and "the server stops" in message_of(CHAT, refused)

    serve(answerer, body)
    assert answerer.cancelled == 1


def test_one_key_takes_no_more_calls_at_once_than_allowed() -> None:
    answerer = Scripted(says("x"))

    async def body(server: EndpointServer, client: httpx.AsyncClient, keys: Keys) -> None:
        answerer.gate = asyncio.Event()
        asking = [asyncio.create_task(client.post(CHAT, json=BODIES[CHAT])) for _ in range(2)]
        while len(answerer.calls) < 2:
            await asyncio.sleep(0.005)
        refused = await client.post(CHAT, json=BODIES[CHAT])
        assert refused.status_code == 429 and "2 requests of this key" in message_of(CHAT, refused)
        other = keys.open(Scripted(says("y")))
        assert (await client.post(CHAT, json=BODIES[CHAT], headers={"Authorization": f"Bearer {other}"})).status_code == 200
        answerer.gate.set()
        assert [each.status_code for each in await asyncio.gather(*asking)] == [200, 200]

    serve(answerer, body, max_in_flight=2)


def test_a_call_says_whether_it_repeats_another_and_who_asks() -> None:
    answerer = Scripted(says("x"))

    async def body(server: EndpointServer, client: httpx.AsyncClient, keys: Keys) -> None:
        for headers in ({}, {"x-stainless-retry-count": "1"}, {"x-claude-code-agent-id": "helper"}, {"thread-id": "main"}):
            await client.post(CHAT, json=BODIES[CHAT], headers=headers)

    serve(answerer, body)
    assert [call.is_retry for call in answerer.calls] == [False, True, False, False]
    assert [call.agent for call in answerer.calls] == ["", "", "helper", ""]
    assert len({call.digest for call in answerer.calls}) == 1


def test_many_chains_are_answered_at_once() -> None:
    async def body(server: EndpointServer, client: httpx.AsyncClient, keys: Keys) -> set[int]:
        opened = [keys.open(Scripted(says(str(number)))) for number in range(100)]

        async def ask(number: int) -> str:
            headers = {"Authorization": f"Bearer {opened[number]}"}
            answer = await client.post(CHAT, json=BODIES[CHAT], headers=headers)
            return str(answer.json()["choices"][0]["message"]["content"])

        return list(await asyncio.gather(*map(ask, range(100))))

    assert serve(Scripted(says("x")), body) == [str(number) for number in range(100)]


def test_the_engine_for_chat_servers_is_a_client_of_it() -> None:
    from agentfly.engines.openai import OpenAIEngine
    from agentfly.types import Message, Request, Sampling

    answerer = Scripted(says("Look.", ("add", {"b": 1, "a": 2})), says("It is 3."))
    tool = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}

    async def body(server: EndpointServer, client: httpx.AsyncClient, keys: Keys) -> None:
        heard: list[str] = []
        engine = OpenAIEngine("m", base_url=server.base_url, api_key=client.headers["authorization"][7:])
        await engine.check_alive()
        sampling = Sampling(temperature=0.5, max_tokens=7, min_p=0.1)
        first = await engine.generate(Request([], sampling, messages=[Message("user", "2+1?")], tools=[tool]))
        assert (first.text, first.tool_calls[0].arguments, first.prompt_tokens) == ("Look.", {"b": 1, "a": 2}, 11)
        second = await engine.generate(Request([], sampling, messages=[Message("user", "?")], on_text=heard.append))
        assert (second.text, "".join(heard)) == ("It is 3.", "It is 3.")
        await engine.close()

    serve(answerer, body)
    asked = answerer.calls[0].asked
    assert (asked.temperature, asked.max_tokens, asked.min_p) == (0.5, 7, 0.1)
    assert answerer.calls[0].tools == (tool,)


def test_a_body_can_be_sent_in_any_encoding_of_json() -> None:
    async def body(server: EndpointServer, client: httpx.AsyncClient, keys: Keys) -> None:
        text = json.dumps({"messages": [{"role": "user", "content": "é\ud83d"}]})
        await client.post(CHAT, content=text.encode())

    answerer = Scripted(says("x"))
    serve(answerer, body)
    assert answerer.calls[0].messages[0].content == "é\ufffd"


def test_a_call_that_is_repeated_after_the_engine_failed_ends_the_client() -> None:
    """The first reads 500, as clients expect; they repeat it, and 401 ends them."""
    from agentfly import OutsideAgent
    from agentfly.agents.outside import Llm
    from agentfly.testing import ByteRenderer, ScriptedEngine
    from agentfly.types import Outcome, Task

    statuses: list[int] = []

    async def function(task: Task, llm: Llm) -> str:
        headers = {"Authorization": f"Bearer {llm.api_key}"}
        async with httpx.AsyncClient(base_url=llm.base_url, headers=headers, trust_env=False, timeout=60) as client:
            statuses.extend([(await client.post("/chat/completions", json=BODIES[CHAT])).status_code for _ in range(2)])
        return "done"

    engine = ScriptedEngine([EngineError("out of memory")], record=True)
    agent = OutsideAgent(engine, function, parser="hermes", renderer=ByteRenderer(), reward="exact_match")
    (chain,) = agent.run_sync([{"question": "hi", "answer": "x"}]).trajectories
    assert (chain.outcome, statuses, len(engine.requests)) == (Outcome.WORLD_FAILURE, [500, 401], 1)
