"""Trajectories to bytes and back.

    bytes    records in MessagePack and packed arrays of numbers, see `bodies.packed`
    JSON     the lines of `export_jsonl`

A round trip keeps log-probs to the last bit, tuples, large integers, dicts with any keys and texts with half a surrogate pair.
Images, bytes and objects are replaced by an `Opaque`. Reading uses no pickle, so a run from somebody else executes no code.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from .. import codec
from ..errors import ConfigError, InvariantError
from ..types import Completion, Message, Outcome, Task, ToolCall, ToolResult, Trajectory, Turn
from .bodies import packed
from .bodies.opaque import SCALARS, Opaque, hashable, left_out, simplify
from .bodies.texts import texts_of

JSON_FORMAT = 1
_HEAD = 5  # the mark, and the length of the records
MAX_SEARCHED = 64 << 20
"""Bytes of one trajectory that a search reads."""
_TAG = "$"  # {"$": kind, "v": value} is a value that JSON cannot express
_NUMBERS = frozenset(("context_ids", "token_ids", "logprobs", "versions"))  # lists of numbers
# The class of the records that a field of a trajectory, or of a part of it, holds. In JSON a turn has the fields of its
# completion, whose `tool_calls` are called `native_calls` there.
_RECORDS: dict[str, type] = {
    "task": Task, "messages": Message, "turns": Turn, "results": ToolResult,
    "tool_calls": ToolCall, "calls": ToolCall,
}  # fmt: skip


def encode(trajectory: Trajectory) -> bytes:
    """Raises ValueError if a token id is not an integer or a log-prob is not a number."""
    try:
        try:
            return packed.encode(trajectory)
        except (codec.NotEncodable, RecursionError):  # a value of another type than its field has, or nested too deep
            return packed.encode(_simplify(trajectory))
    except packed.NotNumbers as error:
        raise ValueError(f"trajectory {trajectory.id!r}: {error}") from None


def decode(data: bytes) -> Trajectory:
    """Raises ConfigError if the bytes are not a stored trajectory."""
    try:
        if data[:1] != packed.MARK:
            raise ValueError("the bytes begin with another mark")
        trajectory = packed.decode(data)
    except (zlib.error, struct.error, ValueError, LookupError, TypeError, AttributeError, InvariantError) as error:
        raise ConfigError(f"a stored trajectory cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(trajectory, Trajectory):
        raise ConfigError(f"a stored trajectory cannot be read: the bytes hold a {type(trajectory).__name__}")
    return trajectory


def body_contains(data: bytes, needle: bytes) -> bool:
    """Whether a text occurs in a stored trajectory. `needle` is its UTF-8 in lower case (ASCII only).

    Searches the bytes without decoding them, about 20 times faster than `decode`.
    """
    try:
        # Past the records come packed numbers, which decompressobj leaves alone.
        return needle in zlib.decompressobj().decompress(data[_HEAD:], MAX_SEARCHED).lower()
    except zlib.error:
        return False


def body_text(data: bytes) -> str:
    """The texts of a stored trajectory for the full-text index; all that can be decompressed of one that cannot be read."""
    try:
        return texts_of(decode(data))
    except ConfigError:
        with contextlib.suppress(zlib.error):
            return zlib.decompressobj().decompress(data[_HEAD:], MAX_SEARCHED).decode("utf-8", "replace")
        return ""


def _simplify(value: Any, field: str = "") -> Any:
    """A copy of a trajectory, or of the value of one of its fields, that the codec can encode."""
    if type(value) in SCALARS:
        return value
    if field in _NUMBERS:
        return value if type(value) is list else list(value)
    if field in ("fields", "arguments"):
        return simplify(value)
    if field == "image":
        return left_out(value)
    if field == "images":
        return tuple(map(left_out, value))
    if isinstance(value, list | tuple):
        return type(value)([_simplify(part) for part in value])
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: _simplify(getattr(value, each.name), each.name) for each in fields(value)})
    return value


def to_json(trajectory: Trajectory) -> dict[str, Any]:
    """The trajectory as JSON values, as `export_jsonl` writes them."""
    return {"format": JSON_FORMAT, **_write(_simplify(trajectory))}


def from_json(data: Mapping[str, Any]) -> Trajectory:
    if data["format"] != JSON_FORMAT:
        raise ValueError(f"format {data['format']}, but this version reads the JSON format {JSON_FORMAT}")
    trajectory: Trajectory = _read(Trajectory, data)
    return trajectory


def _write(value: Any, field: str = "") -> Any:
    if field == "fields":
        return {name: _tag(part) for name, part in value.items()}
    if field in ("arguments", "image"):
        return _tag(value)
    if field == "images":
        return [_tag(image) for image in value]
    if isinstance(value, list | tuple):
        return [_write(part) for part in value]
    if isinstance(value, Outcome):
        return value.value
    if not is_dataclass(value):
        return value
    written = {each.name: _write(getattr(value, each.name), each.name) for each in fields(value)}
    if isinstance(value, Turn):
        reply = written.pop("completion")
        written |= {"native_calls": reply.pop("tool_calls"), **reply}
    if isinstance(value, Message):  # most messages have only a role and a content
        written = {name: part for name, part in written.items() if part not in (None, [])}
    return written


def _read(cls: type, data: Mapping[str, Any]) -> Any:
    """The record that `_write` wrote. Fields with a default may be absent."""
    values: dict[str, Any] = {}
    for name in [each.name for each in fields(cls) if each.name in data]:
        value = data[name]
        if name == "task":
            value = _read(Task, value)
        elif name in _RECORDS:
            parts = [_read(_RECORDS[name], part) for part in value]
            value = parts if cls is Trajectory else tuple(parts)
        elif name == "fields":
            value = {key: _untag(part) for key, part in value.items()}
        elif name == "images":
            value = tuple(map(_untag, value))
        elif name in ("arguments", "image"):
            value = _untag(value)
        elif name == "outcome":
            value = Outcome(value)
        values[name] = value
    if cls is Turn:
        values["completion"] = _read(Completion, {**data, "tool_calls": data["native_calls"]})
    return cls(**values)


def _tag(value: object) -> Any:
    """The value in JSON, with tags for what JSON cannot express."""
    if isinstance(value, list):
        return [_tag(part) for part in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "v": [_tag(part) for part in value]}
    if isinstance(value, dict):
        if _TAG not in value and all(isinstance(key, str) for key in value):
            return {key: _tag(part) for key, part in value.items()}
        return {_TAG: "dict", "v": [[_tag(key), _tag(part)] for key, part in value.items()]}
    if isinstance(value, Opaque):
        return {_TAG: "opaque", "v": [value.type, value.text]}
    if type(value) is int and value.bit_length() > 10_000:  # json refuses to write this many digits
        return {_TAG: "int", "v": hex(value)}
    return value


def _untag(value: object) -> Any:
    """The value that `_tag` was called with. Raises ValueError for an unknown tag."""
    if isinstance(value, list):
        return [_untag(part) for part in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: _untag(part) for key, part in value.items()}
    inner = value["v"]
    if kind == "int":
        return int(inner, 16)
    if kind == "opaque":
        return Opaque(*inner)
    if kind == "tuple":
        return tuple(_untag(part) for part in inner)
    if kind == "dict":
        return {hashable(_untag(key)): _untag(part) for key, part in inner}
    raise ValueError(f"unknown tag {kind!r}")
