"""Rewards to advantages: pure functions on arrays, each with its paper.

The arrays of a chain hold its *sampled* tokens only: prompts and tool observations are left out, and the rows of a chain
that was split are concatenated. Time is counted in sampled tokens, so a final reward reaches every earlier token across any
number of observations. This equals carrying the value, the accumulator of GAE and the running return of REINFORCE++ across
masked tokens, as verl does (0.9.1). A function that is given `turns`, the turn of each token, counts time in turns instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

TokenValues = NDArray[np.float64]
"""One number per sampled token of a chain."""
TurnNumbers = NDArray[np.int64]
"""The turn of each sampled token of a chain."""

# Smaller differences are rounding errors: dividing them by their standard deviation would turn noise into a signal.
_SAME = 1e-9


def grpo(rewards: Sequence[float], *, normalize_std: bool = True) -> TokenValues:
    """(r - group mean) / (group standard deviation (n - 1) + 1e-6): DeepSeekMath, arXiv:2402.03300.

    Without the division it is Dr. GRPO, arXiv:2503.20783. Returns zeros for fewer than two chains.
    """
    scores: TokenValues = np.asarray(rewards, dtype=np.float64)
    if len(scores) < 2 or np.ptp(scores) <= _SAME:
        return np.zeros_like(scores)
    centred: TokenValues = scores - scores.mean()
    if normalize_std:
        centred /= scores.std(ddof=1) + 1e-6
    return centred


def rloo(rewards: Sequence[float]) -> TokenValues:
    """r - mean of the other chains: arXiv:2402.14740. Returns zeros for fewer than two chains."""
    scores: TokenValues = np.asarray(rewards, dtype=np.float64)
    n = len(scores)
    if n < 2 or np.ptp(scores) <= _SAME:
        return np.zeros_like(scores)
    others: TokenValues = (scores.sum() - scores) / (n - 1)
    return scores - others


def opo(rewards: Sequence[float], lengths: Sequence[int]) -> TokenValues:
    """r - the group's mean reward weighted by the chains' sampled tokens: arXiv:2505.23585.

    Returns zeros for fewer than two chains.
    """
    scores: TokenValues = np.asarray(rewards, dtype=np.float64)
    if len(scores) < 2 or np.ptp(scores) <= _SAME:
        return np.zeros_like(scores)
    baseline: float = np.average(scores, weights=np.asarray(lengths, dtype=np.float64))
    return scores - baseline


def gigpo_turns(
    rewards: Sequence[TokenValues], states: Sequence[Sequence[Hashable]], *, gamma: float, normalize_std: bool
) -> list[TokenValues]:
    """GiGPO's advantage of each turn, arXiv:2505.10978: its discounted return against those of turns in the same state.

    `rewards` and `states` have an entry per turn of each chain. States of different groups must differ. A turn whose state
    occurs once gets 0.
    """
    result = [reward_to_go(turns, gamma=gamma) for turns in rewards]
    places: dict[Hashable, list[tuple[int, int]]] = {}
    for chain, seen in enumerate(states):
        for turn, state in enumerate(seen):
            places.setdefault(state, []).append((chain, turn))
    for visits in places.values():
        compared = grpo([float(result[chain][turn]) for chain, turn in visits], normalize_std=normalize_std)
        for (chain, turn), advantage in zip(visits, compared, strict=True):
            result[chain][turn] = advantage
    return result


def compare_turns(returns: Sequence[TokenValues], score: Callable[[Sequence[float]], TokenValues]) -> list[TokenValues]:
    """What `score` gives the return of each turn of a group's chains, beside those of the siblings at the same turn.

    A sibling that has ended counts with the return of its last turn. So no turn stands alone, and if the only reward is the
    final one and is not discounted, every turn has what `score` gives the chain.
    """
    advantages = [np.zeros(len(chain)) for chain in returns]
    for turn in range(max(map(len, returns))):
        scored = score([float(chain[min(turn, len(chain) - 1)]) for chain in returns])
        for chain, advantage in zip(advantages, scored, strict=True):
            chain[turn : turn + 1] = advantage
    return advantages


def reinforce_plus_plus(
    rewards: Sequence[TokenValues], *, gamma: float = 1.0, turns: Sequence[TurnNumbers | None] | None = None
) -> list[TokenValues]:
    """Discounted reward-to-go of each token, whitened over every token of the batch: arXiv:2501.03262.

    `rewards` holds one array per chain, with any KL penalty already subtracted.
    """
    numbers = turns or [None] * len(rewards)
    return whiten([reward_to_go(chain, gamma=gamma, turns=numbered) for chain, numbered in zip(rewards, numbers, strict=True)])


def reinforce_plus_plus_baseline(rewards: Sequence[TokenValues], groups: Sequence[int]) -> list[TokenValues]:
    """A chain's reward minus its group's mean, on each of its tokens, whitened over the batch: arXiv:2501.03262.

    A chain without siblings gets advantage 0 and does not enter the mean of the others.
    """
    totals = np.array([chain.sum() for chain in rewards])
    result = [np.zeros(len(chain)) for chain in rewards]
    sizes = Counter(groups)
    compared = [chain for chain, group in enumerate(groups) if sizes[group] > 1]
    means = {group: totals[[other == group for other in groups]].mean() for group in sizes}
    centred = [np.full(len(rewards[chain]), totals[chain] - means[groups[chain]]) for chain in compared]
    for chain, advantages in zip(compared, whiten(centred), strict=True):
        result[chain] = advantages
    return result


def gae(
    rewards: TokenValues, values: TokenValues, *, gamma: float = 1.0, lam: float = 1.0, turns: TurnNumbers | None = None
) -> tuple[TokenValues, TokenValues]:
    """Advantages (not whitened) and returns of one chain: Schulman et al., arXiv:1506.02438.

    values[t] is the value before sampled token t; the value after the last token is 0. After the last token of a turn comes the
    value before the first token of the next reply, which has seen the observation.

    With `turns` a turn is one action, as in Turn-PPO (arXiv:2512.17008): the recursion reads the value before the first token
    of each turn, and gamma and lam count once per turn. All tokens of a turn then have one return, from which each token's own
    value is subtracted.
    """
    gammas, lams = _rates(gamma, len(rewards), turns), _rates(lam, len(rewards), turns)
    advantages = np.zeros(len(rewards))
    running, after = 0.0, 0.0
    for t in range(len(rewards) - 1, -1, -1):
        running = rewards[t] + gammas[t] * after - values[t] + gammas[t] * lams[t] * running
        advantages[t], after = running, values[t]
    return advantages, advantages + values


def reward_to_go(rewards: TokenValues, *, gamma: float = 1.0, turns: TurnNumbers | None = None) -> TokenValues:
    """Returns the discounted sum of the rewards from each token on. With `turns`, gamma discounts per turn."""
    gammas = _rates(gamma, len(rewards), turns)
    returns = np.zeros(len(rewards))
    running = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        running = rewards[t] + gammas[t] * running
        returns[t] = running
    return returns


def _rates(rate: float, count: int, turns: TurnNumbers | None) -> TokenValues:
    """The factor from each token to the next: `rate`, or with `turns` 1 between two tokens of one turn."""
    if turns is None:
        return np.full(count, rate)
    return np.where(np.append(turns[1:] != turns[:-1], True), rate, 1.0)


def whiten(chains: Sequence[TokenValues]) -> list[TokenValues]:
    """Zero mean and unit variance (n - 1) over all tokens of all chains; zeros if they do not differ."""
    if not chains:
        return []
    every = np.concatenate(chains)
    if len(every) < 2 or np.ptp(every) <= _SAME:
        return [np.zeros(len(chain)) for chain in chains]
    scale = 1.0 / np.sqrt(every.var(ddof=1) + 1e-8)
    return [(chain - every.mean()) * scale for chain in chains]


def explained_variance(values: TokenValues, returns: TokenValues) -> float:
    """1: values predict returns exactly; 0: no better than the mean, or returns do not vary; below 0: worse than the mean."""
    if len(returns) < 2 or np.ptp(returns) <= _SAME:
        return 0.0
    return float(1.0 - np.var(returns - values) / np.var(returns))
