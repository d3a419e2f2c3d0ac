"""The objective on one micro batch: the terms that the settings ask for, from the functions in `losses`.

`Objective` tells what a minibatch needs and adds up its terms. Each function returns a scalar; the sum over the micro batches
of a minibatch is the minibatch's loss. No model runs here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import ConfigError
from ..algorithms.interface import Algorithm, Scope, TokenLoss, Tokens
from ..algorithms.losses import clipped_surrogate, correction_weights, kl_divergence, token_weights, value_loss
from ..batching import MicroBatch
from ..experience import Experience
from ..metrics import Totals
from ..model.logprobs import Scores
from ..settings import LossSettings


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The minibatch that a micro batch belongs to.

    `weights` has an entry per token of the experience, `num_tokens` counts the minibatch's tokens, `part` is 1 / micro batches.
    `is_first` is true until the first optimizer step of the update. `slopes` are known if micro batches divide what the loss
    needs: its derivative by each log-prob, and the loss.
    """

    weights: Tensor
    num_tokens: int
    is_first: bool
    part: float = 1.0
    slopes: tuple[Tensor, Tensor] | None = None


class Objective:
    """The loss of an algorithm with the terms of its settings."""

    def __init__(self, algorithm: Algorithm, settings: LossSettings) -> None:
        self._algorithm, self.settings = algorithm, settings

    def rows_to_train(self, experience: Experience) -> list[bool]:
        """Returns the rows whose loss may differ from 0. A loss over whole chains needs all rows of a chain."""
        trained = experience.rows_with_trained()
        if self._algorithm.trains_zero_advantages:
            return trained
        wanted = experience.rows_with_advantage()
        if self._scope(experience) != "token":
            for rows in experience.chain_rows:
                if any(wanted[rows.start : rows.stop]):
                    wanted[rows.start : rows.stop] = trained[rows.start : rows.stop]
        return wanted

    def needs_recompute(self, experience: Experience, num_steps: int) -> bool:
        """Whether log-probs are needed before the first optimizer step. A single step computes them in its own pass."""
        if experience.recomputed is not None or num_steps == 1:
            return False
        mode = self.settings.old_logprobs
        corrects = self.settings.correction != "off" and experience.inexact is not None
        return mode == "recompute" or (mode == "auto" and (corrects or bool(experience.current.any())))

    def minibatch(self, experience: Experience, chains: Sequence[int], is_first: bool) -> Minibatch:
        """Returns the minibatch of these chains, with the weight of each token in its loss."""
        settings, of_chain = self.settings, np.zeros(experience.num_chains, dtype=np.float32)
        lengths = experience.num_trained[chains].tolist()
        of_chain[chains] = token_weights(lengths, settings.aggregation, divisor=settings.sequence_divisor)
        weights = of_chain[experience.owners]
        if experience.trained is not None:
            weights = weights * experience.trained
        return Minibatch(torch.from_numpy(weights).to(experience.sampled.device), sum(lengths), is_first)

    def is_divided(self, experience: Experience, micro: Sequence[MicroBatch], num_ranks: int) -> bool:
        """Whether micro batches divide what the algorithm's loss needs in one call. Those of several ranks may do so."""
        # Recomputed log-probs give the weights of sequences without a call for the whole chain.
        scope = self._scope(experience) if experience.recomputed is None else self._algorithm.loss_scope
        if scope == "token" or (len(micro) == 1 and num_ranks == 1):
            return False
        if scope == "minibatch" or num_ranks > 1:
            return True
        parts = [set(experience.chain_of[batch.tokens].tolist()) for batch in micro]
        return len(set().union(*parts)) < sum(map(len, parts))

    def _scope(self, experience: Experience) -> Scope:
        """Returns what one call of the loss must hold completely. The weight of a sequence needs the whole chain."""
        if self._algorithm.loss_scope == "token" and self.settings.correction == "sequence" and experience.inexact is not None:
            return "chain"
        return self._algorithm.loss_scope

    def slopes(
        self, experience: Experience, tokens: Tensor, logprobs: Tensor, minibatch: Minibatch, totals: Totals
    ) -> tuple[Tensor, Tensor]:
        """Returns the derivative of the algorithm's loss by each log-prob, and the loss, over the whole minibatch.

        By the chain rule, slopes x log-probs has the gradient of the loss, and the micro batches can be run one by one.
        """
        leaf = logprobs.detach().clone().requires_grad_()
        with torch.enable_grad():
            loss = surrogate(experience, self._algorithm, self.settings, tokens, leaf, minibatch, totals, part=1.0)
        slopes = torch.zeros_like(experience.sampled, dtype=leaf.dtype)
        slopes[tokens] = torch.autograd.grad(loss, leaf)[0]
        return slopes, loss.detach()

    def loss(self, experience: Experience, batch: MicroBatch, scores: Scores, minibatch: Minibatch, totals: Totals) -> Tensor:
        """Returns the loss of one micro batch."""
        tokens, values, slopes, settings = batch.tokens, scores.values, minibatch.slopes, self.settings
        if not len(tokens):  # padding of this rank: it has its part of the minibatch and nothing else
            totals.add("train/policy_loss", 0.0, 0.0 if slopes else minibatch.part)
            totals.add("train/value_loss", 0.0, 0.0 if values is None else minibatch.part)
            return no_loss(scores) + (slopes[1] * minibatch.part if slopes else 0.0)
        if slopes is None:
            loss = surrogate(
                experience, self._algorithm, settings, tokens, scores.logprobs, minibatch, totals, part=minibatch.part
            )
        else:
            linear = (slopes[0][tokens] * scores.logprobs).sum()
            loss = linear - linear.detach() + slopes[1] * minibatch.part
        loss = loss + regularizers(experience, settings, tokens, scores, minibatch, totals)
        if values is not None:
            loss = loss + settings.value_coef * critic_loss(experience, settings, batch, values, minibatch, totals)
        return loss


def no_loss(scores: Scores) -> Tensor:
    """Returns 0 with a gradient of 0 for each output: a rank without a loss takes part in the backward pass, too."""
    outputs = [tensor for tensor in (scores.logprobs, scores.entropies, scores.values) if tensor is not None]
    return sum((tensor.sum() * 0.0 for tensor in outputs), torch.zeros((), device=scores.logprobs.device))


def old_logprobs(experience: Experience, settings: LossSettings, own: Tensor, tokens: Tensor | slice) -> Tensor:
    """Returns the ratio's denominator at `tokens`. `own` are the log-probs of the learner's weights before the update.

    With a correction it is `own`, as in decoupled PPO (arXiv:2110.00641, arXiv:2505.24298): the ratio is clipped around the
    weights before the update, and `importance_weights` accounts for the distance from the sampler to them.
    """
    if settings.old_logprobs == "recompute" or settings.correction != "off":
        return own
    sampled = experience.sampled[tokens]
    if settings.old_logprobs == "sampled":
        return sampled
    return torch.where(experience.current[tokens], own, sampled)


def importance_weights(experience: Experience, settings: LossSettings, own: Tensor, tokens: Tensor, totals: Totals) -> Tensor:
    """Returns the weight of `loss.correction` at each of `tokens`: 1 where the learner's weights drew the token exactly.

    For "sequence", all trained tokens of a chain get the chain's weight, and `tokens` holds whole chains unless log-probs were
    recomputed. The metrics count corrected tokens; for "sequence", chains with a corrected token.
    """
    assert experience.inexact is not None
    if settings.correction == "sequence":
        weights, clipped, corrected = _sequence_weights(experience, settings, own, tokens)
        per_token = weights[experience.chain_of[tokens]]
    else:
        corrected = experience.inexact[tokens]
        gaps = torch.where(corrected, own - experience.sampled[tokens], torch.zeros_like(own))
        weights, clipped = correction_weights(gaps, settings.correction, settings.correction_cap)
        per_token = weights
    count = corrected.sum()
    totals.add("train/correction_mean", (weights * corrected).sum(), count)
    totals.add("train/correction_clipped", (clipped * corrected).sum(), count)
    totals.add("train/ess", (weights**2 * corrected).sum(), count)  # the mean square; `Totals.means` makes the ratio
    return per_token


def _sequence_weights(
    experience: Experience, settings: LossSettings, own: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns, for each chain, its weight, whether it was truncated, and the share of its corrected tokens in `tokens`."""
    assert experience.inexact is not None

    def per_chain(chains: Tensor, values: Tensor) -> Tensor:
        return own.new_zeros(experience.num_chains).index_add(0, chains, values.to(own.dtype))

    chains, inexact = experience.chain_of[tokens], experience.inexact[tokens]
    share = per_chain(chains, inexact) / per_chain(experience.chain_of, experience.inexact).clamp(min=1.0)
    if experience.recomputed is None:
        sums = per_chain(chains, torch.where(inexact, own - experience.sampled[tokens], torch.zeros_like(own)))
    else:  # micro batches may divide a chain
        gaps = experience.recomputed - experience.sampled
        sums = per_chain(experience.chain_of, torch.where(experience.inexact, gaps, torch.zeros_like(gaps)))
    return *correction_weights(sums, "sequence", settings.correction_cap), share


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
    weights = minibatch.weights[tokens]
    if experience.inexact is not None and settings.correction != "off":
        weights = weights * importance_weights(experience, settings, own, tokens, totals)
    batch = Tokens(
        logprobs=logprobs,
        old_logprobs=old_logprobs(experience, settings, own, tokens),
        advantages=experience.advantages[tokens],
        chains=experience.chain_of[tokens],
        turns=experience.turn_of[tokens],
        groups=experience.group_of[tokens],
        weights=weights,
        reference_logprobs=None if experience.reference is None else experience.reference[tokens],
    )
    result = _token_loss(algorithm, batch, settings)
    loss = (result.loss * batch.weights).sum()
    totals.add("train/policy_loss", loss.detach(), part)
    if result.clipped is not None:
        totals.add("train/clip_fraction", result.clipped.detach().sum(), len(tokens))
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
        result = algorithm.loss(tokens, settings)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ConfigError(f"the loss of algorithm {algorithm.name!r} raised {type(error).__name__}: {error}") from error
    result = TokenLoss(result) if isinstance(result, Tensor) else result
    if not isinstance(result, TokenLoss) or result.loss.shape != tokens.logprobs.shape:
        shape = tuple(result.loss.shape) if isinstance(result, TokenLoss) else type(result).__name__
        raise ConfigError(
            f"the loss of algorithm {algorithm.name!r} must return a number for each of the {len(tokens.logprobs)} tokens, "
            f"not {shape}: loss.aggregation weights and adds them"
        )
    if not result.loss.requires_grad:
        raise ConfigError(
            f"the loss of algorithm {algorithm.name!r} does not depend on tokens.logprobs: nothing can be learned"
        )
    return result


def regularizers(
    experience: Experience, settings: LossSettings, tokens: Tensor, scores: Scores, minibatch: Minibatch, totals: Totals
) -> Tensor:
    """Returns KL to the reference - entropy bonus, as far as the settings ask for them. Notes what was computed."""
    if minibatch.is_first or experience.recomputed is not None:
        experience.keep(tokens, scores.logprobs if experience.recomputed is None else experience.recomputed[tokens])
    experience.keep_entropies(tokens, scores.entropies)
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
    """Measure how far the sampler's and the learner's log-probs differ.

    The gap is measured on chains that the current weights drew completely, the KL divergence on all trained tokens. A chain
    that began under older weights may have been continued with their keys and values: its later tokens carry the current
    version, but no forward pass of the current weights gives their log-probs.
    """
    fresh, sampled = experience.fresh[tokens], experience.sampled[tokens]
    apart, count = (sampled - logprobs) * fresh, fresh.sum()
    totals.add("train/logprob_gap", apart.abs().sum(), count)
    totals.add("train/logprob_gap_bias", apart.sum(), count)
    totals.add("train/logprob_gap_error", apart.square().sum(), count)
    if experience.inexact is not None:
        kl = experience.trained_values(kl_divergence(sampled, logprobs, "k3"), tokens)
        totals.add("train/mismatch_kl", kl.sum(), len(kl))
