"""Trajectories to bytes and back.

    format 2    one byte (2), then zlib (level 1) over MessagePack of `agentfly.codec`: what `encode` writes
    format 1    zlib over JSON: runs stored by earlier versions, and (uncompressed) the lines of `export_jsonl`

A round trip keeps log-probs to the last bit, tuples, large integers, dicts with any keys and texts with half a surrogate pair.
Images, bytes and objects are replaced by an `Opaque`. Reading uses no pickle, so a run from somebody else executes no code.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from .. import codec
from ..errors import ConfigError
from ..types import Completion, Message, Outcome, Task, ToolCall, ToolResult, Trajectory, Turn

JSON_FORMAT = 1
MAX_DEPTH = 40  # of a field or an argument; the codec bounds how deep tuples and records may nest
MAX_REPR = 2000
_BINARY = b"\x02"  # a zlib stream never begins with this byte, so it marks format 2
_TAG = "$"  # {"$": kind, "v": value} is a value that JSON cannot express
_SCALARS = frozenset((str, int, float, bool, type(None)))
_NUMBERS = frozenset(("context_ids", "token_ids", "logprobs", "versions"))  # lists of numbers, which need no copy
# The class of the records that a field of a trajectory, or of a part of it, holds. In format 1 a turn has the fields of its
# completion, whose `tool_calls` are called `native_calls` there.
_RECORDS: dict[str, type] = {
    "task": Task, "messages": Message, "turns": Turn, "results": ToolResult,
    "tool_calls": ToolCall, "calls": ToolCall,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Opaque:
    """Stands in for a value that the store does not keep: the name of its type, and a text."""

    type: str
    text: str


codec.register(Opaque)


def encode(trajectory: Trajectory) -> bytes:
    """Raises ValueError if a token id is not an integer or a log-prob is not a number."""
    _check_numbers(trajectory)
    try:
        data = codec.encode(trajectory if _is_plain(trajectory) else _simplify(trajectory))
    except (codec.NotEncodable, RecursionError):  # an object among the fields, or token ids in a numpy array
        data = codec.encode(_simplify(trajectory))
    return _BINARY + zlib.compress(data, level=1)


def decode(data: bytes) -> Trajectory:
    """Reads both formats. Raises ConfigError if the bytes are not a stored trajectory."""
    try:
        if data[:1] != _BINARY:
            return from_json(json.loads(zlib.decompress(data)))
        found = codec.decode(zlib.decompress(data[1:]), any_keys=True)
    except (zlib.error, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"a stored trajectory cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(found, Trajectory):
        raise ConfigError(f"a stored trajectory cannot be read: the bytes hold a {type(found).__name__}")
    return found


def _check_numbers(trajectory: Trajectory) -> None:
    try:
        for turn in trajectory.turns:
            reply = turn.completion
            for ids in (turn.context_ids, reply.token_ids, reply.versions):
                array("q", ids)
            array("d", reply.logprobs)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"trajectory {trajectory.id!r} has a token id or log-prob that is not a number: {error}") from None


def _is_plain(value: Any, field: str = "") -> bool:
    """Whether the value holds neither images nor bytes, which the codec would store in full."""
    if type(value) in _SCALARS or field in _NUMBERS:
        return True
    if field in ("image", "images"):
        return field == "images" and not value
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if is_dataclass(value):
        return all(_is_plain(getattr(value, each.name), each.name) for each in fields(value))
    return not isinstance(value, bytes)


def _simplify(value: Any, field: str = "") -> Any:
    """A copy of a trajectory, or of the value of one of its fields, that the codec can encode."""
    if type(value) in _SCALARS:
        return value
    if field in _NUMBERS:
        return value if type(value) is list else list(value)
    if field in ("fields", "arguments"):
        return simplify(value)
    if field == "image":
        return _left_out(value)
    if field == "images":
        return tuple(map(_left_out, value))
    if isinstance(value, list | tuple):
        return type(value)([_simplify(part) for part in value])
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: _simplify(getattr(value, each.name), each.name) for each in fields(value)})
    return value


def simplify(value: Any, depth: int = 0) -> Any:
    """The value made of None, bool, int, float, str, list, tuple, dict and `Opaque` only. Applying it twice changes nothing."""
    if type(value) in _SCALARS or isinstance(value, Opaque):
        return value
    if depth >= MAX_DEPTH:
        return Opaque(_type_name(value), "nested too deep to be stored")
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a scalar of numpy or torch
        return simplify(value.item(), depth + 1)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, list):
        return [simplify(part, depth + 1) for part in value]
    if isinstance(value, tuple):
        return tuple(simplify(part, depth + 1) for part in value)
    if isinstance(value, Mapping):
        return {_hashable(simplify(key, depth + 1)): simplify(part, depth + 1) for key, part in value.items()}
    return Opaque(_type_name(value), _safe_repr(value))


def to_json(trajectory: Trajectory) -> dict[str, Any]:
    """The trajectory as JSON values of format 1, as `export_jsonl` writes them."""
    return {"format": JSON_FORMAT, **_write(_simplify(trajectory))}


def from_json(data: Mapping[str, Any]) -> Trajectory:
    if data["format"] != JSON_FORMAT:
        raise ValueError(f"format {data['format']}, but this version reads the JSON format {JSON_FORMAT}")
    found: Trajectory = _read(Trajectory, data)
    return found


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
    found: dict[str, Any] = {}
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
        found[name] = value
    if cls is Turn:
        found["completion"] = _read(Completion, {**data, "tool_calls": data["native_calls"]})
    return cls(**found)


def _tag(value: Any) -> Any:
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


def _untag(value: Any) -> Any:
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
        return {_hashable(_untag(key)): _untag(part) for key, part in inner}
    raise ValueError(f"unknown tag {kind!r}")


def _hashable(key: Any) -> Any:
    return Opaque("list", repr(key)) if isinstance(key, (list, dict)) else key


def _left_out(image: Any) -> Opaque:
    """A note in place of an image: a run that stores its images grows to gigabytes."""
    if isinstance(image, Opaque):
        return image
    size = getattr(image, "size", None)
    shape = f" {size[0]}x{size[1]}" if isinstance(size, tuple) and len(size) == 2 else ""
    return Opaque(_type_name(image), f"image{shape} left out of the store")


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _safe_repr(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - a user's repr may raise anything, and the trajectory must still be stored
        return f"<its repr failed: {type(error).__name__}>"
    return text if len(text) <= MAX_REPR else text[:MAX_REPR] + "..."
