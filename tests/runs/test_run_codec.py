"""A trajectory comes back from the store as it went in."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.errors import ConfigError
from agentfly.runs import Opaque, decode, encode
from agentfly.types import Completion, Message, Outcome, Task, ToolCall, ToolResult, Trajectory, Turn

texts = st.text(st.characters(), max_size=20)  # half surrogates included
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(texts | st.integers(), inner, max_size=3),
    max_leaves=8,
)
calls = st.builds(ToolCall, texts, st.dictionaries(texts, json_values, max_size=3), texts, st.none() | texts)
messages = st.builds(
    Message, st.sampled_from(["system", "user", "assistant", "tool"]), texts, st.lists(calls, max_size=2).map(tuple),
    st.none() | texts, st.none() | texts,
)  # fmt: skip
results = st.builds(
    ToolResult, observation=texts, reward=st.none() | st.floats(-1, 1), done=st.booleans(),
    error=st.sampled_from([None, "unknown_tool", "bad_arguments", "raised", "timeout"]),
)  # fmt: skip


@st.composite
def turns(draw: Any) -> Turn:
    n = draw(st.integers(0, 5))
    completion = Completion(
        text=draw(texts),
        token_ids=draw(st.lists(st.integers(0, 2**31), min_size=n, max_size=n)),
        logprobs=draw(st.lists(st.floats(max_value=0, allow_nan=False), min_size=n, max_size=n)),
        versions=draw(st.lists(st.integers(0, 99), min_size=n, max_size=n)),
        stop=draw(st.sampled_from(["stop", "length"])),
        tool_calls=tuple(draw(st.lists(calls, max_size=2))),
    )
    pairs = draw(st.lists(st.tuples(calls, results), max_size=2))
    return Turn(
        draw(st.lists(st.integers(0, 999), max_size=4)),
        draw(st.booleans()),
        completion,
        tuple(call for call, _ in pairs),
        tuple(result for _, result in pairs),
        draw(st.floats(-5, 5)),
    )


trajectories = st.builds(
    Trajectory,
    id=texts,
    task=st.builds(Task, texts, st.lists(messages, max_size=2).map(tuple), st.dictionaries(texts, json_values, max_size=3)),
    chain=st.integers(0, 9),
    messages=st.lists(messages, max_size=3),
    turns=st.lists(turns(), max_size=3),
    outcome=st.sampled_from(list(Outcome)),
    error=st.none() | texts,
    prediction=texts,
    reward=st.none() | st.floats(-5, 5),
    components=st.dictionaries(texts, st.floats(-5, 5), max_size=3),
    seconds=st.floats(0, 1e6),
)


@settings(max_examples=60)
@given(trajectories)
def test_every_trajectory_comes_back_equal(trajectory: Trajectory) -> None:
    again = decode(encode(trajectory))
    assert again == trajectory
    assert repr(again) == repr(trajectory)  # and of the same types: 1 is not 1.0 or True


def simple(**fields: Any) -> Trajectory:
    return Trajectory("c1", Task("t1", (Message("user", "hi"),), fields))


def fields_after(**fields: Any) -> Any:
    return decode(encode(simple(**fields))).task.fields


def test_log_probs_keep_every_bit() -> None:
    logprobs = [-0.1, -1e-300, -5e-324, -0.0, -math.inf, -1 / 3]
    trajectory = simple()
    n = len(logprobs)
    trajectory.turns = [Turn([1], True, Completion(text="", token_ids=[1] * n, logprobs=logprobs, versions=[0] * n))]
    again = decode(encode(trajectory)).turns[0].completion.logprobs
    assert [struct.pack("d", value) for value in again] == [struct.pack("d", value) for value in logprobs]


def test_what_json_cannot_hold_is_kept_as_a_flagged_text() -> None:
    class Secret:
        def __repr__(self) -> str:
            return "<a secret>"

    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

    kept = fields_after(secret=Secret(), broken=Broken(), raw=b"\0", nested=[{"x": {1, 2}}], huge=object, long={"a" * 9000})
    assert kept["secret"].text == "<a secret>"
    assert kept["secret"].type.endswith("Secret")
    assert kept["broken"].text == "<its repr failed: RuntimeError>"
    assert kept["raw"] == Opaque("bytes", "b'\\x00'")
    assert kept["nested"] == [{"x": Opaque("set", "{1, 2}")}]
    assert len(kept["long"].text) < 3000


def test_numbers_of_numpy_become_plain_ones_and_huge_ones_survive() -> None:
    kept = fields_after(a=numpy.float32(0.5), b=numpy.int64(7), c=10**5000, d=math.inf, e={"$": "tuple", "v": []})
    assert kept == {"a": 0.5, "b": 7, "c": 10**5000, "d": math.inf, "e": {"$": "tuple", "v": []}}


def test_nesting_without_end_is_cut_not_followed() -> None:
    deep: list[Any] = []
    deep.append(deep)
    kept = fields_after(deep=deep)["deep"]
    for _ in range(40):
        (kept,) = kept if isinstance(kept, list) else [kept]
    assert kept == Opaque("list", "nested too deep to be stored")


def test_images_are_left_out_with_a_note_and_a_second_trip_changes_nothing() -> None:
    class Image:
        size = (64, 32)

    trajectory = simple()
    trajectory.messages = [Message("user", "look", images=(Image(),))]
    trajectory.turns = [
        Turn([1], True, Completion(text="x"), (ToolCall("see"),), (ToolResult(observation="o", image=Image()),))
    ]
    once = decode(encode(trajectory))
    (image,) = once.messages[0].images
    assert image.text == "image 64x32 left out of the store"
    assert once.turns[0].results[0].image == image
    assert decode(encode(once)) == once


class Image:
    size = (64, 32)


def sample() -> Trajectory:
    """The trajectory in format_1.b85, which the version before format 2 has written."""
    call = ToolCall("add", {"a": 1, "b": (2, 3)}, "c1")
    reply = Completion(text="84 \ud800", token_ids=[8, 4], logprobs=[-0.25, -0.5], versions=[3, 3], tool_calls=(call,))
    fields = {"answer": 84, "keys": {1: "x", (2,): None}, "large": 10**5000, "thing": {3}}
    messages = [
        Message("user", "?", images=(Image(),)), Message("assistant", "84", (call,)),
        Message("tool", "5", name="add", tool_call_id="c1"),
    ]  # fmt: skip
    results = (ToolResult(observation="5", image=Image(), reward=0.5, done=True),)
    return Trajectory(
        "a\ud800", Task("t1", (Message("user", "?"),), fields), 2, messages, [Turn([1, 2], True, reply, (call,), results, 0.5)],
        Outcome.MAX_TURNS, "late", "84", 1.0, {"exact": 1.0}, 0.25,
    )  # fmt: skip


def test_a_trajectory_of_format_1_reads_the_same_as_one_stored_now() -> None:
    old = decode(base64.b85decode((Path(__file__).parent / "format_1.b85").read_text().strip()))
    new = decode(encode(sample()))
    assert old == new
    assert old.turns[0].results[0].image == Opaque("test_run_codec.Image", "image 64x32 left out of the store")


def test_ids_in_arrays_and_values_of_derived_types_become_plain_ones() -> None:
    class Name(str):
        pass

    trajectory = simple(name=Name("x"), many=(Name("y"),))
    arrays: Any = numpy.array([1, 2])
    reply = Completion(text="", token_ids=arrays, logprobs=numpy.array([-0.5, -1.0]), versions=[0, 0])  # type: ignore[arg-type]
    trajectory.turns = [Turn(arrays, True, reply)]
    again = decode(encode(trajectory))
    assert (type(again.task.fields["name"]), again.task.fields["many"]) == (str, ("y",))
    assert again.turns[0].context_ids == again.turns[0].completion.token_ids == [1, 2]
    assert again.turns[0].completion.logprobs == [-0.5, -1.0]


def test_tuples_nested_without_measure_are_cut() -> None:
    deep: Any = ()
    for _ in range(300):
        deep = (deep,)
    assert "nested too deep" in repr(fields_after(deep=deep))


JSON = [zlib.compress(text) for text in (b"{}", b'{"format": 99}', b"[1]")]


@pytest.mark.parametrize("data", [b"", b"junk", b"\x02", b"\x02" + zlib.compress(b"\x01"), *JSON])
def test_broken_bytes_are_one_sentence(data: bytes) -> None:
    with pytest.raises(ConfigError, match="a stored trajectory cannot be read"):
        decode(data)
