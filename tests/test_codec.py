"""The codec: every value that can be encoded returns unchanged, and forged bytes raise NotDecodable and nothing else."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import pytest

from agentfly.codec import MAX_EXTENSIONS, NotDecodable, NotEncodable, check_keys, decode, encode
from agentfly.types import Completion, Message, Task, ToolCall, ToolResult

TASK = Task("t", (Message("assistant", "", (ToolCall("f", {"a": (1, 2)}, "1"),)),), {"x": [1, {"y": None}]})


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**200),
        1.5,
        "\ud800 half a pair",
        b"\x00",
        [1, (2, [3])],
        {"a": {"b": ()}},
        TASK,
        ToolResult(observation="o", image=b"p"),
    ],
)
def test_a_value_returns_unchanged(value: Any) -> None:
    assert decode(encode(value)) == value


def test_tuples_may_be_nested_up_to_the_limit_and_no_deeper() -> None:
    value: Any = 1
    for _ in range(MAX_EXTENSIONS):
        value = (value,)
    assert decode(encode(value)) == value
    with pytest.raises(NotEncodable, match="nested too deeply"):
        encode((value,))


@pytest.mark.parametrize("levels", [MAX_EXTENSIONS + 1, 5000])
def test_forged_extensions_inside_each_other_are_refused_before_they_exhaust_the_stack(levels: int) -> None:
    data = b"\x01"
    for _ in range(levels):
        data = msgpack.packb(msgpack.ExtType(1, b"\x91" + data))
    with pytest.raises(NotDecodable, match="nested too deeply"):
        decode(data)


def test_a_forged_record_raises_not_decodable_whatever_its_own_checks_raise() -> None:
    whole = encode(Completion(token_ids=[1], logprobs=[0.0], versions=[0], text="x"))
    forged = whole.replace(encode([0.0]), b"\x90" + b"\xc0" * 9, 1)
    for data in (whole[:-1], forged, b"\xc7\x05\x03\x94\xa4Task"):
        with pytest.raises(NotDecodable):
            decode(data)


@pytest.mark.parametrize(
    "value", [{1: 2}, [{"a": ({7: 1},)}], Task("t", (), {"n": {3: 4}}), ToolResult(observation="o", image={5: 6})]
)
def test_a_key_that_is_not_a_string_is_found_inside_records_too(value: Any) -> None:
    with pytest.raises(NotEncodable, match=r"the key .* of a dict is not a string"):
        check_keys(value)
    with pytest.raises(NotDecodable):
        decode(encode(value))


def test_random_bytes_and_damaged_values_raise_nothing_else() -> None:
    rng = random.Random(0)
    good = encode([TASK, ToolResult(observation="o", reward=1.0), (1, 2**70)])
    refused = 0
    for _ in range(3000):
        data = bytearray(good) if rng.random() < 0.7 else bytearray(rng.randbytes(rng.randrange(1, 40)))
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            decode(bytes(data))
        except NotDecodable:
            refused += 1
    assert refused > 1000
