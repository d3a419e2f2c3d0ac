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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentfly import codec
from agentfly.errors import ConfigError
from agentfly.runs import Opaque, decode, encode
from agentfly.runs.bodies import packed
from agentfly.runs.codec import body_contains, from_json, to_json
from agentfly.types import Completion, Message, Outcome, Task, ToolCall, ToolResult, Trajectory, Turn

ids = st.integers(0, 2**16) | st.integers(-1, 2**31) | st.integers(-(2**70), 2**70)
logprobs = st.floats(max_value=0, allow_nan=False, width=32) | st.floats(max_value=0, allow_nan=False)
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
        token_ids=draw(st.lists(ids, min_size=n, max_size=n)),
        logprobs=draw(st.lists(logprobs, min_size=n, max_size=n)),
        versions=draw(
            st.lists(st.integers(0, 99), min_size=n, max_size=n) | st.integers(0, 99).map(lambda version: [version] * n)
        ),
        stop=draw(st.sampled_from(["stop", "length"])),
        tool_calls=tuple(draw(st.lists(calls, max_size=2))),
    )
    pairs = draw(st.lists(st.tuples(calls, results), max_size=2))
    return Turn(
        draw(st.lists(ids, max_size=4)),
        draw(st.booleans()),
        completion,
        tuple(call for call, _ in pairs),
        tuple(result for _, result in pairs),
        draw(st.floats(-5, 5)),
        draw(st.floats(0, 99)),
        draw(st.floats(0, 99)),
        state=draw(texts),
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
    draw=st.integers(0, 3),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(trajectories)
def test_every_trajectory_comes_back_equal(trajectory: Trajectory) -> None:
    again = decode(encode(trajectory))
    assert again == trajectory
    assert repr(again) == repr(trajectory)  # and of the same types: 1 is not 1.0 or True


def simple(**fields: Any) -> Trajectory:
    return Trajectory("c1", Task("t1", (Message("user", "hi"),), fields))


def fields_after(**fields: Any) -> Any:
    return decode(encode(simple(**fields))).task.fields


def with_numbers(token_ids: Any, logprobs: Any, versions: Any, context_ids: Any = (1,)) -> Trajectory:
    trajectory = simple()
    reply = Completion(text="", token_ids=token_ids, logprobs=logprobs, versions=versions)
    trajectory.turns = [Turn(context_ids, True, reply)]
    return trajectory


FLOAT32 = [-0.5, -0.0, 0.0, -math.inf, float(numpy.float32(-0.1)), -(2.0**-149), -3.0e38, -3.0e38]
FLOAT64 = [-0.1, -1e-300, -5e-324, -0.0, -math.inf, -1 / 3, -1e39, math.nan, -math.nan]


@pytest.mark.parametrize("logprobs", [FLOAT32[:4], FLOAT32, FLOAT64, [*FLOAT32[:4], math.nan], [math.nan], [-1e39], [-0.1], []])
def test_log_probs_keep_every_bit(logprobs: list[float]) -> None:
    n = len(logprobs)
    again = decode(encode(with_numbers([1] * n, logprobs, [0] * n))).turns[0].completion.logprobs
    assert [struct.pack("d", value) for value in again] == [struct.pack("d", value) for value in logprobs]


@pytest.mark.parametrize(
    "ids",
    [[], [0], [65535, 0], [65536, 1], [-1, 5], [2**31 - 1, -(2**31)], [2**31], [-(2**63), 2**63 - 1], [2**63, 1], [10**400, 3],
     [7] * 500, [2**40] * 9, [2**80] * 3, [1, 2, 1]],
)  # fmt: skip
def test_ids_of_any_size_come_back(ids: list[int]) -> None:
    again = decode(encode(with_numbers(ids, [-1.0] * len(ids), ids, ids))).turns[0]
    assert again.context_ids == again.completion.token_ids == again.completion.versions == ids
    assert all(type(each) is int for each in again.context_ids)


@pytest.mark.parametrize(
    ("ids", "logprobs"),
    [(["5"], [-1.0]), ([0.5], [-1.0]), ([None], [-1.0]), ("5", [-1.0]), (b"5", [-1.0]), ([5], ["x"]), ([5], [None]), ([5], "x"),
     ([5], [-(10**400)])],
)  # fmt: skip
def test_what_is_no_number_is_refused_with_the_name_of_the_chain(ids: Any, logprobs: Any) -> None:
    with pytest.raises(ValueError, match=r"trajectory 'c1': .* not a"):
        encode(with_numbers(ids, logprobs, [0]))
    with pytest.raises(ValueError, match=r"trajectory 'c1': .* not a"):
        encode(with_numbers([1], [-1.0], [1], ["an id"]))


def test_numbers_take_two_bytes_an_id_and_four_a_log_prob() -> None:
    """The ids of a small vocabulary, the float32 log-probs of an engine, and one version."""
    few, many = (encode(with_numbers(list(range(n)), [-0.5] * n, [7] * n, list(range(n)))) for n in (1000, 2000))
    assert len(many) - len(few) == pytest.approx(1000 * (2 + 2 + 4), abs=20)


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


def test_a_trajectory_that_was_packed_before_calls_and_chains_had_times_reads_the_same() -> None:
    old = decode(base64.b85decode((Path(__file__).parent / "format_3.b85").read_text().strip()))
    assert old == decode(encode(sample()))
    assert (old.started, old.waited_s, old.scored_s, old.turns[0].began_s, old.turns[0].calls_s) == (0, 0, 0, 0, [])
    assert old.turns[0].state == ""


def test_times_come_back_and_old_versions_of_the_code_would_have_had_none() -> None:
    trajectory = sample()
    trajectory.started, trajectory.waited_s, trajectory.scored_s = 1.7e9, 0.5, 0.25
    trajectory.turns[0].began_s, trajectory.turns[0].calls_s = 0.125, [0.1]
    again = decode(encode(trajectory))
    assert (again.started, again.waited_s, again.scored_s) == (1.7e9, 0.5, 0.25)
    assert (again.turns[0].began_s, again.turns[0].calls_s) == (0.125, [0.1])
    assert from_json(to_json(trajectory)).turns[0].calls_s == [0.1]


@pytest.mark.parametrize("text", ["84", "Ä", "add", "a%_b", 'quo"te', "line\nbreak"])
def test_a_text_is_found_in_the_bytes(text: str) -> None:
    trajectory = sample()
    trajectory.task.fields["said"] = f"before {text} after"
    data = encode(trajectory)
    assert body_contains(data, text.encode().lower())
    assert body_contains(data, f"BEFORE {text}".encode().lower())
    assert not body_contains(data, b"zebra")
    assert not body_contains(b"\x03junk", b"j")


def test_a_stored_trajectory_that_lost_or_gained_a_byte_is_refused() -> None:
    data = encode(sample())
    assert data[:1] == b"\x03"
    for broken in (data[:-1], data + b"x", data[:5], data[:3], data[:1] + b"\xff\xff\xff\xff" + data[5:]):
        with pytest.raises(ConfigError, match="a stored trajectory cannot be read"):
            decode(broken)


def test_a_count_that_would_fill_the_memory_is_refused() -> None:
    trajectory = packed._TRAJECTORY.write(sample(), [])
    trajectory[4][0][0] = 8 * 2**40 + 3  # the first turn's context: 2**40 times the same id
    records = zlib.compress(codec.encode(trajectory))
    with pytest.raises(ConfigError, match="equal numbers"):
        decode(b"\x03" + len(records).to_bytes(4, "little") + records + bytes(64))


JSON = [zlib.compress(text) for text in (b"{}", b'{"format": 99}', b"[1]")]


RECORDS = [mark + zlib.compress(b"\x01") for mark in (b"\x02", b"\x03", b"\x03\x09\0\0\0")]


@pytest.mark.parametrize("data", [b"", b"junk", b"\x02", b"\x03", *RECORDS, *JSON])
def test_broken_bytes_are_one_sentence(data: bytes) -> None:
    with pytest.raises(ConfigError, match="a stored trajectory cannot be read"):
        decode(data)
