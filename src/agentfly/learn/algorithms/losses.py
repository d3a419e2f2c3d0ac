"""Losses and divergences: pure functions on one-dimensional tensors with an entry per sampled token.

They return a loss per token and take no mean. `token_weights` gives each token its weight in the whole minibatch, so that the
sum over micro batches gives the same loss and gradient for every division into micro batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..settings import Aggregation, KlKind
from .interface import TokenLoss, Tokens


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns PPO's loss per token, arXiv:1707.06347, and 1 for each token whose ratio was clipped (else 0).

    max(-A r, -A clip(r, 1 - low, 1 + high)); with a dual clip, arXiv:1912.09729, at most -A c where A < 0.
    """
    # exp(20) lies far outside any clip range and is finite: a diverging ratio must not produce a NaN.
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


def gspo(tokens: Tokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """GSPO, arXiv:2507.18071: PPO's loss with one ratio per chain, exp(mean log-ratio of its tokens).

    A token's ratio has the chain's value and the token's gradient (the paper's GSPO-token), so that with equal advantages the
    mean over a chain's tokens has the value and the gradient of the chain's loss.
    """
    chain = tokens.mean_over(tokens.chains, tokens.log_ratio.detach())
    log_ratio = (chain + tokens.logprobs - tokens.logprobs.detach()).clamp(-20.0, 20.0)
    zero = torch.zeros_like(log_ratio)
    return TokenLoss(*clipped_surrogate(log_ratio, zero, tokens.advantages, clip_low=clip_low, clip_high=clip_high))


def cispo(tokens: Tokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """CISPO, arXiv:2506.13585: -A log p, weighted with the clipped ratio as a constant. No token loses its gradient."""
    ratio = tokens.log_ratio.detach().exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return TokenLoss(-weight * tokens.advantages * tokens.logprobs, (weight != ratio).float())


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> Tensor:
    """Half the squared error per token; with `clip`, the larger of it and the error of the value clipped around the old one."""
    loss = (values - returns) ** 2
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (near - returns) ** 2)
    return 0.5 * loss


def kl_divergence(logprobs: Tensor, reference: Tensor, kind: KlKind) -> Tensor:
    """KL(policy, reference) estimated at tokens sampled by the policy; Schulman, "Approximating KL Divergence", 2020.

    k1 = log p/q (unbiased, may be negative); k2 = (log p/q)^2 / 2; k3 = q/p - 1 - log q/p (unbiased, never negative).
    The exponent of k3 is clamped to [-20, 20]; verl also clamps the result to [-10, 10], TRL clamps nothing.
    """
    gap = logprobs - reference
    if kind == "k1":
        return gap
    if kind == "k2":
        return 0.5 * gap**2
    return torch.exp((-gap).clamp(-20.0, 20.0)) - 1.0 + gap


def entropy(logits: Tensor) -> Tensor:
    """Entropy of each row of logits in nats: log Z minus the mean logit."""
    return torch.logsumexp(logits, dim=-1) - (torch.softmax(logits, dim=-1) * logits).sum(dim=-1)


def token_weights(lengths: Sequence[int], aggregation: Aggregation, *, divisor: float = 1.0) -> list[float]:
    """Returns, for each chain of a minibatch, the weight of one of its tokens. `lengths` counts the chains' trained tokens.

    Tokens outside the window are not trained and in no divisor, nor are chains without trained tokens:

    token_mean      1 / all tokens                     a long chain counts more
    sequence_mean   1 / (chains x own tokens)          every chain counts the same, also if a part of it is masked
    sequence_sum    1 / (chains x constant divisor)    Dr. GRPO: length is neither rewarded nor punished
    """
    if aggregation == "token_mean":
        return [1.0 / sum(lengths)] * len(lengths)
    if aggregation == "sequence_mean":
        return [1.0 / (len(lengths) * length) for length in lengths]
    return [1.0 / (len(lengths) * divisor)] * len(lengths)
