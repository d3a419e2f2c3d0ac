"""The JSON of an OpenAI-compatible chat server: requests to bodies, answers (whole or streamed) to Completions.

Native tool calls go both ways. Arguments that are not a JSON object become a call with an `error`, which the agent reports to
the model. Options that were not set are not sent, so servers without extensions (top_k, min_p, stop_token_ids) work.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ConfigError, EngineError
from ..net.client import reason_in
from ..net.json_body import load_json
from ..tools.text import clean
from ..types import Completion, Message, Request, Sampling, ToolCall

MAX_CALLS = 64


def to_body(model: str, request: Request, *, limit_key: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a chat completion request. Raises ConfigError for an image that cannot be encoded."""
    native = bool(request.tools)
    body: dict[str, Any] = {"model": model, "messages": [_message(message, native) for message in request.messages]}
    body.update(_sampling(request.sampling, limit_key))
    if native:
        body["tools"] = [dict(schema) for schema in request.tools]
    if request.on_text is not None:
        body["stream"] = True
    body.update(extra)
    return body


def from_answer(text: bytes | str) -> Completion:
    """The Completion of a whole answer. Raises EngineError if it is not a chat completion."""
    try:
        answer = load_json(text)
        choice = answer["choices"][0]
        message = choice["message"]
        calls = []
        for call in message.get("tool_calls") or ():
            function = call["function"]
            arguments = function.get("arguments")
            if isinstance(arguments, dict):  # as some servers send them
                arguments = json.dumps(arguments)
            calls.append(_WireCall(_text(call.get("id")), _text(function["name"]), _text(arguments)))
        return _complete(_content(message.get("content")), calls, choice.get("finish_reason"), answer.get("usage"))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise EngineError("the server's answer is not a chat completion") from error


class ChatStream:
    """A streamed answer, fed line by line; text goes to `on_text` as it arrives."""

    def __init__(self, on_text: Callable[[str], None]) -> None:
        self._on_text = on_text
        self._parts: list[str] = []
        self._calls: dict[int, _WireCall] = {}
        self._finish: str | None = None
        self._usage: object = None
        self.done = False

    @property
    def begun(self) -> bool:
        """Whether text was passed to `on_text` already."""
        return bool(self._parts)

    def line(self, line: str) -> None:
        """One line of the event stream."""
        if not line.startswith("data:"):
            return
        data = line[5:].strip()
        if data == "[DONE]":
            self.done = True
            return
        try:
            piece = load_json(data)
            if "error" in piece:
                raise EngineError(f"the server broke off: {reason_in(piece)}")
            self._usage = piece.get("usage") or self._usage  # of the last chunk, from servers that send it
            texts = [self._delta(choice) for choice in piece.get("choices") or ()]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EngineError("the server streamed something that is not a chat completion") from error
        for text in filter(None, texts):
            self._parts.append(text)
            self._on_text(text)

    def complete(self) -> Completion:
        if not self.done and self._finish is None:
            raise EngineError("the server's stream ended before the reply did")
        return _complete("".join(self._parts), [self._calls[i] for i in sorted(self._calls)], self._finish, self._usage)

    def cut(self) -> Completion:
        """What has arrived of a reply that is cut off. A call that may be incomplete is none."""
        return Completion(text="".join(self._parts), stop="length")

    def _delta(self, choice: Mapping[str, Any]) -> str:
        delta = choice.get("delta") or {}
        for piece in delta.get("tool_calls") or ():
            call = self._calls.setdefault(int(piece.get("index") or 0), _WireCall("", "", ""))
            function = piece.get("function") or {}
            call.id = call.id or _text(piece.get("id"))
            call.name += _text(function.get("name"))
            call.arguments += _text(function.get("arguments"))
        self._finish = choice.get("finish_reason") or self._finish
        return _content(delta.get("content"))


class _WireCall:
    def __init__(self, id: str, name: str, arguments: str) -> None:  # noqa: A002  its name on the wire
        self.id, self.name, self.arguments = id, name, arguments


def read_call(id: str, name: str, text: str) -> ToolCall:  # noqa: A002  its name on the wire
    """A call whose arguments came as the text of a JSON object; an empty text is an object without members."""
    try:
        arguments = load_json(text) if text.strip() else {}
    except ValueError as error:
        return ToolCall(name, {}, id, error=f"the arguments of {name} are not JSON: {error}")
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, id, error=f"the arguments of {name} must be a JSON object")
    return ToolCall(name, arguments, id)


def write_call(call: ToolCall) -> dict[str, Any]:
    """A call of a reply, as chat servers write it and read it."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _text(value: object) -> str:
    """A text or null. Raises TypeError for other values."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"a text is expected, not {type(value).__name__}")
    return clean(value or "")


def _content(value: object) -> str:
    """The content of a message: a text, null, or a list of parts, whose texts are joined. Raises TypeError, KeyError."""
    if isinstance(value, list):
        return "".join(_text(part["text"]) for part in value if part["type"] in ("text", "output_text"))
    return _text(value)


def _complete(text: str, calls: list[_WireCall], finish: object, usage: object) -> Completion:
    read = [read_call(call.id, call.name, call.arguments) for call in calls[:MAX_CALLS]]
    if len(calls) > MAX_CALLS:
        read.append(ToolCall("", {}, error=f"only the first {MAX_CALLS} calls of a reply are read"))
    return Completion(
        text=text,
        stop="length" if finish == "length" else "stop",
        tool_calls=tuple(read),
        prompt_tokens=_count(usage, "prompt_tokens"),
        reply_tokens=_count(usage, "completion_tokens"),
    )


def _count(usage: object, name: str) -> int:
    """A number of tokens. 0 if the server does not report it, or reports something that is no number of tokens."""
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if type(count) is int and 0 <= count < 1 << 40 else 0


def _message(message: Message, native: bool) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.images:
        out["content"] = [{"type": "text", "text": message.content}, *map(_image, message.images)]
    # Calls that an agent parsed from the text have no id; the text already contains them.
    calls = [call for call in message.tool_calls if call.id] if native else []
    if calls:
        out["tool_calls"] = [write_call(call) for call in calls]
    if message.role == "tool" and message.tool_call_id:
        out["tool_call_id"] = message.tool_call_id
    if message.name:
        out["name"] = message.name
    return out


def _image(image: object) -> dict[str, Any]:
    if isinstance(image, bytes):
        image = "data:image/png;base64," + base64.b64encode(image).decode()
    if not isinstance(image, str):
        raise ConfigError(f"an image for a chat server is a URL or the bytes of a PNG, not {type(image).__name__}")
    return {"type": "image_url", "image_url": {"url": image}}


def _sampling(sampling: Sampling, limit_key: str) -> dict[str, Any]:
    optional = {
        "stop": list(sampling.stop) or None,
        "seed": sampling.seed,
        "top_k": sampling.top_k or None,
        "min_p": sampling.min_p or None,
        "stop_token_ids": list(sampling.stop_ids) or None,
    }
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        limit_key: sampling.max_tokens,
        **{key: value for key, value in optional.items() if value is not None},
    }
