"""The objective on one micro batch: the terms that the settings ask for, from the functions in `losses`.

Each function returns a scalar; the sum over the micro batches of a minibatch is the minibatch's loss. No model runs here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..batching import MicroBatch
from ..experience import Experience
from ..metrics import Totals
from ..model.logprobs import Scores
from ..settings import LossSettings
from .losses import clipped_surrogate, kl_divergence, value_loss


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The minibatch that a micro batch belongs to.

    `weights` has an entry per token of the experience, `num_tokens` counts the minibatch's tokens, `part` is 1 / micro batches.
    `is_first` is true until the first optimizer step of the update.
    """

    weights: Tensor
    num_tokens: int
    part: float
    is_first: bool


def old_logprobs(experience: Experience, settings: LossSettings, own: Tensor, tokens: Tensor | slice) -> Tensor:
    """Returns the ratio's denominator at `tokens`. `own` are the log-probs of the learner's weights before the update."""
    if settings.old_logprobs == "recompute":
        return own
    sampled = experience.sampled[tokens]
    if settings.old_logprobs == "sampled":
        return sampled
    return torch.where(experience.current[tokens], own, sampled)


def policy_loss(
    experience: Experience, settings: LossSettings, batch: MicroBatch, scores: Scores, minibatch: Minibatch, totals: Totals
) -> Tensor:
    """Returns clipped surrogate + KL to the reference - entropy bonus."""
    assert experience.advantages is not None
    tokens, count, logprobs = batch.tokens, len(batch.tokens), scores.logprobs
    weights = minibatch.weights[tokens]
    now = logprobs.detach()
    if experience.recomputed is not None:
        own = experience.recomputed[tokens]
    else:  # one optimizer step only (or the engine's log-probs are used): these weights are still the old ones
        own = now
        if minibatch.is_first:
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
    totals.add("train/policy_loss", loss.detach(), minibatch.part)
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
    experience: Experience, settings: LossSettings, batch: MicroBatch, values: Tensor, minibatch: Minibatch, totals: Totals
) -> Tensor:
    """Returns the value loss, the mean over the minibatch's tokens."""
    assert experience.values is not None
    assert experience.returns is not None
    old, returns = experience.values[batch.tokens], experience.returns[batch.tokens]
    loss = value_loss(values, old, returns, clip=settings.value_clip or None).sum() / minibatch.num_tokens
    totals.add("train/value_loss", loss.detach(), minibatch.part)
    return loss


def measure_gap(experience: Experience, logprobs: Tensor, tokens: Tensor, totals: Totals) -> None:
    """Measure how far the sampler's and the learner's log-probs differ on tokens that the current weights drew."""
    current = experience.current[tokens]
    gap = (logprobs - experience.sampled[tokens]).abs()
    totals.add("train/logprob_gap", (gap * current).sum(), current.sum())
