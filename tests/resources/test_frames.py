"""Frames: what travels unchanged, what the sender refuses, and forged bytes, which raise BadFrame and nothing else."""

from __future__ import annotations

import random
import struct
import time
from typing import Any

import pytest

from agentfly.codec import NotDecodable, NotEncodable, check_values, encode
from agentfly.errors import ToolError, WorldError
from agentfly.resources.rpc import frames
from agentfly.resources.rpc.frames import (
    SANDBOXED,
    BadFrame,
    FrameReader,
    RemoteError,
    error_of,
    pack_call,
    pack_error,
    pack_value,
)
from agentfly.sandbox.limits import CellResult
from agentfly.types import ToolResult

from .worlds import TASK

VALUES: list[Any] = [
    None,
    (1, [2, (3,)]),
    b"\x00\xff",
    2**80,
    "\ud800 half a pair",
    {"a": {"b": ()}},
    TASK,
    ToolResult(observation="o", image=b"png", reward=0.5),
    CellResult("out", "err", "1", None, (b"png",), True, False, True),
]


def framed(value: Any) -> bytes:
    data = encode(value)
    return struct.pack(">I", len(data)) + data


@pytest.mark.parametrize("value", VALUES)
def test_arguments_and_values_travel_unchanged_however_the_bytes_are_cut(value: Any) -> None:
    call, reply = pack_call(7, 3, "move", [value, 1], {"to": value}), pack_value(7, value)
    for step in (1, 3, 1000):
        reader, found = FrameReader(), []
        for start in range(0, 2 * len(call), step):
            found += reader.calls((call * 2)[start : start + step])
        assert found == [(7, 3, "move", [value, 1], {"to": value})] * 2
    assert FrameReader().replies(reply) == [(7, value, None)]


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({1, 2}, "a set has no encoded form"),
        ([{1: "one"}], "the key 1 of a dict is not a string"),
        (ToolResult(observation="o", image={2: "two"}), "the key 2 of a dict is not a string"),
        (object(), "a object has no encoded form"),
    ],
)
def test_the_sender_refuses_what_cannot_travel(value: Any, sentence: str) -> None:
    with pytest.raises(NotEncodable, match=sentence):
        pack_value(1, value)
    with pytest.raises(NotEncodable, match=sentence):
        pack_call(1, 0, "move", [value], {})


def test_the_sender_refuses_a_value_that_is_nested_too_deeply_or_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(NotEncodable):
        pack_value(1, deep)
    monkeypatch.setattr(frames, "MAX_FRAME", 2 << 20)
    with pytest.raises(NotEncodable, match="it takes 3 MiB; a frame has at most 2"):
        pack_value(1, bytes(3 << 20))


@pytest.mark.parametrize(
    "message",
    [
        None, [], {"id": 1}, [1, 2], [[], None, None], ["1", None, None], [True, None, None], [1, None, "text"],
        [1, None, ["type"]], [1, None, ["type", 3]], [1, 0, "move", {}, {}], [1, 0, "move", [], []], [1, 0, 3, [], {}],
        [1, [], "move", [], {}], [1, 0, "move", [], {b"name": 1}],
    ],
)  # fmt: skip
def test_a_frame_that_is_neither_a_call_nor_a_reply_is_bad(message: Any) -> None:
    with pytest.raises(BadFrame, match="not a call"):
        FrameReader().calls(framed(message))
    if not (isinstance(message, list) and len(message) == 3 and message[1:] == [None, None] and type(message[0]) is int):
        with pytest.raises(BadFrame, match="not a reply"):
            FrameReader().replies(framed(message))


def test_forged_bytes_raise_bad_frame_and_nothing_else() -> None:
    rng = random.Random(1)
    good = [pack_value(1, value)[4:] for value in VALUES]
    bad = 0
    for number in range(4000):
        data = bytearray(rng.choice(good)) if number % 4 else bytearray(rng.randbytes(rng.randrange(1, 60)))
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        for read in (FrameReader().calls, FrameReader().replies):
            try:
                read(struct.pack(">I", len(data)) + data)
            except BadFrame:
                bad += 1
    assert bad > 4000
    with pytest.raises(BadFrame, match="a frame of 4294967295 bytes"):
        FrameReader().replies(b"\xff" * 4)


def test_a_forged_cell_result_is_bad() -> None:
    for wrong in (CellResult(stdout=3), CellResult(images=[b"png"]), CellResult(images=("png",)), CellResult(alive=1)):  # type: ignore[arg-type]
        with pytest.raises(BadFrame, match="CellResult"):
            FrameReader().replies(pack_value(1, wrong))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ToolError("for the model"), ToolError("for the model")),
        (WorldError("gone"), WorldError("gone")),
        (KeyError("name"), KeyError("name")),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), RemoteError),
        (RemoteError("very odd", "Strange"), RemoteError("very odd", "Strange")),
        (SystemExit(3), RemoteError),
    ],
)
def test_an_exception_returns_as_its_type_if_that_is_known_here(error: BaseException, expected: Any) -> None:
    (reply,) = FrameReader().replies(pack_error(1, error))
    assert reply.error is not None
    found = error_of(reply.error)
    kind = expected if isinstance(expected, type) else type(expected)
    assert type(found) is kind
    if not isinstance(expected, type):
        assert str(found) == str(expected)


@pytest.mark.parametrize("value", [*VALUES, 1.5, -(2**40), 2**63, [-1, 200, 70_000, 2**33], "x" * 300, b"y" * 70_000])
def test_the_headers_alone_tell_how_many_values_there_are(value: Any) -> None:
    data = encode([value] * 3)
    check_values(data, len(data))
    exact = next(most for most in range(len(data) + 1) if _passes(data, most))
    if not isinstance(value, (dict, list, tuple)) and type(value).__module__ == "builtins":
        assert exact == 4
    assert not _passes(data, exact - 1)


def _passes(data: bytes, most: int) -> bool:
    try:
        check_values(data, most)
    except NotDecodable:
        return False
    return True


@pytest.mark.parametrize(
    "body",
    [
        b"\x93\x01" + b"\xdd" + struct.pack(">I", 8_000_000) + b"\x90" * 8_000_000 + b"\xc0",
        b"\x93\x01" + b"\xc9" + struct.pack(">I", 8_000_006) + b"\x01\xdd" + struct.pack(">I", 8_000_000) + b"\x90" * 8_000_000,
        b"\x93\x01" + b"\xdf" + struct.pack(">I", 4_000_000) + b"\xa0\xc0" * 4_000_000 + b"\xc0",
        b"\x93\x01" + (b"\xdd\0\0\0\x05" + b"\x01" * 4) * 200_000 + b"\xc0\xc0",
    ],
    ids=["lists", "a tuple of lists", "a dict", "lists in lists"],
)
def test_a_sandbox_cannot_send_millions_of_values(body: bytes) -> None:
    begin = time.process_time()
    with pytest.raises(BadFrame, match="more than 100000 values"):
        FrameReader(SANDBOXED).replies(struct.pack(">I", len(body)) + body)
    assert time.process_time() - begin < 1


def test_a_sandbox_cannot_send_a_flood_of_frames_or_a_frame_that_is_too_long() -> None:
    with pytest.raises(BadFrame, match="more than 1000 frames"):
        FrameReader(SANDBOXED).replies(pack_value(7, None) * 5000)
    with pytest.raises(BadFrame, match="a frame of 16777217 bytes"):
        FrameReader(SANDBOXED).replies(struct.pack(">I", (16 << 20) + 1))
    assert len(FrameReader().replies(pack_value(7, None) * 5000)) == 5000
    assert FrameReader(SANDBOXED).replies(pack_value(1, "x" * 3_000_000)) == [(1, "x" * 3_000_000, None)]


@pytest.mark.parametrize("name", ["ConfigError", "InvariantError", "RewardError", "AgentFlyError", "MissingExtra"])
def test_an_error_that_would_stop_the_run_is_the_worlds_failure_if_a_sandbox_sends_it(name: str) -> None:
    assert type(error_of([name, "stop"])).__name__ == name
    found = error_of([name, "stop"], trusted=False)
    assert type(found) is WorldError
    assert str(found) == f"{name}: stop"
    assert type(error_of(["ToolError", "for the model"], trusted=False)) is ToolError
