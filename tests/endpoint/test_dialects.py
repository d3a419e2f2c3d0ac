"""Requests as clients send them become calls, and answers come back in their shape.

`requests.json` holds what real clients sent for a scripted conversation, its long texts replaced by their length: openai 3.51,
anthropic 2.10, smolagents 1.26, langgraph 1.2 with langchain-openai 1.7, openai-agents 0.24, pydantic-ai 2.68, Codex 0.169 and
Claude Code 2.1.327.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentfly.endpoint.calls import Call, Refused
from agentfly.endpoint.chat import ChatExchange
from agentfly.endpoint.messages import MessagesExchange
from agentfly.endpoint.responses import ItemHistory, ResponsesExchange
from agentfly.endpoint.wire import Exchange, read_body
from agentfly.types import Message, ToolCall

from .scripted import says

RECORDED = json.loads((Path(__file__).parent / "requests.json").read_text(encoding="utf-8"))
REWRITES = ("smolagents", "smol_code")  # clients that send a reply back with other text
ADD = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def exchange(path: str, body: dict[str, Any], stored: dict[str, ItemHistory] | None = None) -> Exchange:
    read = read_body(json.dumps(body).encode())
    if path == "/v1/chat/completions":
        return ChatExchange(read)
    if path == "/v1/responses":
        return ResponsesExchange(read, (stored or {}).get)
    return MessagesExchange(read)


def chat(**fields: Any) -> Call:
    return exchange("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **fields}).call


def responses(**fields: Any) -> Call:
    return exchange("/v1/responses", {"input": "hi", **fields}).call


def messages(**fields: Any) -> Call:
    return exchange("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, **fields}).call


DIALECTS = {"chat": chat, "responses": responses, "messages": messages}


def canonical(message: Message) -> tuple[str, str, list[tuple[str, str]]]:
    return message.role, message.content, [(call.name, json.dumps(call.arguments)) for call in message.tool_calls]


@pytest.mark.parametrize("client", RECORDED)
def test_a_client_sends_its_history_and_our_replies_back(client: str) -> None:
    """What was sent before comes back unchanged, then our reply, then one result per call in the order of the calls."""
    replies, stored, calls = RECORDED[client]["replies"], {}, []
    for number, request in enumerate(RECORDED[client]["requests"]):
        made = exchange(request["path"], request["body"], stored)
        calls.append(made.call)
        if isinstance(made, ResponsesExchange) and number < len(replies):
            name = json.loads(json.dumps(RECORDED[client]["requests"][number + 1]["body"])).get("previous_response_id")
            ids = [item["call_id"] for item in RECORDED[client]["requests"][number + 1]["body"]["input"] if "output" in item]
            text, wanted = replies[number]
            reply = Message("assistant", text, tuple(ToolCall(*call, id) for call, id in zip(wanted, ids, strict=False)))
            if name is not None:
                stored[name] = ItemHistory([*made.history.messages, reply])
    assert len(calls) == len(replies) + 1
    for before, now, (text, wanted) in zip(calls[:-1], calls[1:], replies, strict=True):
        at = len(before.messages)
        assert list(map(canonical, now.messages[:at])) == list(map(canonical, before.messages))
        assert now.tools == before.tools
        if client in REWRITES:
            assert now.messages[at].role == "assistant" and now.messages[at].content.startswith(text)
            continue
        assert canonical(now.messages[at]) == ("assistant", text, [(name, json.dumps(given)) for name, given in wanted])
        results = now.messages[at + 1 :]
        assert [each.role for each in results] == ["tool"] * len(wanted)
        assert [each.tool_call_id for each in results] == [call.id for call in now.messages[at].tool_calls]
        assert [each.name for each in results] == [name for name, _ in wanted]


def test_every_client_that_returns_thinking_has_it_read() -> None:
    returned = {client for client, recorded in RECORDED.items() if exchange_of_last(recorded).thinking}
    dropped = set(RECORDED) - returned
    lost = {"langgraph", "langgraph_stream", "openai_agents_chat", "openai_responses_previous", *REWRITES}
    assert dropped == lost


def exchange_of_last(recorded: dict[str, Any]) -> Call:
    last = recorded["requests"][-1]
    stored = {name: ItemHistory() for name in [last["body"].get("previous_response_id")] if name}
    return exchange(last["path"], last["body"], stored).call


def test_system_messages_at_the_beginning_are_one_and_later_ones_stay() -> None:
    told = [{"role": "system", "content": "a"}, {"role": "developer", "content": [{"type": "text", "text": "b"}]}]
    later = [{"role": "user", "content": "c"}, {"role": "system", "content": "d"}]
    wanted = (Message("system", "a\n\nb"), Message("user", "c"), Message("system", "d"))
    assert chat(messages=[*told, *later]).messages == wanted
    blocks = [{"type": "text", "text": "x-anthropic-billing-header: cch=77"}, {"type": "text", "text": "a"}]
    assert messages(system=[*blocks, {"type": "text", "text": "b"}], messages=later).messages == wanted
    assert responses(instructions="a", input=[told[1], *later]).messages == wanted


def test_the_order_of_arguments_stays() -> None:
    call = {"id": "c", "function": {"name": "add", "arguments": '{"z": 1, "a": {"y": 2, "b": 3}}'}}
    history = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    made = chat(messages=[*history, {"role": "tool", "tool_call_id": "c", "content": "1"}]).messages[1].tool_calls[0]
    assert json.dumps(made.arguments) == '{"z": 1, "a": {"y": 2, "b": 3}}'
    whole = exchange("/v1/chat/completions", {"messages": history[:1]}).whole(says("", ("add", made.arguments)), "m")
    assert whole["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"z": 1, "a": {"y": 2, "b": 3}}'


def test_halves_of_characters_are_replaced_before_anything_reads_them() -> None:
    assert read_body(b'{"a\\ud800": ["\\udc00", "\\ud83d\\ude00"]}') == {"a\ufffd": ["\ufffd", "\U0001f600"]}


def test_a_call_to_a_tool_in_a_namespace_names_both() -> None:
    space = {"type": "namespace", "name": "crew", "tools": [{"type": "function", "name": "spawn", "parameters": {}}]}
    made = exchange("/v1/responses", {"input": "hi", "tools": [space, {"type": "web_search"}]})
    assert [tool["function"]["name"] for tool in made.call.tools] == ["crew__spawn"]
    (item,) = made.whole(says("", ("crew__spawn", {"n": 1})), "m")["output"]
    assert (item["namespace"], item["name"]) == ("crew", "spawn")
    again = exchange("/v1/responses", {"input": [{"role": "user", "content": "hi"}, item, output(item["call_id"])]}).call
    assert again.messages[1].tool_calls[0].name == "crew__spawn"


def output(id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": id, "output": "1"}


def test_tool_choice_none_leaves_the_tools_out() -> None:
    assert chat(tools=[{"type": "function", "function": ADD}], tool_choice="none").tools == ()
    assert responses(tools=[{"type": "function", **ADD}], tool_choice="none").tools == ()
    assert messages(tools=[{"name": "add", "input_schema": {}}], tool_choice={"type": "none"}).tools == ()


def test_sampling_is_what_the_client_asks_for() -> None:
    given = {"temperature": 0, "top_p": 0.5, "top_k": 3, "seed": 7}
    made = chat(**given, max_completion_tokens=5, stop="x").asked
    assert (made.temperature, made.top_p, made.top_k, made.seed, made.max_tokens, made.stop) == (0, 0.5, 3, 7, 5, ("x",))
    assert messages(stop_sequences=["x", "y"]).asked.stop == ("x", "y")
    assert responses(max_output_tokens=4).asked.max_tokens == 4
    assert chat().asked.temperature is None


BAD = [
    ("chat", {"messages": None}, "messages is missing"),
    ("chat", {"messages": "hi"}, "messages must be a list"),
    ("chat", {"messages": []}, "no message to reply to"),
    ("chat", {"messages": ["hi"]}, "messages must be a list of objects"),
    ("chat", {"messages": [{"content": "hi"}]}, "role is missing"),
    ("chat", {"messages": [{"role": "robot", "content": "hi"}]}, "the role 'robot' is not one of"),
    ("chat", {"messages": [{"role": "user", "content": 3}]}, "content must be a text or a list of parts"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "reads no images"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "'file'"),
    ("chat", {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "cannot be continued"),
    ("chat", {"n": 2}, "n must be 1"),
    ("chat", {"logit_bias": {"5": 1}}, "logit_bias is not supported"),
    ("chat", {"presence_penalty": 0.5}, "presence_penalty must be 0"),
    ("chat", {"frequency_penalty": 1}, "frequency_penalty must be 0"),
    ("chat", {"logprobs": True}, "logprobs is not supported"),
    ("chat", {"response_format": {"type": "json_object"}}, "constrained decoding"),
    ("chat", {"tool_choice": {"type": "function", "function": {"name": "add"}}}, "constrained decoding"),
    ("chat", {"temperature": "hot"}, "temperature must be a number"),
    ("chat", {"temperature": -1}, "temperature must be 0 or more"),
    ("chat", {"temperature": float("nan")}, "temperature must be 0 or more"),
    ("chat", {"top_p": 0}, "top_p must be above 0"),
    ("chat", {"max_tokens": 0}, "max_tokens must be at least 1"),
    ("chat", {"max_completion_tokens": True}, "max_completion_tokens must be an integer"),
    ("chat", {"stop": [""]}, "stop must be a text or a list of texts"),
    ("chat", {"stream": "yes"}, "stream must be true or false"),
    ("chat", {"tools": [{"type": "custom"}]}, "tools are functions"),
    ("chat", {"tools": [{"type": "function", "function": ADD}] * 2}, "two tools are called 'add'"),
    ("chat", {"functions": [ADD]}, "functions is not supported: send tools"),
    ("responses", {"input": None}, "no message to reply to"),
    ("responses", {"background": True}, "background is not supported"),
    ("responses", {"previous_response_id": "resp_of_another"}, "there is no response 'resp_of_another' of this key"),
    ("responses", {"conversation": "c"}, "conversation is not supported"),
    ("responses", {"text": {"format": {"type": "json_schema"}}}, "constrained decoding"),
    ("responses", {"tools": [{"type": "code_interpreter"}]}, "tools are functions"),
    ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "item_reference is not supported"),
    ("responses", {"input": [{"type": "mystery"}]}, "'mystery'"),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "reads no images"),
    ("responses", {"input": [{"type": "function_call", "name": "f", "call_id": "c", "arguments": "{"}]}, "are not JSON"),
    ("messages", {"messages": {}}, "messages must be a list"),
    ("messages", {"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
    ("messages", {"output_config": {"format": {"type": "json_schema"}}}, "constrained decoding"),
    ("messages", {"tool_choice": {"type": "tool", "name": "add"}}, "constrained decoding"),
    ("messages", {"tools": [{"type": "web_search_20260209", "name": "web_search"}]}, "a name and an input_schema"),
    ("messages", {"tools": [{"name": "add"}]}, "input_schema is missing"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "reads no images"),
    ("messages", {"stop_sequences": "x " * 3, "max_tokens": -1}, "max_tokens must be at least 1"),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "fields", "sentence"), BAD)
def test_what_cannot_be_done_is_refused_in_one_sentence(dialect: str, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Refused) as refused:
        DIALECTS[dialect](**fields)
    assert refused.value.status == 400
    assert sentence in refused.value.sentence
    assert "\n" not in refused.value.sentence


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"[" * 100_000, b"9" * 9_000_000], ids=lambda body: f"{body[:3]!r}")
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(Refused, match="JSON object"):
        read_body(body)


def test_what_changes_nothing_is_accepted() -> None:
    chat(n=1, logit_bias={}, presence_penalty=0.0, logprobs=False, response_format={"type": "text"}, tool_choice="auto",
         store=False, reasoning_effort="low", user="me", metadata={"a": "b"}, parallel_tool_calls=True)  # fmt: skip
    responses(background=False, truncation="disabled", include=[], reasoning={"summary": "auto"}, text={"verbosity": "low"})
    messages(thinking={"type": "adaptive"}, output_config={"effort": "high"}, metadata={"user_id": "x"}, context_management={})


def read_events(data: bytes) -> list[dict[str, Any]]:
    lines = [line[6:] for line in data.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


ANSWERS = [
    says("Hello é."),
    says("", ("add", {"b": 1, "a": [2]})),
    says("Both.", ("add", {"a": 1}), ("add", {"a": 2}), thinking="Hm."),
    says("cut", finish="length"),
    says(""),
]


TOLD = [(answer, pieces) for answer in ANSWERS for pieces in ([], ["Hel"], ["Hel", "lo é."])]


@pytest.mark.parametrize(("answer", "pieces"), [pair for pair in TOLD if pair[0].message.content.startswith("".join(pair[1]))])
def test_a_stream_says_what_a_whole_answer_says(answer: Any, pieces: list[str]) -> None:
    """The events are put together as the clients of the vendors do. Some of the text may be told before the answer is known."""

    def streamed(made: Exchange) -> list[dict[str, Any]]:
        told = [made.opening("m"), *(made.saying(piece, "m") for piece in pieces)]
        return read_events(b"".join([*told, made.quiet, *made.events(answer, "m")]))

    made = exchange(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream_options": {"include_usage": True}}
    )
    whole = made.whole(answer, "m")
    events = streamed(made)
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    for piece in events[:-1]:
        delta = piece["choices"][0]["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] = delta.get("reasoning_content") or message.get("reasoning_content")
        message["tool_calls"] += delta.get("tool_calls", [])
    said = whole["choices"][0]["message"]
    assert message["content"] == (said["content"] or "")
    assert [{k: v for k, v in call.items() if k != "index"} for call in message["tool_calls"]] == said.get("tool_calls", [])
    assert message["reasoning_content"] == said.get("reasoning_content")
    assert (events[-1]["usage"], events[-1]["choices"]) == (whole["usage"], [])
    assert events[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert {piece["id"] for piece in events} == {whole["id"]}

    made = exchange("/v1/responses", {"input": "x"})
    events = streamed(made)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    response = events[-1]["response"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == response["output"]
    whole = made.whole(answer, "m")
    for item in (*whole["output"], *response["output"]):
        item.pop("id")
    assert response == whole and events[-1]["type"] == f"response.{whole['status']}"

    made = exchange("/v1/messages", {"messages": [{"role": "user", "content": "x"}]})
    whole, built = made.whole(answer, "m"), {}
    for event in streamed(made):
        kind = event["type"]
        if kind == "message_start":
            built = event["message"]
            assert pieces == [] or built["usage"]["input_tokens"] == 0
        elif kind == "content_block_start":
            built["content"].append({**event["content_block"], "partial": ""})
        elif kind == "content_block_delta":
            block, delta = built["content"][event["index"]], event["delta"]
            for name in ("text", "thinking", "signature"):
                if name in delta:
                    block[name] += delta[name]
            block["partial"] += delta.get("partial_json", "")
        elif kind == "content_block_stop":
            partial = built["content"][event["index"]].pop("partial")
            if partial:
                built["content"][event["index"]]["input"] = json.loads(partial)
        elif kind == "message_delta":
            built |= {**event["delta"], "usage": event["usage"]}
    assert built == whole


def test_ids_are_new_in_every_answer() -> None:
    answer = says("x", thinking="y")
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
    ):
        first, second = (exchange(path, body).whole(answer, "m") for _ in range(2))
        assert first["id"] != second["id"]
        assert not {item["id"] for item in first.get("output", ())} & {item["id"] for item in second.get("output", ())}


def test_a_chat_stream_tells_usage_only_if_it_is_asked() -> None:
    made = exchange("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert all("usage" not in event for event in read_events(b"".join(made.events(says("a"), "m"))))
