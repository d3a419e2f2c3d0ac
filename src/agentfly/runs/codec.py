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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
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
    except codec.NotEncodable:  # an object among the fields, or token ids in a numpy array
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


def _is_plain(trajectory: Trajectory) -> bool:
    """Whether the trajectory holds neither images nor bytes, which the codec would store in full."""
    if any(message.images for message in (*trajectory.task.messages, *trajectory.messages)):
        return False
    if any(result.image is not None for turn in trajectory.turns for result in turn.results):
        return False
    try:
        return type(trajectory.task.fields) is dict and not any(map(_holds_bytes, _free_values(trajectory)))
    except RecursionError:
        return False


def _free_values(trajectory: Trajectory) -> Iterator[Any]:
    """The values of any type: the fields of the task and the arguments of the calls."""
    yield trajectory.task.fields
    for message in (*trajectory.task.messages, *trajectory.messages):
        yield from (call.arguments for call in message.tool_calls)
    for turn in trajectory.turns:
        yield from (call.arguments for call in (*turn.calls, *turn.completion.tool_calls))


def _holds_bytes(value: Any) -> bool:
    if type(value) in _SCALARS:
        return False
    if isinstance(value, dict):
        return any(_holds_bytes(key) or _holds_bytes(part) for key, part in value.items())
    if isinstance(value, list | tuple):
        return any(map(_holds_bytes, value))
    return isinstance(value, bytes)


def _simplify(trajectory: Trajectory) -> Trajectory:
    """A copy that the codec can encode."""
    task = trajectory.task
    fields = {name: simplify(value) for name, value in task.fields.items()}
    return replace(
        trajectory,
        task=replace(task, messages=tuple(map(_simplify_message, task.messages)), fields=fields),
        messages=[_simplify_message(message) for message in trajectory.messages],
        turns=[_simplify_turn(turn) for turn in trajectory.turns],
    )


def _simplify_message(message: Message) -> Message:
    return replace(message, tool_calls=_simplify_calls(message.tool_calls), images=tuple(map(_left_out, message.images)))


def _simplify_calls(calls: tuple[ToolCall, ...]) -> tuple[ToolCall, ...]:
    return tuple(replace(call, arguments=simplify(call.arguments)) for call in calls)


def _simplify_turn(turn: Turn) -> Turn:
    reply = turn.completion
    completion = replace(
        reply,
        token_ids=[int(token) for token in reply.token_ids],
        logprobs=[float(logprob) for logprob in reply.logprobs],
        versions=[int(version) for version in reply.versions],
        tool_calls=_simplify_calls(reply.tool_calls),
    )
    results = (result if result.image is None else replace(result, image=_left_out(result.image)) for result in turn.results)
    return replace(
        turn,
        context_ids=[int(token) for token in turn.context_ids],
        completion=completion,
        calls=_simplify_calls(turn.calls),
        results=tuple(results),
    )


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
    return {
        "format": JSON_FORMAT,
        "id": trajectory.id,
        "task": {
            "id": trajectory.task.id,
            "messages": [_message(message) for message in trajectory.task.messages],
            "fields": {name: pack(value) for name, value in trajectory.task.fields.items()},
        },
        "chain": trajectory.chain,
        "messages": [_message(message) for message in trajectory.messages],
        "turns": [_turn(turn) for turn in trajectory.turns],
        "outcome": trajectory.outcome.value,
        "error": trajectory.error,
        "prediction": trajectory.prediction,
        "reward": trajectory.reward,
        "components": trajectory.components,
        "seconds": trajectory.seconds,
    }


def from_json(data: Mapping[str, Any]) -> Trajectory:
    if data["format"] != JSON_FORMAT:
        raise ValueError(f"format {data['format']}, but this version reads the JSON format {JSON_FORMAT}")
    task = data["task"]
    return Trajectory(
        id=data["id"],
        task=Task(
            task["id"],
            tuple(_read_message(message) for message in task["messages"]),
            {name: unpack(value) for name, value in task["fields"].items()},
        ),
        chain=data["chain"],
        messages=[_read_message(message) for message in data["messages"]],
        turns=[_read_turn(turn) for turn in data["turns"]],
        outcome=Outcome(data["outcome"]),
        error=data["error"],
        prediction=data["prediction"],
        reward=data["reward"],
        components=data["components"],
        seconds=data["seconds"],
    )


def _message(message: Message) -> dict[str, Any]:
    # Empty fields are left out: most messages have only a role and a content.
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        found["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.images:
        found["images"] = [pack(_left_out(image)) for image in message.images]
    return found


def _read_message(data: Mapping[str, Any]) -> Message:
    return Message(
        data["role"],
        data["content"],
        tuple(_read_call(call) for call in data.get("tool_calls", ())),
        data.get("name"),
        data.get("tool_call_id"),
        tuple(unpack(image) for image in data.get("images", ())),
    )


def _call(call: ToolCall) -> dict[str, Any]:
    return {"name": call.name, "arguments": pack(call.arguments), "id": call.id, "error": call.error}


def _read_call(data: Mapping[str, Any]) -> ToolCall:
    return ToolCall(data["name"], unpack(data["arguments"]), data["id"], data["error"])


def _turn(turn: Turn) -> dict[str, Any]:
    reply = turn.completion
    return {
        "context_ids": [int(token) for token in turn.context_ids],
        "restarts": turn.restarts,
        "text": reply.text,
        "token_ids": [int(token) for token in reply.token_ids],
        "logprobs": [float(logprob) for logprob in reply.logprobs],
        "versions": [int(version) for version in reply.versions],
        "stop": reply.stop,
        "native_calls": [_call(call) for call in reply.tool_calls],
        "calls": [_call(call) for call in turn.calls],
        "results": [_result(result) for result in turn.results],
        "reward": float(turn.reward),
    }


def _read_turn(data: Mapping[str, Any]) -> Turn:
    completion = Completion(
        text=data["text"],
        token_ids=data["token_ids"],
        logprobs=data["logprobs"],
        versions=data["versions"],
        stop=data["stop"],
        tool_calls=tuple(_read_call(call) for call in data["native_calls"]),
    )
    return Turn(
        data["context_ids"],
        data["restarts"],
        completion,
        tuple(_read_call(call) for call in data["calls"]),
        tuple(_read_result(result) for result in data["results"]),
        data["reward"],
    )


def _result(result: ToolResult) -> dict[str, Any]:
    return {
        "observation": result.observation,
        "image": None if result.image is None else pack(_left_out(result.image)),
        "reward": result.reward,
        "done": result.done,
        "error": result.error,
    }


def _read_result(data: Mapping[str, Any]) -> ToolResult:
    return ToolResult(
        observation=data["observation"],
        image=unpack(data["image"]),
        reward=data["reward"],
        done=data["done"],
        error=data["error"],
    )


def pack(value: Any) -> Any:
    """The value in JSON, with tags for what JSON cannot express."""
    return _tag(simplify(value))


def _tag(value: Any) -> Any:
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


def unpack(value: Any) -> Any:
    """The value that `pack` was called with. Raises ValueError for an unknown tag."""
    if isinstance(value, list):
        return [unpack(part) for part in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: unpack(part) for key, part in value.items()}
    inner = value["v"]
    if kind == "int":
        return int(inner, 16)
    if kind == "opaque":
        return Opaque(*inner)
    if kind == "tuple":
        return tuple(unpack(part) for part in inner)
    if kind == "dict":
        return {_hashable(unpack(key)): unpack(part) for key, part in inner}
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
