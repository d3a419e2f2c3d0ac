"""The gradients of a minibatch, accumulated over its micro batches on all ranks.

FSDP averages gradients over the ranks, so a loss is multiplied by their number. An error in the loss of one rank is raised on
all ranks when every micro batch is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ...errors import AgentFlyError
from ..batching import MicroBatch
from ..experience import Experience
from ..group import LearnerGroup
from ..metrics import Totals
from ..model.logprobs import EntropyMode, Scores
from ..optim import Optimizer
from .modules import LearnerModules
from .objective import Minibatch, Objective
from .scoring import Scoring


class Gradients:
    """Runs micro batches forward and backward. Returns the loss of the minibatch on this rank and what was measured."""

    def __init__(self, modules: LearnerModules, objective: Objective, scoring: Scoring, group: LearnerGroup) -> None:
        self._modules, self._objective, self._scoring, self._group = modules, objective, scoring, group

    def of_policy(
        self,
        optimizer: Optimizer,
        experience: Experience,
        weights: Tensor,
        num_tokens: int,
        entropy: EntropyMode,
        is_first: bool,
        micro: Sequence[MicroBatch],
    ) -> tuple[Tensor, Totals]:
        """Accumulate the gradients of the policy, and of a shared critic, on the parameters."""
        modules, totals = self._modules, Totals()
        minibatch = Minibatch(weights, num_tokens, self._part(micro), is_first)
        totals.add("train/padding_waste", sum(b.num_padding for b in micro), sum(b.input_ids.numel() for b in micro))
        whole = torch.zeros((), device=modules.device)
        slopes: tuple[Tensor, Tensor] | None = None
        failed: AgentFlyError | None = None
        if self._objective.is_divided(experience, micro, self._group.size):
            tokens, logprobs = self._scoring.present_logprobs(experience, micro, unchanged=is_first)
            try:  # every rank computes all slopes; rank 0 measures
                measured = totals if self._group.leads else Totals()
                slopes = self._objective.slopes(experience, tokens, logprobs, minibatch, measured)
            except AgentFlyError as error:
                slopes, failed = (torch.zeros_like(experience.sampled), torch.zeros_like(whole)), error
        for batch in micro:
            scores = modules.scorer(batch, entropy=entropy, keep_hidden=modules.value_head is not None)
            values = None if modules.value_head is None else modules.value_head(scores.hidden)
            try:
                loss = self._loss(experience, batch, scores, values, minibatch, totals, slopes)
            except AgentFlyError as error:
                failed = failed or error
                loss = _nothing(scores, values)
            with self._noting(optimizer, experience, batch, scores, values, minibatch, totals):
                optimizer.backward(loss * self._group.size)
            whole += loss.detach()
        try:
            self._group.agree(failed)
        except AgentFlyError:
            optimizer.zero_grad()
            raise
        return whole, totals

    def _loss(
        self,
        experience: Experience,
        batch: MicroBatch,
        scores: Scores,
        values: Tensor | None,
        minibatch: Minibatch,
        totals: Totals,
        slopes: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        if len(batch.tokens):
            return self._objective.loss(experience, batch, scores, values, minibatch, totals, slopes)
        # A padding micro batch of this rank: it only has its part of the minibatch.
        if slopes is None:
            totals.add("train/policy_loss", 0.0, minibatch.part)
        if values is not None:
            totals.add("train/value_loss", 0.0, minibatch.part)
        return _nothing(scores, values) + (0.0 if slopes is None else slopes[1] * minibatch.part)

    def of_critic(
        self,
        optimizer: Optimizer,
        experience: Experience,
        num_tokens: int,
        is_first: bool,
        micro: Sequence[MicroBatch],
    ) -> tuple[Tensor, Totals]:
        """Accumulate the gradients of a separate critic."""
        critic, totals = self._modules.critic, Totals()
        assert critic is not None
        whole = torch.zeros((), device=self._modules.device)
        minibatch = Minibatch(experience.sampled, num_tokens, self._part(micro), False)
        for batch in micro:
            values = critic(batch)
            loss = self._objective.critic_loss(experience, batch, values, minibatch, totals)
            with self._slope_of(values, optimizer) as slope:
                optimizer.backward(loss * self._group.size)
            if is_first:
                totals.add("train/value_slope", slope[0].abs().sum() if slope else 0.0, minibatch.part)
            whole += loss.detach()
        return whole, totals

    def _part(self, micro: Sequence[MicroBatch]) -> float:
        """Returns the share of one micro batch among those of all ranks."""
        return 1.0 / (len(micro) * self._group.size)

    @contextmanager
    def _noting(
        self,
        optimizer: Optimizer,
        experience: Experience,
        batch: MicroBatch,
        scores: Scores,
        values: Tensor | None,
        minibatch: Minibatch,
        totals: Totals,
    ) -> Iterator[None]:
        """Note which log-probs receive a gradient while the body runs; in the first and the last optimizer step, how much."""
        with (
            self._slope_of(scores.logprobs, optimizer) as slope,
            self._slope_of(scores.entropies, optimizer) as of_entropy,
            self._slope_of(values, optimizer) as of_value,
        ):
            yield
        if slope:
            experience.use(batch.tokens)
        name = "train/slope" if minibatch.is_first else "train/last_slope"
        slopes = slope[0] if slope else torch.zeros_like(scores.logprobs)
        totals.add(name, slopes.abs().sum(), minibatch.part)
        totals.add(f"{name}_mark", (slopes * scores.logprobs.detach()).sum(), minibatch.part)
        if self._objective.has_entropy_bonus:
            totals.add(name.replace("slope", "entropy_slope"), of_entropy[0].sum() if of_entropy else 0.0, minibatch.part)
        if not minibatch.is_first:
            experience.keep_last(batch.tokens, scores.logprobs)
        elif values is not None:
            totals.add("train/value_slope", of_value[0].abs().sum() if of_value else 0.0, minibatch.part)

    @contextmanager
    def _slope_of(self, tensor: Tensor | None, optimizer: Optimizer) -> Iterator[list[Tensor]]:
        """Yields a list that holds the derivative of the loss by the tensor after a backward pass, if there is one."""
        slopes: list[Tensor] = []
        if tensor is None or not tensor.requires_grad:
            yield slopes
            return
        factor = optimizer.loss_factor * self._group.size
        hook = tensor.register_hook(lambda slope: slopes.append(slope.detach() / factor))
        try:
            yield slopes
        finally:
            hook.remove()


def _nothing(scores: Scores, values: Tensor | None) -> Tensor:
    """Returns 0 with a gradient of 0 for each output: a rank without a loss runs the collectives of the backward pass, too."""
    outputs = [tensor for tensor in (scores.logprobs, scores.entropies, values) if tensor is not None]
    return sum((tensor.sum() * 0.0 for tensor in outputs), torch.zeros((), device=scores.logprobs.device))
