"""Anthropic Messages: blocks to a Call, an Answer to a message or its typed events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack

from ..types import Message, ToolCall
from .calls import Answer, Call
from .wire import (
    Given,
    Json,
    RequestMarks,
    as_json,
    asked,
    content,
    event,
    field,
    function,
    hint,
    new_id,
    objects,
    opened,
    part_text,
    refuse,
    refuse_others,
    required,
    unique,
)

REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "container": ((), "is not supported: this server runs no tools"),
    "mcp_servers": (([],), "is not supported: this server runs no tools"),
    "output_format": ((), "needs constrained decoding, which this server does not have"),
}
BILLING = "x-anthropic-billing-header:"
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesExchange:
    """A request to /v1/messages or /v1/messages/count_tokens."""

    quiet = event({"type": "ping"})

    def __init__(self, body: Given, **marks: Unpack[RequestMarks]) -> None:
        refuse_others(body, REFUSED)
        self.streams = field(body, "stream", bool, False)
        if field(body, "output_config", dict, {}).get("format") is not None:
            refuse("output_config.format needs constrained decoding, which this server does not have")
        choice = field(body, "tool_choice", dict, {})
        kind = choice.get("type", "auto")
        if kind not in ("auto", "none", "any"):
            refuse("tool_choice needs constrained decoding, which this server does not have: send 'auto' or 'none'")
        if kind == "any" or choice.get("disable_parallel_tool_use") is True:
            hint("tool_choice 'any'" if kind == "any" else "disable_parallel_tool_use")
        self._messages: list[Message] = []
        self._thinking: dict[int, str] = {}
        if system := _system(body.get("system")):
            self._messages.append(Message("system", system))
        for each in objects(required(body, "messages", list), "messages"):
            self._read(each)
        history = opened(self._messages)
        shift = len(history) - len(self._messages)
        self.call = Call(
            dialect="messages",
            messages=tuple(history),
            tools=() if kind == "none" else unique(_tool(each) for each in objects(field(body, "tools", list, []), "tools")),
            asked=asked(body, "max_tokens", "stop_sequences"),
            model=field(body, "model", str, ""),
            thinking={at + shift: said for at, said in self._thinking.items()},
            **marks,
        )
        self._id = new_id("msg")
        self._said = ""

    def whole(self, answer: Answer, model: str) -> Json:
        return {**self._message(model, answer), "content": _blocks(answer), "stop_reason": _STOPS[answer.finish]}

    def opening(self, model: str) -> bytes:
        """Nothing: a message begins with the number of its input tokens, which the answer tells."""
        return b""

    def saying(self, text: str, model: str) -> bytes:
        delta = event({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}})
        if not self._said:  # the tokens are told at the end
            block = {"type": "text", "text": "", "citations": None}
            start = event({"type": "content_block_start", "index": 0, "content_block": block})
            delta = self._start(model, Answer(message=Message("assistant", ""))) + start + delta
        self._said += text
        return delta

    def events(self, answer: Answer, model: str) -> Iterator[bytes]:
        if not self._said:
            yield self._start(model, answer)
        for index, block in enumerate(_blocks(answer)):
            start, deltas = _in_pieces(block)
            if self._said and not index:
                deltas = [{"type": "text_delta", "text": answer.message.content[len(self._said) :]}]
            else:
                yield event({"type": "content_block_start", "index": index, "content_block": start})
            for delta in deltas:
                yield event({"type": "content_block_delta", "index": index, "delta": delta})
            yield event({"type": "content_block_stop", "index": index})
        delta = {"stop_reason": _STOPS[answer.finish], "stop_sequence": None}
        yield event({"type": "message_delta", "delta": delta, "usage": _usage(answer)})
        yield event({"type": "message_stop"})

    def failure(self, status: int, sentence: str) -> bytes:
        return event(error_body(status, sentence))

    def _start(self, model: str, answer: Answer) -> bytes:
        return event({"type": "message_start", "message": {**self._message(model, answer), "content": []}})

    def _message(self, model: str, answer: Answer) -> Json:
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": model, "stop_reason": None, "stop_sequence": None,
            "usage": _usage(answer),
        }  # fmt: skip

    def _read(self, message: Given) -> None:
        """One message. Results of tools in a user's message are messages of their own, before its text."""
        role, given = required(message, "role", str), message.get("content")
        if role not in ("user", "assistant", "system"):
            refuse(f"the role {role[:40]!r} is not one of user, assistant, system")
        if role == "system":
            self._messages.append(Message("system", _system(given)))
            return
        blocks = (
            [{"type": "text", "text": given}]
            if isinstance(given, str)
            else list(objects(required(message, "content", list), "content"))
        )
        texts, calls, thoughts = [], [], []
        for block in blocks:
            kind = block.get("type")
            if kind == "tool_result" and role == "user":
                said = content(block.get("content"), "content")
                self._messages.append(Message("tool", said, tool_call_id=required(block, "tool_use_id", str)))
            elif kind == "tool_use" and role == "assistant":
                name, arguments = required(block, "name", str), field(block, "input", dict, {})
                calls.append(ToolCall(name, dict(arguments), required(block, "id", str)))
            elif kind == "thinking" and role == "assistant":
                thoughts.append(field(block, "thinking", str, ""))
            elif kind != "redacted_thinking":
                texts.append(part_text(block, "content"))
        if role == "assistant":
            if any(thoughts):
                self._thinking[len(self._messages)] = "".join(thoughts)
            self._messages.append(Message("assistant", "".join(texts), tuple(calls)))
        elif texts:
            self._messages.append(Message("user", "\n".join(texts)))


def error_body(status: int, sentence: str) -> Json:
    """The shape of Anthropic's errors."""
    kinds = {
        401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
        429: "rate_limit_error",
    }  # fmt: skip
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": sentence}}


def _system(value: object) -> str:
    """The system text, without the block in which a client tells its vendor whom to bill."""
    if isinstance(value, list):
        texts = [part_text(block, "system") for block in objects(value, "system")]
        return "\n\n".join(text for text in texts if not text.startswith(BILLING))
    return content(value, "system")


def _tool(tool: Given) -> Json:
    if tool.get("type") not in (None, "custom"):
        refuse(f"a tool of the type {str(tool['type'])[:40]!r} is not supported: tools have a name and an input_schema")
    return function(required(tool, "name", str), field(tool, "description", str), required(tool, "input_schema", dict))


def _blocks(answer: Answer) -> list[Json]:
    message = answer.message
    blocks: list[Json] = []
    if answer.thinking:
        blocks.append({"type": "thinking", "thinking": answer.thinking, "signature": "unsigned"})
    if message.content or not message.tool_calls:
        blocks.append({"type": "text", "text": message.content, "citations": None})
    return blocks + [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in message.tool_calls
    ]


def _in_pieces(block: Json) -> tuple[Json, list[Json]]:
    """The block as a stream begins it, and what is added to it."""
    if block["type"] == "thinking":
        deltas = [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
        return {**block, "thinking": "", "signature": ""}, deltas
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": as_json(block["input"])}]


def _usage(answer: Answer) -> Json:
    return {
        "input_tokens": answer.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": answer.completion_tokens,
    }
