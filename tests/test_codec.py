"""Values come back from the codec as they were, and bytes from a peer raise nothing but NotDecodable."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.codec import NotDecodable, NotEncodable, check_keys, decode, encode
from agentfly.types import Completion, Message, Outcome, Task, ToolCall, ToolResult, Trajectory, Turn

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 200), 1 << 200)
    | st.floats(allow_nan=False)
    | st.text(st.characters())
    | st.binary()
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(-100, 100) | st.tuples(st.integers(0, 9)), inner)
    ),
    max_leaves=20,
)


def test_a_trajectory_comes_back_equal() -> None:
    call = ToolCall("add", {"a": (1, 2)}, "call-1")
    completion = Completion(text="5", token_ids=[3, 4], logprobs=[-0.1, -math.inf], versions=[0, 1], tool_calls=(call,))
    turn = Turn([1, 2], True, completion, (call,), (ToolResult(observation="3", reward=0.5, done=True),), 0.5)
    task = Task("t", (Message("user", "half a \ud800 surrogate"),), {"key": {1: (2, 3)}})
    trajectory = Trajectory("c", task, 1, [Message("user", "x")], [turn], Outcome.FINISHED, components={"exact": 1.0})
    found = decode(encode(trajectory), any_keys=True)
    assert found == trajectory
    assert type(found.outcome) is Outcome


@settings(deadline=None)
@given(values)
def test_values_come_back_as_they_were(value: Any) -> None:
    found = decode(encode(value), any_keys=True)
    assert found == value
    assert repr(found) == repr(value), "types differ: a tuple became a list, or an int a float"


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_only_not_decodable(data: bytes) -> None:
    try:
        found = decode(data)
    except NotDecodable:
        return
    assert encode(found) is not None, "what was decoded can be encoded again"


@pytest.mark.parametrize("value", [object(), {1j: 1}, [{"x": {1, 2}}], print], ids=["object", "complex key", "set", "function"])
def test_a_value_without_an_encoded_form_is_refused_by_its_type(value: Any) -> None:
    with pytest.raises(NotEncodable, match="has no encoded form"):
        encode(value)


def test_deep_nesting_is_refused_on_both_sides() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(NotEncodable):
        encode(deep)
    with pytest.raises(NotDecodable):
        decode(b"\x91" * 5000)


@pytest.mark.parametrize(
    ("record", "match"),
    [
        (["Popen", "rm"], "unknown record 'Popen'"),
        ([["Task"]], "unknown record"),
        (["ToolResult", "seen", None, None, False, None, None, "more"], "with 7 fields"),
        (["ToolResult", "seen", None, None, False, None, "much"], "limit is not one of a sandbox"),
        (["ToolResult"], "observation"),
        (["ToolResult", 7, None, None, False, None], "observation is not text"),
        (["ToolResult", "seen", None, "much", False, None], "reward is not a number"),
        (["ToolResult", "seen", None, True, False, None], "reward is not a number"),
        (["Completion", "x", [1], [], [], "stop", []], "1 tokens, 0 log-probs"),
    ],
    ids=lambda part: part[0] if isinstance(part, list) and isinstance(part[0], str) else "",
)
def test_a_forged_record_is_refused(record: list[Any], match: str) -> None:
    with pytest.raises(NotDecodable, match=match):
        decode(msgpack.packb(msgpack.ExtType(3, msgpack.packb(record))))


def test_a_record_of_an_older_version_lacks_the_newest_fields() -> None:
    data = msgpack.packb(msgpack.ExtType(3, msgpack.packb(["ToolResult", "seen", None, 0.5])))
    assert decode(data) == ToolResult(observation="seen", reward=0.5)


def test_keys_of_a_peer_are_strings() -> None:
    with pytest.raises(NotDecodable):
        decode(encode({"inner": {1: 2}}))
    with pytest.raises(NotEncodable, match="the key 1 of a dict is not a string"):
        check_keys(["x", ({"inner": {1: 2}},)])
    check_keys([1, "two", {"three": (4, {"five": None})}])
    assert decode(encode({1: {(2, 3): 4}}), any_keys=True) == {1: {(2, 3): 4}}
