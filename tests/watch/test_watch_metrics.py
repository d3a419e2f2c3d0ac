"""The table of metrics, and those that are read off trajectories."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.errors import UnknownName
from agentfly.types import Completion, Message, Outcome, Task, ToolCall, ToolResult, Trajectory, Turn
from agentfly.watch import METRICS, describe, is_success, rollout_metrics, unknown


def chain(
    reward: float | None = 1.0,
    *,
    outcome: Outcome = Outcome.FINISHED,
    tokens: int = 4,
    tools: str = "",
    components: dict[str, float] | None = None,
    turn_reward: float = 0.0,
) -> Trajectory:
    """`tools` is a call per letter: "m" and "s" reach a tool, "x" is an unknown one, "r" raises. A second turn answers."""
    names = {"m": "multiply", "s": "search", "x": "nothing", "r": "multiply"}
    errors: dict[str, Any] = {"x": "unknown_tool", "r": "raised"}
    results = tuple(ToolResult(observation="", error=errors.get(letter)) for letter in tools)
    half = tokens // 2
    reply = Completion(text="", token_ids=[1] * half, logprobs=[-1.0] * half, versions=[0] * half)
    turns = [
        Turn([1], True, reply, tuple(ToolCall(names[letter]) for letter in tools), results, turn_reward),
        Turn([1], False, reply),
    ]
    task = Task("t", (Message("user", "?"),))
    return Trajectory("c", task, 0, [], turns, outcome, None, "", reward, components or {})


def test_names_and_patterns_are_described_and_others_refused() -> None:
    assert describe("reward/mean").unit == "reward"
    assert describe("reward/component/exact/format").name == "reward/component/<name>"
    assert describe("validation/pass_at_16").name == "validation/pass_at_<k>"
    assert unknown(["train/loss", "rollout/tool_calls/search", "train/lost", "reward/component/"]) == [
        "train/lost",
        "reward/component/",
    ]
    with pytest.raises(UnknownName, match="did you mean 'train/loss'"):
        describe("train/lost")


def test_every_metric_says_what_it_is_in_one_line() -> None:
    for name, metric in METRICS.items():
        assert metric.name == name
        assert metric.description.endswith(".")
        assert "\n" not in metric.description


def test_a_step_is_summed_up() -> None:
    chains = [
        chain(1.0, tools="mm", components={"exact": 1.0, "exact/format": 1.0}),
        chain(0.0, tools="sx", components={"exact": 0.0}, tokens=8),
        chain(0.5, tools="r", components={"exact": 0.5}, turn_reward=1.5, outcome=Outcome.MAX_TURNS),
        chain(None, outcome=Outcome.WORLD_FAILURE, tokens=0),
    ]
    found = rollout_metrics(chains, seconds=2.0, num_envs=4)
    assert unknown(found) == []
    expected = {
        "reward/mean": 1.0,  # of 1, 0 and 0.5 + 1.5: the failed chain is not a zero
        "reward/std": math.sqrt(2 / 3),
        "reward/component/exact": 0.5,
        "reward/component/exact/format": 1.0,
        "rollout/success": 1 / 3,
        "rollout/turns": 2.0,
        "rollout/tool_calls": 1.0,
        "rollout/tool_calls/multiply": 0.75,
        "rollout/tool_calls/search": 0.25,
        "rollout/invalid_calls": 0.25,
        "rollout/invalid_call_chains": 0.25,
        "rollout/invalid_call_rate": 0.2,
        "rollout/unknown_tool_rate": 0.2,
        "rollout/bad_argument_rate": 0.0,
        "rollout/outcome/finished": 0.5,
        "rollout/outcome/max_turns": 0.25,
        "rollout/outcome/world_failure": 0.25,
        "rollout/envs": 4.0,
        "rollout/chains": 4.0,
        "rollout/scored": 3.0,
        "rollout/trainable": 3.0,
        "rollout/tokens": 16.0,
        "rollout/tokens_per_s": 8.0,
        "rollout/reply_tokens": 2.0,
        "rollout/chain_tokens/ended": 16 / 3,
        "rollout/chain_tokens/lost": 0.0,
    }
    none = ("max_tokens", "max_time", "no_tool_call", "tool_error", "cancelled")
    zero = {f"rollout/outcome/{outcome}": 0.0 for outcome in none}
    times = {"time/reply_s": 0.0, "time/tool_s/multiply": 0.0, "time/tool_s/search": 0.0}  # of these turns, none was measured
    assert found == pytest.approx(expected | zero | times)


def test_the_times_of_replies_and_of_each_tool_are_means_over_turns() -> None:
    first, second = chain(tools="ms"), chain(tools="mx")
    for turn, sampled_s, tools_s in zip([*first, *second], (1.0, 2.0, 3.0, 6.0), (4.0, 0.0, 8.0, 0.0), strict=True):
        turn.sampled_s, turn.tools_s = sampled_s, tools_s
    found = rollout_metrics([first, second], seconds=1.0)
    assert {name: value for name, value in found.items() if name.startswith("time/")} == {
        "time/reply_s": 3.0,
        "time/tool_s/multiply": 6.0,
        "time/tool_s/search": 4.0,
    }


def test_a_chain_of_a_chat_server_is_scored_though_it_cannot_be_trained_on() -> None:
    found = rollout_metrics([chain(1.0, tokens=0)], seconds=1.0)
    assert (found["reward/mean"], found["rollout/success"], found["rollout/trainable"]) == (1.0, 1.0, 0.0)


def test_a_reward_on_a_failed_chain_does_not_count() -> None:
    found = rollout_metrics([chain(1.0, outcome=Outcome.TOOL_ERROR), chain(0.0)], seconds=1.0)
    assert found["reward/mean"] == 0.0
    assert found["rollout/outcome/tool_error"] == 0.5


def test_nothing_scored_is_not_a_number_and_nothing_at_all_is_no_error() -> None:
    lost = rollout_metrics([chain(None, outcome=Outcome.WORLD_FAILURE)], seconds=0.0)
    assert math.isnan(lost["reward/mean"])
    assert math.isnan(lost["rollout/success"])
    assert lost["rollout/tokens_per_s"] == 0.0
    empty = rollout_metrics([], seconds=1.0)
    assert "rollout/invalid_call_rate" not in empty, "a share of nothing is no figure"
    assert empty["rollout/chains"] == 0.0
    assert math.isnan(empty["rollout/turns"])


@pytest.mark.parametrize(
    ("reward", "components", "success"),
    [
        (1.0, {}, True), (0.999, {}, False), (1.0 - 1e-12, {}, True), (None, {}, False),
        (1.0, {"success": 0.0}, False), (0.0, {"success": 1.0}, True),
        (0.0, {"world/success": 1.0}, True), (1.0, {"a/success": 0.0, "b/success": 0.0}, True),
    ],
)  # fmt: skip
def test_success_is_what_the_reward_says_it_is(reward: float | None, components: dict[str, float], success: bool) -> None:
    assert is_success(chain(reward, components=components)) is success


def test_success_can_begin_lower() -> None:
    assert is_success(chain(0.5), success_at=0.5)


@given(st.lists(st.tuples(st.none() | st.floats(-3, 3), st.sampled_from(list(Outcome))), max_size=8))
def test_shares_add_up_whatever_happens(parts: list[tuple[float | None, Outcome]]) -> None:
    found = rollout_metrics([chain(reward, outcome=outcome) for reward, outcome in parts], seconds=1.0)
    shares = sum(value for name, value in found.items() if name.startswith("rollout/outcome/"))
    assert math.isnan(shares) if not parts else shares == pytest.approx(1.0)
    assert unknown(found) == []
