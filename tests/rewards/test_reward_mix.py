"""Rewards add up: weights, names, turn rewards, and what is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.errors import ConfigError, RewardError
from agentfly.rewards import FunctionReward, Mix, Score


def constant(name: str, value: Any) -> FunctionReward:
    return FunctionReward(lambda: value, name=name)


def score(reward: Any, trajectory: Any) -> Score:
    return asyncio.run(reward.score(trajectory))


def test_a_weighted_sum_keeps_each_part_unweighted_under_its_name(chain: Any) -> None:
    a, b = constant("a", 1.0), constant("b", {"reward": 0.5, "sub": 0.25})
    assert score(a * 0.8 + b * 0.2, chain()) == Score(0.9, {"a": 1.0, "b": 0.5, "b/sub": 0.25})


def test_sums_of_sums_minus_and_numbers_on_either_side(chain: Any) -> None:
    a, b, c = constant("a", 1.0), constant("b", 2.0), constant("c", 4.0)
    assert score((a + b) * 0.5 - (c / 4 + 1), chain()).reward == 1.5 - 1.0 - 1.0
    assert score(2 * a + b, chain()).reward == 4.0
    assert score(1 - a * 0.25, chain()).reward == 0.75
    assert score(-(a + b), chain()).reward == -3.0
    assert score(sum([a, b, c]), chain()) == Score(7.0, {"a": 1.0, "b": 2.0, "c": 4.0})


def test_scaling_makes_a_new_reward_and_leaves_the_old_one(chain: Any) -> None:
    a = constant("a", 1.0)
    assert score(a * 3, chain()).reward == 3.0
    assert score(a, chain()).reward == 1.0


@given(pairs=st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=5))
def test_a_mix_is_the_dot_product_of_weights_and_scores(chain: Any, pairs: list[tuple[float, float]]) -> None:
    parts = [constant(f"part{i}", value) * weight for i, (weight, value) in enumerate(pairs)]
    assert score(sum(parts), chain()).reward == pytest.approx(sum(w * v for w, v in pairs), abs=1e-9)


def test_two_parts_of_one_name_are_refused_and_renaming_helps(chain: Any) -> None:
    a = constant("a", 1.0)
    with pytest.raises(ConfigError, match="two parts of a mixed reward are called 'a'"):
        a * 0.5 + a * 0.5
    assert score(a + a.named("again"), chain()) == Score(2.0, {"a": 1.0, "again": 1.0})


def test_turn_rewards_of_parts_add_up_weighted(chain: Any) -> None:
    a = constant("a", {"reward": 1.0, "turn_rewards": [1.0, 2.0]})
    b = constant("b", {"reward": 1.0, "turn_rewards": [10.0, 20.0]})
    c = constant("c", 1.0)
    assert score(a * 0.5 + b * 0.1 + c, chain(replies=("x", "y"))).turn_rewards == pytest.approx((1.5, 3.0))
    assert score(c * 2 + constant("d", 1.0), chain()).turn_rewards is None


def test_needs_and_checks_are_those_of_all_parts() -> None:
    mix = FunctionReward(lambda answer: 1.0, name="a") + FunctionReward(lambda unit: 1.0, name="b")
    assert mix.needs == {"answer", "unit"}
    with pytest.raises(ConfigError, match="reward 'b' asks for 'unit'"):
        mix.check({"answer"})


def test_async_parts_are_scored_together_and_one_failure_cancels_the_rest(chain: Any) -> None:
    meeting = asyncio.Barrier(2)
    cancelled = []

    async def first() -> float:
        await meeting.wait()
        return 1.0

    async def second() -> float:
        await meeting.wait()
        return 2.0

    async def fails() -> float:
        raise ValueError("no")

    async def waits() -> float:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return 1.0

    assert score(FunctionReward(first) + FunctionReward(second), chain()).reward == 3.0
    with pytest.raises(RewardError, match="'fails'"):
        score(FunctionReward(waits) + FunctionReward(fails), chain())
    assert cancelled == [True]


def test_what_is_not_a_number_or_a_reward_cannot_be_mixed_in() -> None:
    a = constant("a", 1.0)
    for wrong in ("x", None, True, [1]):
        with pytest.raises(TypeError):
            a * wrong
        with pytest.raises(TypeError):
            a + wrong
    with pytest.raises(ConfigError, match="divided by 0"):
        a / 0
    with pytest.raises(ConfigError, match="shifted by nan"):
        a + float("nan")


def test_a_mix_can_be_read() -> None:
    mix = constant("a", 1.0) * 0.8 + constant("b", 1.0) - 2
    assert isinstance(mix, Mix)
    assert repr(mix) == "Mix(a * 0.8 + b + -2)"
    assert mix.name == "a + b"
