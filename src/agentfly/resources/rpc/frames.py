"""Values in, frames out, and back: what travels between the trainer and a worker process. No pickle.

    frame   four bytes of length, then JSON                         call    {"id", "i", "m", "a", "k"}     i: which instance
    value   {"v": any JSON value}  |  {"r": a ToolResult}           reply   {"id", ...value}  |  {"id", "e": [type, text]}
            {"c": a CellResult}

A value must have a JSON form (tuples become lists), or be a `ToolResult` (whose image may be bytes) or a `CellResult` of a code
interpreter; anything else is a TypeError that says so, and nothing is sent. `Task`s are understood as arguments. An exception
travels as its type's name and its text, and comes back as the same type where that is one of AgentFly's or Python's own,
otherwise as `RemoteError`.
"""

from __future__ import annotations

import base64
import builtins
import json
import struct
from typing import Any

from ... import errors
from ...types import Message, Task, ToolCall, ToolResult
from ..sandbox.limits import CellResult

MAX_FRAME = 64 << 20
HEADER = struct.Struct(">I")
_TASK = "__agentfly_task__"
_PLAIN = (str, int, float, bool, type(None))


class RemoteError(Exception):
    """Raised in a worker process by a type that this process does not know; `type_name` is its name."""

    def __init__(self, text: str, type_name: str = "Exception") -> None:
        super().__init__(text)
        self.type_name = type_name

    def __str__(self) -> str:
        return f"{self.type_name}: {self.args[0]}"


class BadFrame(Exception):
    """What came over the wire is not a frame."""


def pack(message: dict[str, Any]) -> bytes:
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > MAX_FRAME:
        raise TypeError(f"it takes {len(data) >> 20} MiB as JSON; at most {MAX_FRAME >> 20} can travel")
    return HEADER.pack(len(data)) + data


class Frames:
    """Bytes in, messages out."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        buffer = self._buffer
        buffer += data
        found: list[dict[str, Any]] = []
        start = 0
        while len(buffer) - start >= 4:
            length = HEADER.unpack_from(buffer, start)[0]
            if length > MAX_FRAME:
                raise BadFrame(f"a frame of {length} bytes")
            end = start + 4 + length
            if len(buffer) < end:
                break
            try:
                message = json.loads(buffer[start + 4 : end])
            except (ValueError, RecursionError) as error:
                raise BadFrame(str(error)) from None
            if type(message) is not dict:
                raise BadFrame("not an object")
            found.append(message)
            start = end
        if start:
            del buffer[:start]
        return found


def check(value: Any, depth: int = 0) -> None:
    """Refuse what JSON would change or cannot carry."""
    kind = type(value)
    if kind in _PLAIN:
        return
    if depth > 200:
        raise TypeError("it is nested too deeply")
    if kind is list or kind is tuple:
        for item in value:
            check(item, depth + 1)
    elif kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError(f"the key {key!r} of a dict is not a string")
            check(item, depth + 1)
    else:
        raise TypeError(f"a {kind.__name__} has no JSON form")


def pack_value(value: Any) -> dict[str, Any]:
    if isinstance(value, ToolResult):
        image = value.image
        if isinstance(image, bytes):
            image = {"base64": base64.b64encode(image).decode()}
        check(image)
        return {"r": [value.observation, image, value.reward, value.done, value.error]}
    if isinstance(value, CellResult):
        images = [base64.b64encode(image).decode() for image in value.images]
        flags = [value.timed_out, value.alive, value.replaced]
        return {"c": [value.stdout, value.stderr, value.value, value.error, images, *flags]}
    check(value)
    return {"v": value}


def unpack_value(message: dict[str, Any]) -> Any:
    if "v" in message:
        return message["v"]
    if "c" in message:
        return _unpack_cell(message["c"])
    try:
        observation, image, reward, done, error = message["r"]
        if isinstance(image, dict) and set(image) == {"base64"}:
            image = base64.b64decode(image["base64"], validate=True)
    except (KeyError, ValueError, TypeError) as wrong:
        raise BadFrame(f"a reply without a value: {wrong}") from None
    return ToolResult(observation=observation, image=image, reward=reward, done=done, error=error)


def _unpack_cell(parts: Any) -> CellResult:
    """What another side says of a cell; it may be a server elsewhere, so every part is looked at."""
    try:
        stdout, stderr, value, error, images, timed_out, alive, replaced = parts
        pictures = tuple(base64.b64decode(image, validate=True) for image in images)
    except (ValueError, TypeError) as wrong:
        raise BadFrame(f"not the result of a cell: {wrong}") from None
    texts, flags = (stdout, stderr, value or "", error or ""), (timed_out, alive, replaced)
    if not all(isinstance(text, str) for text in texts) or not all(isinstance(flag, bool) for flag in flags):
        raise BadFrame("not the result of a cell")
    return CellResult(stdout, stderr, value, error, pictures, timed_out, alive, replaced)


def pack_argument(value: Any) -> Any:
    if isinstance(value, Task):
        return {_TASK: pack_task(value)}
    check(value)
    return value


def unpack_argument(value: Any) -> Any:
    return unpack_task(value[_TASK]) if type(value) is dict and _TASK in value else value


def pack_task(task: Task) -> dict[str, Any]:
    messages = []
    for message in task.messages:
        if message.images:
            raise TypeError("a message with images cannot travel to a worker process")
        calls = [[call.name, call.arguments, call.id, call.error] for call in message.tool_calls]
        messages.append([message.role, message.content, calls, message.name, message.tool_call_id])
    fields = dict(task.fields)
    check(fields)
    return {"id": task.id, "messages": messages, "fields": fields}


def unpack_task(data: dict[str, Any]) -> Task:
    messages = tuple(
        Message(role, content, tuple(ToolCall(*call) for call in calls), name, call_id)
        for role, content, calls, name, call_id in data["messages"]
    )
    return Task(data["id"], messages, data["fields"])


def pack_error(error: BaseException) -> list[str]:
    name = error.type_name if isinstance(error, RemoteError) else type(error).__name__
    text = str(error.args[0]) if isinstance(error, KeyError | RemoteError) and error.args else str(error)
    return [name, text[:20_000]]


def unpack_error(pair: Any) -> Exception:
    """The exception that stands for one raised on the other side."""
    if not (isinstance(pair, list) and len(pair) == 2):
        raise BadFrame("a reply with an error that is not [type, text]")
    name, text = str(pair[0]), str(pair[1])
    for home in (errors, builtins):
        kind = getattr(home, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(text)
            except TypeError:
                break  # such as UnicodeDecodeError, which cannot be made from a text alone
    return RemoteError(text, name)
