"""A trajectory to bytes and back, without loss.

Comes in: a `Trajectory`. Goes out: compressed JSON, and from it an equal `Trajectory`: ids and log-probs to the last bit,
tuples as tuples, texts with half surrogates. What JSON cannot hold (an object in a task's fields, an image) is kept as an
`Opaque` that says what stood there. No pickle: reading a run somebody sent runs none of their code.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..types import Completion, Message, Outcome, Task, ToolCall, ToolResult, Trajectory, Turn

FORMAT = 1
MAX_DEPTH = 60
MAX_REPR = 2000
_TAG = "$"  # {"$": kind, "v": value} stands for what JSON has no word for


@dataclass(frozen=True, slots=True)
class Opaque:
    """Something that could not be stored: its type, and a text in its place."""

    type: str
    text: str


def encode(trajectory: Trajectory) -> bytes:
    return zlib.compress(json.dumps(to_json(trajectory), separators=(",", ":")).encode("ascii"))


def decode(data: bytes) -> Trajectory:
    try:
        return from_json(json.loads(zlib.decompress(data)))
    except (zlib.error, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"a stored trajectory cannot be read: {type(error).__name__}: {error}") from error


def to_json(trajectory: Trajectory) -> dict[str, Any]:
    """Plain JSON values; what `export_jsonl` writes, too."""
    return {
        "format": FORMAT,
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
    if data["format"] != FORMAT:
        raise ValueError(f"format {data['format']}, but this version reads format {FORMAT}")
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
    # Most fields of most messages are empty; they are left out.
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


def pack(value: Any, depth: int = 0) -> Any:
    """A value as JSON, with tags where JSON has no word for it. A repeated pack changes nothing more."""
    if value is None or isinstance(value, (str, bool, float)):
        return value
    if isinstance(value, int):
        # Python refuses to print the digits of a huge one.
        return value if value.bit_length() <= 10_000 else {_TAG: "int", "v": hex(value)}
    if isinstance(value, Opaque):
        return {_TAG: "opaque", "v": [value.type, value.text]}
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a scalar of numpy or torch
        return pack(value.item(), depth)
    if depth >= MAX_DEPTH:
        return pack(Opaque(_type_name(value), "nested too deep to be stored"))
    if isinstance(value, list):
        return [pack(part, depth + 1) for part in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "v": [pack(part, depth + 1) for part in value]}
    if isinstance(value, Mapping):
        if _TAG not in value and all(isinstance(key, str) for key in value):
            return {key: pack(part, depth + 1) for key, part in value.items()}
        return {_TAG: "dict", "v": [[pack(key, depth + 1), pack(part, depth + 1)] for key, part in value.items()]}
    return pack(Opaque(_type_name(value), _safe_repr(value)))


def unpack(value: Any) -> Any:
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
    """Images would make a run of gigabytes; what is kept is a note of what stood there."""
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
    except Exception as error:  # noqa: BLE001 - a repr is anybody's code, and a trajectory must not be lost to it
        return f"<its repr failed: {type(error).__name__}>"
    return text if len(text) <= MAX_REPR else text[:MAX_REPR] + "..."
