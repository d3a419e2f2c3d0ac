"""Losses and divergences: pure functions on tensors of one dimension, an entry per sampled token.

In: log-probs, advantages, values. Out: a loss per token, to be weighted and summed. Nothing here takes a mean:
`token_weights` gives each token its weight in the whole minibatch, so that summing over micro batches, in any cut, gives
the same loss and gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .settings import Aggregation, KlKind


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """PPO's loss per token, arXiv:1707.06347, and whether the cut decided it (1 or 0).

    max(-A r, -A clip(r, 1 - low, 1 + high)); with a dual clip, arXiv:1912.09729, at most -A c where A < 0.
    """
    # exp(20) is far outside any clip range and still finite: a runaway ratio must not make a NaN.
    ratio = torch.exp((logprobs - old_logprobs).clamp(-20.0, 20.0))
    free = -advantages * ratio
    cut = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(free, cut)
    was_cut = (cut > free).float()
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        negative = advantages < 0
        was_cut = torch.where(negative & (loss > ceiling), torch.ones_like(was_cut), was_cut)
        loss = torch.where(negative, torch.minimum(loss, ceiling), loss)
    return loss, was_cut


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> Tensor:
    """Half the squared error per token; with `clip`, the worse of it and that of a value kept within `clip` of the old one."""
    loss = (values - returns) ** 2
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (near - returns) ** 2)
    return 0.5 * loss


def kl_divergence(logprobs: Tensor, reference: Tensor, kind: KlKind) -> Tensor:
    """KL(policy, reference) estimated at tokens that the policy sampled; Schulman, "Approximating KL Divergence", 2020.

    k1 = log p/q (unbiased, may be negative); k2 = (log p/q)^2 / 2; k3 = q/p - 1 - log q/p (unbiased, never negative).
    """
    gap = logprobs - reference
    if kind == "k1":
        return gap
    if kind == "k2":
        return 0.5 * gap**2
    return torch.exp((-gap).clamp(-20.0, 20.0)) - 1.0 + gap


def entropy(logits: Tensor) -> Tensor:
    """Entropy, in nats, of each row of logits: log Z minus the mean logit."""
    return torch.logsumexp(logits, dim=-1) - (torch.softmax(logits, dim=-1) * logits).sum(dim=-1)


def token_weights(lengths: Sequence[int], aggregation: Aggregation, *, divisor: float = 1.0) -> list[float]:
    """For each chain of a minibatch, by the number of its sampled tokens, the weight of one of its tokens.

    token_mean      1 / all tokens                     a long chain counts more
    sequence_mean   1 / (chains x own tokens)          every chain counts the same
    sequence_sum    1 / (chains x constant divisor)    Dr. GRPO: no reward for being long or short
    """
    if aggregation == "token_mean":
        return [1.0 / sum(lengths)] * len(lengths)
    if aggregation == "sequence_mean":
        return [1.0 / (len(lengths) * length) for length in lengths]
    return [1.0 / (len(lengths) * divisor)] * len(lengths)
