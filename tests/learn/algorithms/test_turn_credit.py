"""`loss.turn_credit`: one turn is one action, against plain loops over turns and against the credit of tokens and chains."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from agentfly.config import Config
from agentfly.errors import ConfigError
from agentfly.learn.algorithms import ALGORITHMS, Algorithm, Chains
from agentfly.learn.algorithms import advantages as adv
from tests.learn.chains import chain

PER_TURN = [row for row in ALGORITHMS.values() if "turn_credit" in row.reads]
COMPARED = [row for row in PER_TURN if row.needs_group]


def chains_of(lengths, seed=0, groups=None, final_only=False, values=True) -> Chains:
    """Chains whose turns have these numbers of tokens, with random rewards and values."""
    rng = random.Random(seed)
    trajectories = [chain(*[("c", "x" * n) for n in turns], number=i) for i, turns in enumerate(lengths)]
    rewards = []
    for turns in lengths:
        own = np.zeros(sum(turns))
        own[np.cumsum([n for n in turns if n]) - 1] = [0.0 if final_only else rng.gauss(0, 1) for n in turns if n]
        own[-1] = rng.gauss(0, 1)
        rewards.append(own)
    read = [np.array([rng.gauss(0, 1) for _ in own]) for own in rewards] if values else None
    return Chains(groups or [0] * len(lengths), rewards, read, trajectories)


def starts(turns) -> list[int]:
    return [sum(turns[:i]) for i in range(len(turns))]


def gae_of_turns(rewards, values, gamma, lam) -> list[float]:
    """The plain loop over turns: one reward and one value per turn."""
    advantages, running = [0.0] * len(rewards), 0.0
    for k in reversed(range(len(rewards))):
        after = values[k + 1] if k + 1 < len(values) else 0.0
        running = (rewards[k] + gamma * after - values[k]) + gamma * lam * running
        advantages[k] = running
    return advantages


@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.9), (0.5, 0.0), (1.0, 0.7), (0.0, 1.0)])
def test_gae_of_turns_is_the_loop_over_turns_with_the_value_before_each_turn_s_first_token(gamma, lam):
    turns = [3, 1, 4, 2]
    chains = chains_of([turns])
    rewards, values = chains.rewards[0], chains.values[0]
    got, returns = adv.gae(rewards, values, gamma=gamma, lam=lam, turns=chains.turns_of(0))
    first = starts(turns)
    expected = gae_of_turns(chains.turn_rewards(0), values[first], gamma, lam)
    assert got[first] == pytest.approx(expected, rel=1e-12)
    of_turn = [advantage + values[at] for advantage, at in zip(expected, first, strict=True)]
    assert returns == pytest.approx(np.repeat(of_turn, turns), rel=1e-12), "the tokens of a turn have one return"
    assert got == pytest.approx(np.repeat(of_turn, turns) - values, rel=1e-12), "each token has its own value as baseline"


def test_returns_of_turns_are_discounted_once_per_turn():
    rewards, turns = np.array([0.0, 1.0, 0.0, 0.0, 4.0]), np.array([0, 0, 1, 1, 2])
    assert adv.reward_to_go(rewards, gamma=0.5, turns=turns).tolist() == [2.0, 2.0, 2.0, 2.0, 4.0]


@pytest.mark.parametrize("row", PER_TURN, ids=lambda row: row.name)
def test_with_one_turn_and_no_discount_it_is_the_credit_of_today(row: Algorithm):
    chains = chains_of([[4], [2], [3], [1]], groups=[0, 0, 1, 1])
    today, per_turn = (row.credit(chains, row.settings({"turn_credit": on})) for on in (False, True))
    for one, other in zip(today.advantages, per_turn.advantages, strict=True):
        assert one.tolist() == other.tolist()
    for one, other in zip(today.returns or [], per_turn.returns or [], strict=True):
        assert one.tolist() == other.tolist()
    assert any(part.any() for part in per_turn.advantages)


@pytest.mark.parametrize("row", [row for row in PER_TURN if not row.needs_group], ids=lambda row: row.name)
def test_without_a_discount_tokens_and_turns_are_one_clock(row: Algorithm):
    chains = chains_of([[3, 1, 2], [2, 2]])
    today, per_turn = (row.credit(chains, row.settings({"turn_credit": on})) for on in (False, True))
    assert [part.tolist() for part in today.advantages] == [part.tolist() for part in per_turn.advantages]
    slower = row.credit(chains, row.settings({"turn_credit": True, "gamma": 0.5})).advantages
    assert not np.allclose(slower[0], today.advantages[0])


@pytest.mark.parametrize("row", COMPARED, ids=lambda row: row.name)
def test_a_final_reward_without_discount_gives_every_turn_the_advantage_of_its_chain(row: Algorithm):
    chains = chains_of([[3, 1, 2], [2, 2], [5], [1, 1, 1, 1]], final_only=True)
    today, per_turn = (row.credit(chains, row.settings({"turn_credit": on})).advantages for on in (False, True))
    assert [part.tolist() for part in today] == [part.tolist() for part in per_turn]


def test_turns_are_compared_with_the_siblings_at_the_same_turn_by_a_plain_loop():
    lengths, groups = [[3, 1, 2], [2, 2], [5], [1, 2, 1, 1], [2, 2]], [0, 0, 1, 0, 1]
    chains, gamma = chains_of(lengths, groups=groups), 0.8
    row = ALGORITHMS["grpo"]
    found = row.credit(chains, row.settings({"turn_credit": True, "gamma": gamma})).advantages
    rewards = [[float(x) for x in chains.turn_rewards(i)] for i in range(5)]
    for i, turns in enumerate(lengths):
        expected = []
        for t, n in enumerate(turns):
            seen = []
            for j in range(5):
                if groups[j] == groups[i]:
                    at = min(t, len(lengths[j]) - 1)
                    seen.append((j, sum(gamma**k * r for k, r in enumerate(rewards[j][at:]))))
            mean = sum(r for _, r in seen) / len(seen)
            std = math.sqrt(sum((r - mean) ** 2 for _, r in seen) / (len(seen) - 1))
            expected += [(dict(seen)[i] - mean) / (std + 1e-6)] * n
        assert found[i] == pytest.approx(expected, rel=1e-9)


def test_a_good_early_turn_is_told_from_a_bad_late_one():
    """Both chains have the total 0, so whole chains teach nothing; their turns do."""
    chains = Chains([0, 0], [np.array([1.0, -1.0]), np.array([-1.0, 1.0])], None, [chain(("c", "a"), ("c", "b"))] * 2)
    row = ALGORITHMS["rloo"]
    assert not np.concatenate(row.credit(chains, row.settings()).advantages).any()
    found = row.credit(chains, row.settings({"turn_credit": True, "gamma": 0.0})).advantages
    assert [part.tolist() for part in found] == [[2.0, -2.0], [-2.0, 2.0]]


def test_a_turn_without_tokens_at_the_end_does_not_stand_for_the_chain():
    cut = Chains([0, 0], [np.array([1.0]), np.array([0.0, 0.0])], None, [chain(("c", "a"), ("c", "")), chain(("c", "ab"))])
    row = ALGORITHMS["rloo"]
    assert [part.tolist() for part in row.credit(cut, row.settings({"turn_credit": True})).advantages] == [[1.0], [-1.0, -1.0]]


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"loss": {"gamma": 0.9}}, "grpo compares whole chains, which are not discounted: set loss.turn_credit"),
        ({"algorithm": "gigpo", "loss": {"turn_credit": True}}, "gigpo does not use loss.turn_credit"),
        ({"loss": {"turn_credit": True}, "agent": {"max_turns": 1}}, "no effect with agent.max_turns = 1"),
        ({"loss": {"turn_credit": "turn"}}, "loss.turn_credit must be true or false"),
    ],
)
def test_a_setting_that_cannot_act_is_refused(tree, sentence):
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(tree)
    assert sentence in str(caught.value)
