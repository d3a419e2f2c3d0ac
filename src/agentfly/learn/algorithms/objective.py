"""The objective on one micro batch: the terms that the settings ask for, from the functions in `losses`.

Each function returns a scalar; the sum over the micro batches of a minibatch is the minibatch's loss. No model runs here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError
from ..batching import MicroBatch
from ..experience import Experience
from ..metrics import Totals
from ..model.logprobs import Scores
from ..settings import LossSettings
from .interface import Algorithm, TokenLoss, Tokens
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


def surrogate(
    experience: Experience,
    algorithm: Algorithm,
    settings: LossSettings,
    tokens: Tensor,
    logprobs: Tensor,
    minibatch: Minibatch,
    totals: Totals,
    *,
    part: float,
) -> Tensor:
    """Returns the algorithm's loss at `tokens`, weighted and summed. `part` is their share of the minibatch's calls."""
    assert experience.advantages is not None
    now = logprobs.detach()
    if experience.recomputed is not None:
        own = experience.recomputed[tokens]
    else:  # one optimizer step only (or the engine's log-probs are used): these weights are still the old ones
        own = now
        if minibatch.is_first:
            measure_gap(experience, now, tokens, totals)
    batch = Tokens(
        logprobs=logprobs,
        old_logprobs=old_logprobs(experience, settings, own, tokens),
        advantages=experience.advantages[tokens],
        chains=experience.chain_of[tokens],
        turns=experience.turn_of[tokens],
        groups=experience.group_of[tokens],
        weights=minibatch.weights[tokens],
        reference_logprobs=None if experience.reference is None else experience.reference[tokens],
    )
    found = _token_loss(algorithm, batch, settings)
    loss = (found.loss * batch.weights).sum()
    totals.add("train/policy_loss", loss.detach(), part)
    if found.clipped is not None:
        totals.add("train/clip_fraction", found.clipped.detach().sum(), len(tokens))
    totals.add("train/kl", kl_divergence(batch.old_logprobs, now, "k3").sum(), len(tokens))
    return loss


def _token_loss(algorithm: Algorithm, tokens: Tokens, settings: LossSettings) -> TokenLoss:
    """Returns PPO's loss, or that of the algorithm. Raises ConfigError if the algorithm's function fails."""
    if algorithm.loss is None:
        limits: dict[str, Any] = {
            "clip_low": settings.clip_low,
            "clip_high": settings.clip_high,
            "dual_clip": settings.dual_clip,
        }
        return TokenLoss(*clipped_surrogate(tokens.logprobs, tokens.old_logprobs, tokens.advantages, **limits))
    try:
        found = algorithm.loss(tokens, settings)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ConfigError(f"the loss of algorithm {algorithm.name!r} raised {type(error).__name__}: {error}") from error
    found = TokenLoss(found) if isinstance(found, Tensor) else found
    if not isinstance(found, TokenLoss) or found.loss.shape != tokens.logprobs.shape:
        shape = tuple(found.loss.shape) if isinstance(found, TokenLoss) else type(found).__name__
        raise ConfigError(
            f"the loss of algorithm {algorithm.name!r} must return a number for each of the {len(tokens.logprobs)} tokens, "
            f"not {shape}: loss.aggregation weights and adds them"
        )
    if not found.loss.requires_grad:
        raise ConfigError(
            f"the loss of algorithm {algorithm.name!r} does not depend on tokens.logprobs: nothing can be learned"
        )
    return found


def regularizers(
    experience: Experience, settings: LossSettings, tokens: Tensor, scores: Scores, minibatch: Minibatch, totals: Totals
) -> Tensor:
    """Returns KL to the reference - entropy bonus, as far as the settings ask for them."""
    weights, count = minibatch.weights[tokens], len(tokens)
    loss = torch.zeros((), device=weights.device)
    if experience.reference is not None and settings.kl_in == "loss":
        kl = kl_divergence(scores.logprobs, experience.reference[tokens], settings.kl_estimator)
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
    """Measure how far the sampler's and the learner's log-probs differ on chains that the current weights drew completely.

    A chain that began under older weights may have been continued with their keys and values: its later tokens carry the
    current version, but no forward pass of the current weights gives their log-probs.
    """
    fresh = experience.fresh[tokens]
    gap = (logprobs - experience.sampled[tokens]).abs()
    totals.add("train/logprob_gap", (gap * fresh).sum(), fresh.sum())
