"""Each advantage against values worked out by hand or by a naive loop over the formula of its paper."""

from __future__ import annotations

import random
import statistics

import numpy as np
import pytest

from agentfly.learn.algorithms import ALGORITHMS, Chains
from agentfly.learn.algorithms import advantages as adv


def streams(*lists):
    return [np.array(values, dtype=float) for values in lists]


def test_grpo_by_hand():
    # mean 0.5; deviations +-0.5 in fours: variance 4 * 0.25 / 3, standard deviation 0.5773503
    got = adv.grpo([1, 0, 0, 1])
    assert got == pytest.approx([0.8660239, -0.8660239, -0.8660239, 0.8660239], abs=1e-6)


def test_grpo_without_the_standard_deviation_by_hand():
    assert adv.grpo([1, 0, 0, 3], normalize_std=False) == pytest.approx([0, -1, -1, 2])


def test_grpo_divides_by_the_n_minus_1_deviation_plus_a_millionth():
    rewards = [0.3, -1.2, 5.0, 0.0, 2.2]
    mean, std = statistics.mean(rewards), statistics.stdev(rewards)
    assert adv.grpo(rewards) == pytest.approx([(r - mean) / (std + 1e-6) for r in rewards])


def test_rloo_by_hand_and_by_loop():
    assert adv.rloo([1, 0, 0, 3]) == pytest.approx([0, -4 / 3, -4 / 3, 8 / 3])
    rewards = [0.3, -1.2, 5.0]
    others = [statistics.mean(rewards[:i] + rewards[i + 1 :]) for i in range(3)]
    assert adv.rloo(rewards) == pytest.approx([r - o for r, o in zip(rewards, others, strict=True)])


@pytest.mark.parametrize("rewards", [[], [3.0], [0.1] * 7, [0.1 + 0.2, 0.3]])
def test_chains_that_do_not_differ_or_stand_alone_have_no_advantage(rewards):
    for function in (adv.grpo, adv.rloo):
        assert function(rewards).tolist() == [0.0] * len(rewards)


def test_reward_to_go_by_hand():
    assert adv.reward_to_go(np.array([0.0, 1.0, 0.0, 4.0]), gamma=0.5).tolist() == [1.0, 2.0, 2.0, 4.0]


def test_reinforce_plus_plus_whitens_returns_over_all_tokens_of_the_batch():
    # returns (gamma 0.5): [2, 4], [0.5, 1, 2]; mean 1.9; variance (n - 1): 7.2 / 4 = 1.8
    got = adv.reinforce_plus_plus(streams([0, 4], [0, 0, 2]), gamma=0.5)
    expected = [(r - 1.9) / 1.8**0.5 for r in (2, 4, 0.5, 1, 2)]
    assert np.concatenate(got) == pytest.approx(expected, abs=1e-6)


def test_credit_of_reinforce_plus_plus_reaches_tokens_before_an_observation():
    """Nothing in the stream marks where an observation stood: with gamma 1 all tokens share the return."""
    good, bad = adv.reinforce_plus_plus(streams([0, 0, 0, 1], [0, 0, 0, 0]), gamma=1.0)
    assert len(set(good.tolist())) == 1
    assert good[0] > 0 > bad[0]


def test_reinforce_plus_plus_with_baseline_by_hand():
    # group 0: rewards 2 and 0, so +1 and -1; group 1: one chain, nothing to compare
    got = adv.reinforce_plus_plus_baseline(streams([0, 2], [0, 0], [5, 0, 0]), [0, 0, 1])
    scale = (4 / 3) ** 0.5  # +1 +1 -1 -1: variance 4 / 3
    assert np.concatenate(got) == pytest.approx([1 / scale, 1 / scale, -1 / scale, -1 / scale, 0, 0, 0], abs=1e-6)


def test_gae_by_hand():
    # t=1: 1 - 0.5 = 0.5;  t=0: 0 + 0.9 * 0.5 - 0.2 + 0.9 * 0.8 * 0.5 = 0.61
    advantages, returns = adv.gae(np.array([0.0, 1.0]), np.array([0.2, 0.5]), gamma=0.9, lam=0.8)
    assert advantages == pytest.approx([0.61, 0.5])
    assert returns == pytest.approx([0.81, 1.0])


def test_gae_is_the_discounted_sum_of_temporal_differences():
    rng = random.Random(1)
    rewards, values = (np.array([rng.gauss(0, 1) for _ in range(9)]) for _ in range(2))
    gamma, lam = 0.97, 0.7
    after = [*values[1:], 0.0]
    deltas = [r + gamma * a - v for r, a, v in zip(rewards, after, values, strict=True)]
    expected = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, 9)) for t in range(9)]
    assert adv.gae(rewards, values, gamma=gamma, lam=lam)[0] == pytest.approx(expected)


def test_gae_over_the_stream_equals_carrying_over_masked_tokens():
    """The loop over all positions that keeps value and accumulator where the mask is 0, as other frameworks write it."""
    mask = [1, 1, 0, 0, 1, 0, 1]
    rewards, values = [0, 0.5, 0, 0, 0, 0, 1.0], [0.1, 0.3, 9, 9, -0.2, 9, 0.4]
    gamma, lam = 0.9, 0.8
    after, running, carried = 0.0, 0.0, [0.0] * 7
    for t in reversed(range(7)):
        delta = rewards[t] + gamma * after - values[t]
        step = delta + gamma * lam * running
        after = values[t] if mask[t] else after
        running = step if mask[t] else running
        carried[t] = running
    keep = [t for t in range(7) if mask[t]]
    got, _ = adv.gae(np.array(rewards)[keep], np.array(values)[keep], gamma=gamma, lam=lam)
    assert got == pytest.approx([carried[t] for t in keep])


def test_whitening_gives_zero_mean_and_unit_variance_over_all_streams():
    every = np.concatenate(adv.whiten(streams([1, 2, 3], [10], [4, 4])))
    assert every.mean() == pytest.approx(0, abs=1e-12)
    assert every.var(ddof=1) == pytest.approx(1, abs=1e-6)
    assert adv.whiten(streams([2, 2], [2]))[0].tolist() == [0, 0]
    assert adv.whiten([]) == []


def test_explained_variance_of_a_perfect_a_constant_and_a_misleading_critic():
    returns = np.array([0.0, 1.0, 2.0])
    assert adv.explained_variance(returns, returns) == 1.0
    assert adv.explained_variance(np.ones(3), returns) == pytest.approx(0.0)
    assert adv.explained_variance(-returns, returns) < 0
    assert adv.explained_variance(returns, np.ones(3)) == 0.0


@pytest.mark.parametrize("name", [row.name for row in ALGORITHMS.values() if row.needs_group])
def test_a_group_of_one_gets_no_advantage_and_does_not_disturb_the_others(name):
    row = ALGORITHMS[name]
    pair = streams([0, 1], [0, 0, 0])
    alone = row.credit(Chains([0, 0, 1], [*pair, *streams([0, 9])]), row.settings()).advantages
    together = row.credit(Chains([0, 0], pair), row.settings()).advantages
    assert alone[2].tolist() == [0, 0]
    assert np.concatenate(alone[:2]) == pytest.approx(np.concatenate(together))
    assert together[0][0] > 0 > together[1][0]


def test_a_chain_s_advantage_stands_on_each_of_its_tokens():
    row = ALGORITHMS["rloo"]
    credit = row.credit(Chains([0, 0], streams([0, 0, 1], [0])), row.settings())
    assert [part.tolist() for part in credit.advantages] == [[1, 1, 1], [-1]]


def test_ppo_whitens_advantages_and_learns_unwhitened_returns():
    row = ALGORITHMS["ppo"]
    rewards, values = streams([0, 1], [0, 0]), streams([0.5, 0.5], [0.5, 0.5])
    credit = row.credit(Chains([0, 0], rewards, values), row.settings())
    assert np.concatenate(credit.advantages) == pytest.approx(np.array([1, 1, -1, -1]) / (4 / 3) ** 0.5, abs=1e-6)
    assert [part.tolist() for part in credit.returns] == [[1, 1], [0, 0]]
