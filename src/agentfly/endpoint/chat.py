"""OpenAI Chat Completions: a request to a Call, an Answer to a completion or its chunks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Unpack

from ..engines.openai_wire import write_call
from ..types import Message, ToolCall
from .calls import Answer, Call
from .wire import (
    Given,
    Json,
    RequestMarks,
    as_json,
    asked,
    call_of,
    content,
    data,
    field,
    function,
    hint,
    new_id,
    objects,
    opened,
    refuse,
    refuse_others,
    required,
    unique,
)

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
CONSTRAINED = "needs constrained decoding, which this server does not have"
REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "n": ((1,), "must be 1: send the request again for another reply"),
    "best_of": ((1,), "must be 1"),
    "logit_bias": (({},), "is not supported"),
    "presence_penalty": ((0,), "must be 0: the model is sampled without penalties"),
    "frequency_penalty": ((0,), "must be 0: the model is sampled without penalties"),
    "repetition_penalty": ((1,), "must be 1: the model is sampled without penalties"),
    "stop_token_ids": (([],), "is not supported: send stop, a list of texts"),
    "logprobs": ((False,), "is not supported: answers have no log-probs"),
    "top_logprobs": ((0,), "is not supported: answers have no log-probs"),
    "response_format": (({"type": "text"},), CONSTRAINED),
    "modalities": ((["text"],), "must be ['text']"),
    "audio": ((), "is not supported"),
    "functions": (([],), "is not supported: send tools"),
    "function_call": (("none", "auto"), "is not supported: send tools"),
    "web_search_options": ((), "is not supported: this server runs no tools"),
}


class ChatExchange:
    """A request to /v1/chat/completions."""

    quiet = b": waiting\n\n"

    def __init__(self, body: Given, **marks: Unpack[RequestMarks]) -> None:
        refuse_others(body, REFUSED)
        self.streams = field(body, "stream", bool, False)
        self._tells_usage = field(field(body, "stream_options", dict, {}), "include_usage", bool, False)
        choice = body.get("tool_choice")
        if isinstance(choice, dict) or choice not in (None, "auto", "none", "required"):
            refuse(f"tool_choice {CONSTRAINED}: send 'auto' or 'none'")
        if choice == "required" or body.get("parallel_tool_calls") is False:
            hint("tool_choice 'required'" if choice == "required" else "parallel_tool_calls false")
        messages: list[Message] = []
        thinking: dict[int, str] = {}
        for each in objects(required(body, "messages", list), "messages"):
            messages.append(_message(each))
            said = field(each, "reasoning_content", str) or field(each, "reasoning", str)
            if said and messages[-1].role == "assistant":
                thinking[len(messages) - 1] = said
        history = opened(messages)
        shift = len(history) - len(messages)
        self.call = Call(
            dialect="chat",
            messages=tuple(history),
            tools=() if choice == "none" else unique(_tool(each) for each in objects(field(body, "tools", list, []), "tools")),
            asked=asked(body, "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens", "stop"),
            model=field(body, "model", str, ""),
            thinking={at + shift: said for at, said in thinking.items()},
            **marks,
        )
        self._id = new_id("chatcmpl")
        self._created = int(time.time())
        self._said = ""

    def whole(self, answer: Answer, model: str) -> Json:
        message = {
            "role": "assistant",
            "content": answer.message.content or (None if answer.message.tool_calls else ""),
            "refusal": None,
            "annotations": [],
            **self._extras(answer),
        }
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish}
        return {**self._head("chat.completion", model), "choices": [choice], "usage": _usage(answer)}

    def opening(self, model: str) -> bytes:
        return self._chunk(model, {"role": "assistant", "content": ""})

    def saying(self, text: str, model: str) -> bytes:
        self._said += text
        return self._chunk(model, {"content": text})

    def events(self, answer: Answer, model: str) -> Iterator[bytes]:
        extras = self._extras(answer)
        if answer.thinking:
            yield self._chunk(model, {"reasoning_content": answer.thinking})
        if rest := answer.message.content[len(self._said) :]:
            yield self._chunk(model, {"content": rest})
        if calls := extras.get("tool_calls"):
            yield self._chunk(model, {"tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]})
        yield self._chunk(model, {}, answer.finish)
        if self._tells_usage:
            yield data({**self._head("chat.completion.chunk", model), "choices": [], "usage": _usage(answer)})
        yield b"data: [DONE]\n\n"

    def failure(self, status: int, sentence: str) -> bytes:
        return data(error_body(status, sentence))

    def _extras(self, answer: Answer) -> Json:
        extras: Json = {"reasoning_content": answer.thinking} if answer.thinking else {}
        if answer.message.tool_calls:
            extras["tool_calls"] = [write_call(call) for call in answer.message.tool_calls]
        return extras

    def _head(self, kind: str, model: str) -> Json:
        return {"id": self._id, "object": kind, "created": self._created, "model": model, "system_fingerprint": None}

    def _chunk(self, model: str, delta: Given, finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        usage = {"usage": None} if self._tells_usage else {}
        return data({**self._head("chat.completion.chunk", model), "choices": [choice], **usage})


def error_body(status: int, sentence: str) -> Json:
    """The shape of OpenAI's errors, also those of Responses."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    code = {401: "invalid_api_key", 413: "request_too_large"}.get(status)
    return {"error": {"message": sentence, "type": kind, "param": None, "code": code}}


def _usage(answer: Answer) -> Json:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }


def _message(message: Given) -> Message:
    role = _ROLES.get(required(message, "role", str))
    if role is None:
        refuse(f"the role {str(message['role'])[:40]!r} is not one of {', '.join(_ROLES)}")
    said = content(message.get("content"), "content", "" if role == "assistant" else "\n")
    if role == "tool":
        return Message("tool", said, tool_call_id=field(message, "tool_call_id", str))
    calls = field(message, "tool_calls", list, []) if role == "assistant" else []
    return Message(role, said, tuple(_call(each) for each in objects(calls, "tool_calls")))  # type: ignore[arg-type]


def _call(call: Given) -> ToolCall:
    made = required(call, "function", dict)
    arguments = made.get("arguments")
    text = as_json(arguments) if isinstance(arguments, dict) else field(made, "arguments", str, "")
    return call_of(field(call, "id", str, ""), field(made, "name", str, ""), text)


def _tool(tool: Given) -> Json:
    if tool.get("type") != "function":
        refuse(f"a tool of the type {str(tool.get('type'))[:40]!r} is not supported: tools are functions")
    made = required(tool, "function", dict)
    return function(required(made, "name", str), field(made, "description", str), field(made, "parameters", dict))
