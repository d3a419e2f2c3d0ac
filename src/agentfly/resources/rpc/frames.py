"""Frames: how calls and replies travel between a trainer and a worker. Values are those of `agentfly.codec`; no pickle.

    frame    length (4 bytes, big-endian), then the codec's bytes, at most MAX_FRAME
    call     [id, instance, method, args, kwargs]         trainer to worker
    reply    [id, value, None]                            worker to trainer
             [id, None, [type, text]]                     the call raised an exception

The one exception is the hello, the first frame to a worker process: its body is JSON, because the worker cannot import msgpack
before it has read its import path from there. An exception travels as the name of its type and its text. It is raised as the
same type if that is one of AgentFly's or Python's, otherwise as `RemoteError`.
"""

from __future__ import annotations

import builtins
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ... import codec, errors
from ...sandbox.limits import CellResult
from ...types import SANDBOX_LIMITS

MAX_FRAME = 64 << 20
MAX_ERROR_TEXT = 20_000
HEADER = struct.Struct(">I")
HELLO_ID = 0
"""The id of a worker's first reply, which answers no call: its value is what the worker says of itself."""
NEW, GET, DROP = "@new", "@get", "@drop"
"""Methods of the worker itself: create an instance, read an attribute, drop an instance. No environment's begins with @."""


class FrameLimits(NamedTuple):
    """What a reader accepts: bytes of a frame, values in it (lists, dicts and what they hold), and frames that arrive at once.
    None: as many as there are."""

    frame: int
    values: int | None = None
    at_once: int | None = None


SANDBOXED = FrameLimits(frame=16 << 20, values=100_000, at_once=1000)
"""For a worker that may run code of a model: reading what it sends takes at most some hundredths of a second."""
SERVED = FrameLimits(frame=MAX_FRAME, values=100_000, at_once=1000)
"""For a server that reads what trainers send: long texts may come, and a list of millions of empty lists may not."""
_ENDS_A_CHAIN = (errors.ToolError, errors.RolloutError)


class RemoteError(Exception):
    """An exception in a worker whose type this process does not know; `type_name` is its name."""

    def __init__(self, text: str, type_name: str = "Exception") -> None:
        super().__init__(text)
        self.type_name = type_name

    def __str__(self) -> str:
        return f"{self.type_name}: {self.args[0]}"


class BadFrame(Exception):
    """Bytes that are not a frame, or a frame that is neither a call nor a reply."""


class CallFrame(NamedTuple):
    """Run `method` of one of the worker's instances."""

    id: int
    instance: int
    method: str
    args: list[Any]
    kwargs: dict[str, Any]


class Reply(NamedTuple):
    """The value of a call, or the [type, text] of the exception that it raised."""

    id: int
    value: Any
    error: list[str] | None


def pack_hello(hello: Mapping[str, Any]) -> bytes:
    return _with_length(json.dumps(hello).encode())


def pack_call(call_id: int, instance: int, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Raises `codec.NotEncodable` for an argument that cannot travel."""
    return pack_message([call_id, instance, method, list(args), dict(kwargs)])


def pack_value(call_id: int, value: object) -> bytes:
    """The reply with a call's value. Raises `codec.NotEncodable` for a value that cannot travel."""
    return pack_message([call_id, value, None])


def pack_reply(call_id: int, value: object, where: str) -> bytes:
    """As `pack_value`. For a value that cannot travel, the reply is an error; `where` names the place that it cannot leave."""
    try:
        return pack_value(call_id, value)
    except codec.NotEncodable as refused:
        sentence = (
            f"what it returned cannot leave its {where}: {refused}; return text, numbers, bytes, lists, dicts or a ToolResult, "
            f"or place it in 'loop' or 'thread'"
        )
        return pack_error(call_id, TypeError(sentence))


def pack_error(call_id: int, error: BaseException) -> bytes:
    name = error.type_name if isinstance(error, RemoteError) else type(error).__name__
    text = str(error.args[0]) if isinstance(error, KeyError | RemoteError) and error.args else str(error)
    return pack_message([call_id, None, [name, text[:MAX_ERROR_TEXT]]])


def error_of(pair: list[str], trusted: bool = True) -> Exception:
    """The exception that stands for one that was raised on the other side.

    A worker that is not `trusted` may run code of a model. An exception of it that would stop the run is a WorldError."""
    name, text = pair
    for home in (errors, builtins):
        kind = getattr(home, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            if not trusted and issubclass(kind, errors.AgentFlyError) and not issubclass(kind, _ENDS_A_CHAIN):
                return errors.WorldError(f"{name}: {text}")
            try:
                return kind(text)
            except TypeError:
                break  # such as UnicodeDecodeError, which needs more than a text
    return RemoteError(text, name)


class FrameReader:
    """Cuts a stream of bytes into frames. Every method raises `BadFrame`, and nothing else, for bytes that are none."""

    __slots__ = ("_buffer", "_limits")

    def __init__(self, limits: FrameLimits | None = None) -> None:
        self._buffer = bytearray()
        self._limits = limits or FrameLimits(MAX_FRAME)

    def calls(self, data: bytes) -> list[CallFrame]:
        return [_check_call(value) for value in self.values(data)]

    def replies(self, data: bytes) -> list[Reply]:
        return [_check_reply(value) for value in self.values(data)]

    def values(self, data: bytes) -> list[Any]:
        """The decoded bodies of the frames that are complete."""
        buffer = self._buffer
        buffer += data
        values: list[Any] = []
        start = 0
        try:
            while len(buffer) - start >= HEADER.size:
                length = HEADER.unpack_from(buffer, start)[0]
                if length > self._limits.frame:
                    raise BadFrame(f"a frame of {length} bytes")
                end = start + HEADER.size + length
                if len(buffer) < end:
                    break
                if self._limits.at_once is not None and len(values) == self._limits.at_once:
                    raise BadFrame(f"more than {len(values)} frames at once")
                body = buffer[start + HEADER.size : end]
                if self._limits.values is not None:
                    codec.check_values(body, self._limits.values)
                values.append(codec.decode(body))
                start = end
        except codec.NotDecodable as error:
            raise BadFrame(str(error)) from None
        if start:
            del buffer[:start]
        return values


def _check_call(value: object) -> CallFrame:
    if type(value) is list and [type(part) for part in value] == [int, int, str, list, dict]:
        call = CallFrame(*value)
        if all(type(name) is str for name in call.kwargs):
            return call
    raise BadFrame("it is not a call")


def _check_reply(value: object) -> Reply:
    if type(value) is list and len(value) == 3 and type(value[0]) is int:
        error = value[2]
        if error is None or (type(error) is list and [type(word) for word in error] == [str, str]):
            return Reply(*value)
    raise BadFrame("it is not a reply")


def pack_message(message: list[Any]) -> bytes:
    """A frame with any message. Raises `codec.NotEncodable`."""
    data = codec.encode(message)
    codec.check_keys(message)
    return _with_length(data)


def _with_length(data: bytes) -> bytes:
    if len(data) > MAX_FRAME:
        raise codec.NotEncodable(f"it takes {len(data) >> 20} MiB; a frame has at most {MAX_FRAME >> 20}")
    return HEADER.pack(len(data)) + data


def _check_cell(cell: CellResult) -> None:
    """The sender may be a server elsewhere, so every field is checked."""
    texts = (cell.stdout, cell.stderr, cell.value or "", cell.error or "")
    flags = (cell.timed_out, cell.alive, cell.replaced)
    good = all(isinstance(text, str) for text in texts) and all(isinstance(flag, bool) for flag in flags)
    good = good and (cell.limit is None or cell.limit in SANDBOX_LIMITS)
    if not good or not isinstance(cell.images, tuple) or not all(isinstance(image, bytes) for image in cell.images):
        raise ValueError("its fields have other types")


codec.register(CellResult, _check_cell)
