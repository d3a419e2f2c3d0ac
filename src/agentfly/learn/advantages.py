"""Rewards become advantages: pure functions, each with its paper.

In: plain lists or arrays. Out: arrays. Nothing here knows tokens, models or settings.

A chain is a stream of its *sampled* tokens only: prompts and tool observations are not in it, and the rows of a chain that
was split are put end to end. Time is counted in sampled tokens, so a reward at the end reaches every token before it, over
any number of observations. For GAE this is the same as carrying value and accumulator across masked tokens. For REINFORCE++
it differs from verl on purpose: verl sets the running return to zero at a masked token, so a final reward never reaches
what was said before the last observation; in a multi-turn chain that is most of what was done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Stream = NDArray[np.float64]

# Differences below this are rounding, not preference: dividing them by their own size would make noise look like a signal.
_SAME = 1e-9


def grpo(rewards: Sequence[float], *, normalize_std: bool = True) -> Stream:
    """r minus the group's mean, over its standard deviation (n - 1) + 1e-6: DeepSeekMath, arXiv:2402.03300.

    Without the division it is Dr. GRPO, arXiv:2503.20783. Fewer than two chains have nothing to compare: 0.
    """
    scores: Stream = np.asarray(rewards, dtype=np.float64)
    if len(scores) < 2 or np.ptp(scores) <= _SAME:
        return np.zeros_like(scores)
    centred: Stream = scores - scores.mean()
    if normalize_std:
        centred /= scores.std(ddof=1) + 1e-6
    return centred


def rloo(rewards: Sequence[float]) -> Stream:
    """r minus the mean of the others: arXiv:2402.14740. Fewer than two chains have nothing to compare: 0."""
    scores: Stream = np.asarray(rewards, dtype=np.float64)
    n = len(scores)
    if n < 2 or np.ptp(scores) <= _SAME:
        return np.zeros_like(scores)
    others: Stream = (scores.sum() - scores) / (n - 1)
    return scores - others


def reinforce_plus_plus(rewards: Sequence[Stream], *, gamma: float = 1.0) -> list[Stream]:
    """Discounted reward-to-go of each token, whitened over every token of the batch: arXiv:2501.03262.

    `rewards` holds one stream per chain; a KL penalty has already been taken off it.
    """
    return whiten([reward_to_go(stream, gamma=gamma) for stream in rewards])


def reinforce_plus_plus_baseline(rewards: Sequence[Stream], groups: Sequence[int]) -> list[Stream]:
    """A chain's reward minus its group's mean, on each of its tokens, whitened over the batch: arXiv:2501.03262.

    A chain without siblings has nothing to compare: its advantage is 0 and it does not move the others' mean.
    """
    totals = np.array([stream.sum() for stream in rewards])
    result = [np.zeros(len(stream)) for stream in rewards]
    sizes = Counter(groups)
    compared = [chain for chain, group in enumerate(groups) if sizes[group] > 1]
    means = {group: totals[[other == group for other in groups]].mean() for group in sizes}
    centred = [np.full(len(rewards[chain]), totals[chain] - means[groups[chain]]) for chain in compared]
    for chain, advantages in zip(compared, whiten(centred), strict=True):
        result[chain] = advantages
    return result


def gae(rewards: Stream, values: Stream, *, gamma: float = 1.0, lam: float = 1.0) -> tuple[Stream, Stream]:
    """Advantages (not whitened) and returns of one chain: Schulman et al., arXiv:1506.02438.

    values[t] is the value before sampled token t; after the last there is none. The value that follows the last token of a turn
    is the one before the first token of the next reply, which has seen the observation.
    """
    advantages = np.zeros(len(rewards))
    running, after = 0.0, 0.0
    for t in range(len(rewards) - 1, -1, -1):
        running = rewards[t] + gamma * after - values[t] + gamma * lam * running
        advantages[t], after = running, values[t]
    return advantages, advantages + values


def reward_to_go(rewards: Stream, *, gamma: float = 1.0) -> Stream:
    """The discounted sum of the rewards from each token on."""
    returns = np.zeros(len(rewards))
    running = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        running = rewards[t] + gamma * running
        returns[t] = running
    return returns


def whiten(streams: Sequence[Stream]) -> list[Stream]:
    """Zero mean and unit variance (n - 1) over every token of every stream; all zeros where they do not differ."""
    if not streams:
        return []
    every = np.concatenate(streams)
    if len(every) < 2 or np.ptp(every) <= _SAME:
        return [np.zeros(len(stream)) for stream in streams]
    scale = 1.0 / np.sqrt(every.var(ddof=1) + 1e-8)
    return [(stream - every.mean()) * scale for stream in streams]


def explained_variance(values: Stream, returns: Stream) -> float:
    """1: the critic knows the returns; 0: it knows nothing, or returns do not vary; below 0: it misleads."""
    if len(returns) < 2 or np.ptp(returns) <= _SAME:
        return 0.0
    return float(1.0 - np.var(returns - values) / np.var(returns))
