"""What is minimised on one micro batch: the settings' terms put together from the functions in `losses`.

In: what a forward pass said about a micro batch, and what is known of its tokens. Out: a scalar whose sum over the micro
batches of a minibatch is the minibatch's loss. Runs no model and takes no step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .batching import MicroBatch
from .experience import Experience
from .logprobs import Scores
from .losses import clipped_surrogate, kl_divergence, value_loss
from .settings import LossSettings
from .totals import Totals


@dataclass(frozen=True, slots=True)
class Share:
    """A minibatch, as seen from one of its micro batches.

    `weights` has an entry per token of the experience, `num_tokens` counts those of the minibatch, `part` is 1 / micro batches.
    `untouched` says that no optimizer step has been taken yet.
    """

    weights: Tensor
    num_tokens: int
    part: float
    untouched: bool


def old_logprobs(experience: Experience, settings: LossSettings, own: Tensor, tokens: Tensor | slice) -> Tensor:
    """The ratio's denominator at `tokens`; `own` is what the learner's weights said before they were changed."""
    if settings.old_logprobs == "recompute":
        return own
    sampled = experience.sampled[tokens]
    if settings.old_logprobs == "sampled":
        return sampled
    return torch.where(experience.current[tokens], own, sampled)


def policy_loss(
    experience: Experience, settings: LossSettings, batch: MicroBatch, scores: Scores, share: Share, totals: Totals
) -> Tensor:
    """Clipped surrogate + KL to the reference - entropy bonus."""
    assert experience.advantages is not None
    tokens, count, logprobs = batch.tokens, len(batch.tokens), scores.logprobs
    weights = share.weights[tokens]
    now = logprobs.detach()
    if experience.recomputed is not None:
        own = experience.recomputed[tokens]
    else:  # there is only one optimizer step (or the engine's numbers are used): the weights are still the old ones
        own = now
        if share.untouched:
            measure_gap(experience, now, tokens, totals)
    old = old_logprobs(experience, settings, own, tokens)
    each, was_cut = clipped_surrogate(
        logprobs,
        old,
        experience.advantages[tokens],
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
    )
    loss = (each * weights).sum()
    totals.add("train/policy_loss", loss.detach(), share.part)
    totals.add("train/clip_fraction", was_cut.sum(), count)
    totals.add("train/kl", kl_divergence(old, now, "k3").sum(), count)
    if experience.reference is not None and settings.kl_in == "loss":
        kl = kl_divergence(logprobs, experience.reference[tokens], settings.kl_estimator)
        totals.add("train/reference_kl", kl.detach().sum(), count)
        loss = loss + settings.kl_coef * (kl * weights).sum()
    if scores.entropies is not None:
        totals.add("train/entropy", scores.entropies.detach().sum(), count)
        if settings.entropy_coef > 0:
            loss = loss - settings.entropy_coef * (scores.entropies * weights).sum()
    return loss


def critic_loss(
    experience: Experience, settings: LossSettings, batch: MicroBatch, values: Tensor, share: Share, totals: Totals
) -> Tensor:
    """The value loss, mean over the minibatch's tokens."""
    assert experience.values is not None
    assert experience.returns is not None
    old, returns = experience.values[batch.tokens], experience.returns[batch.tokens]
    loss = value_loss(values, old, returns, clip=settings.value_clip or None).sum() / share.num_tokens
    totals.add("train/value_loss", loss.detach(), share.part)
    return loss


def measure_gap(experience: Experience, logprobs: Tensor, tokens: Tensor, totals: Totals) -> None:
    """Sampler and learner hold the same weights: what they say about the same token should be the same."""
    current = experience.current[tokens]
    gap = (logprobs - experience.sampled[tokens]).abs()
    totals.add("train/logprob_gap", (gap * current).sum(), current.sum())
