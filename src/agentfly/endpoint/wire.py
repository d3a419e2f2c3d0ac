"""What the three dialects share: fields of a client's JSON with their types, contents, calls and results, refusals, events.

Everything that a client may get wrong raises `Refused` with status 400 and one sentence that names the field.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, Protocol, TypedDict

from ..engines.openai_wire import read_call
from ..net.json_body import load_json
from ..tools.text import clean
from ..types import Message, ToolCall
from .calls import Answer, Asked, Call, Refused

log = logging.getLogger(__name__)
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
Json = dict[str, Any]
Given = Mapping[str, Any]
_KINDS: dict[type, str] = {
    str: "a text",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    list: "a list",
    dict: "an object",
}
_BELOW_1 = math.nextafter(1, 0)
_BOUNDS = {
    "temperature": (0, sys.float_info.max, "0 or more"),
    "top_p": (sys.float_info.min, 1, "above 0 and at most 1"),
    "top_k": (0, math.inf, "0 (off) or more"),
    "min_p": (0, _BELOW_1, "at least 0 and below 1"),
    "max_tokens": (1, math.inf, "at least 1"),
}
_warned: set[str] = set()


class RequestMarks(TypedDict, total=False):
    """What a request says beside its body; see `Call`."""

    digest: str
    is_retry: bool
    agent: str
    on_text: Callable[[str], None] | None


class Exchange(Protocol):
    """One request in a dialect, and the forms of its answer. `quiet` is what keeps a silent stream alive."""

    call: Call
    streams: bool

    @property
    def quiet(self) -> bytes: ...

    def whole(self, answer: Answer, model: str) -> Json:
        """The answer as one JSON object."""

    def opening(self, model: str) -> bytes:
        """The events with which a stream begins before its answer is known."""

    def saying(self, text: str, model: str) -> bytes:
        """The events of a piece of the answer's text, after `opening`."""

    def events(self, answer: Answer, model: str) -> Iterator[bytes]:
        """The events of the answer, or of what `saying` has not said of it."""

    def failure(self, status: int, sentence: str) -> bytes:
        """The event with which a stream ends that has begun already."""


def refuse(sentence: str) -> NoReturn:
    raise Refused(400, sentence)


def read_body(body: bytes) -> Json:
    """The JSON object of a request's body, its texts encodable."""
    try:
        value = load_json(body)
        if b"\\ud" in body.lower():  # perhaps half of a surrogate pair
            value = load_json(clean(as_json(value)))
    except ValueError as error:
        refuse(f"the body is not a JSON object: {error}")
    if not isinstance(value, dict):
        refuse("the body must be a JSON object")
    return value


def field(body: Given, name: str, kind: type, default: object = None) -> Any:
    """The value of a field; `default` if it is absent or null."""
    value = body.get(name)
    if value is None:
        return default
    fits = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))
    if not fits:
        refuse(f"{name} must be {_KINDS[kind]}")
    return value


def required(body: Given, name: str, kind: type) -> Any:
    """The value of a field that must be there."""
    value = field(body, name, kind)
    if value is None:
        refuse(f"{name} is missing: it must be {_KINDS[kind]}")
    return value


def objects(values: Sequence[object], name: str) -> Iterator[Given]:
    """The members of a list of objects."""
    for value in values:
        if not isinstance(value, dict):
            refuse(f"{name} must be a list of objects")
        yield value


def asked(body: Given, limit: str, stop: str) -> Asked:
    """The sampling that a body asks for. `limit` and `stop` are the names of the fields in its dialect."""
    stops = body.get(stop)
    stops = [stops] if isinstance(stops, str) else field(body, stop, list, [])
    if not all(isinstance(each, str) and each for each in stops):
        refuse(f"{stop} must be a text or a list of texts that are not empty")
    given = {
        "temperature": field(body, "temperature", float), "top_p": field(body, "top_p", float),
        "top_k": field(body, "top_k", int), "min_p": field(body, "min_p", float),
        "max_tokens": field(body, limit, int), "seed": field(body, "seed", int),
    }  # fmt: skip
    for name, (least, most, bound) in _BOUNDS.items():
        if given[name] is not None and not least <= given[name] <= most:
            refuse(f"{limit if name == 'max_tokens' else name} must be {bound}")
    return Asked(**given, stop=tuple(stops))


def refuse_others(body: Given, table: Mapping[str, tuple[Sequence[object], str]]) -> None:
    """Refuse each field of the table that has another value than null and the values that change nothing."""
    for name, (neutral, why) in table.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            refuse(f"{name} {why}")


def hint(name: str) -> None:
    """Say once in the log that a client asks for what the reply may not keep to."""
    if name not in _warned:
        _warned.add(name)
        log.warning("a client sends %s: replies are sampled freely, so they may not keep to it", name)


def content(value: object, name: str, glue: str = "\n") -> str:
    """A text, null, or a list of parts whose texts are joined."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        refuse(f"{name} must be a text or a list of parts")
    return glue.join(part_text(part, name) for part in objects(value, name))


def part_text(part: Given, name: str) -> str:
    """The text of one part of a content."""
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text", "summary_text", "reasoning_text"):
        return str(required(part, "text", str))
    if kind == "refusal":
        return str(required(part, "refusal", str))
    if kind == "tool_reference":
        return f"The tool {required(part, 'tool_name', str)} is available now."
    if kind in ("image_url", "input_image", "image"):
        refuse("this model reads no images: leave them out")
    refuse(f"{name} has a part of the type {str(kind)[:40]!r}, and this model reads texts alone")


def call_of(id: str, name: str, arguments: str) -> ToolCall:  # noqa: A002  its name on the wire
    """A call in the history of a client."""
    call = read_call(id, name, arguments)
    if not name:
        refuse("a call in the history has no name")
    if call.error:
        refuse(call.error)
    return call


def function(name: str, description: str | None, parameters: Given | None) -> Json:
    """A function schema in OpenAI's form."""
    shown: Json = {"name": name}
    if description:
        shown["description"] = description
    shown["parameters"] = dict(parameters or {"type": "object", "properties": {}})
    return {"type": "function", "function": shown}


def unique(tools: Iterable[Json]) -> tuple[Json, ...]:
    """The tools. Refuses two of one name: a call could not say which it means."""
    found = tuple(tools)
    names = [tool["function"]["name"] for tool in found]
    if len(set(names)) < len(names):
        refuse(f"two tools are called {max(names, key=names.count)!r}")
    return found


def opened(messages: list[Message]) -> list[Message]:
    """The history with one system message at its beginning, and results of tools in the order of their calls."""
    start = 0
    while start < len(messages) and messages[start].role == "system":
        start += 1
    system = "\n\n".join(filter(None, (message.content for message in messages[:start])))
    rest = messages[start:]
    if not rest:
        refuse("there is no message to reply to")
    if rest[-1].role == "assistant":
        refuse("the last message is the assistant's, and a reply that was begun cannot be continued")
    return [*([Message("system", system)] if system else ()), *_in_order(rest)]


def _in_order(messages: list[Message]) -> list[Message]:
    """Put the results after a reply in the order of its calls, and give each the name of its tool."""
    ordered, at = list(messages), 0
    while at < len(ordered):
        calls = {call.id: (index, call.name) for index, call in enumerate(ordered[at].tool_calls)}
        at += 1
        end = at
        while end < len(ordered) and ordered[end].role == "tool":
            end += 1
        if calls and end > at:
            last = (len(calls), "")
            results = sorted(ordered[at:end], key=lambda message: calls.get(message.tool_call_id or "", last)[0])
            ordered[at:end] = [
                replace(each, name=calls[each.tool_call_id or ""][1]) if each.tool_call_id in calls else each
                for each in results
            ]
        at = max(at, end)
    return ordered


def new_id(prefix: str) -> str:
    """An id that no other answer has."""
    return f"{prefix}_{secrets.token_hex(12)}"


def as_json(value: object) -> str:
    return _ENCODER.encode(value)


def data(value: object) -> bytes:
    """A server-sent event without a name."""
    return f"data: {as_json(value)}\n\n".encode()


def event(value: Given) -> bytes:
    """A server-sent event that is named by its type."""
    return f"event: {value['type']}\ndata: {as_json(value)}\n\n".encode()
