"""The gradients of a minibatch, accumulated over its micro batches on all ranks.

FSDP averages gradients over the ranks, so a loss is multiplied by their number. An error in the loss of one rank is raised on
all ranks when every micro batch is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from ...errors import AgentFlyError
from ..batching import MicroBatch
from ..experience import Experience
from ..metrics import Totals
from ..model.logprobs import EntropyMode, Scores
from ..optim import Optimizer
from .modules import LearnerModules
from .objective import Minibatch, Objective, critic_loss, no_loss


class Gradients:
    """Runs micro batches forward and backward. Returns the loss of the minibatch on this rank and what was measured."""

    def __init__(self, modules: LearnerModules, objective: Objective) -> None:
        self._modules, self._objective, self._group = modules, objective, modules.group

    def of_policy(
        self, optimizer: Optimizer, experience: Experience, minibatch: Minibatch, entropy: EntropyMode, micro: list[MicroBatch]
    ) -> tuple[Tensor, Totals]:
        """Accumulate the gradients of the policy, and of a shared critic, on the parameters."""
        modules, totals = self._modules, Totals()
        minibatch = replace(minibatch, part=self._part(micro))
        totals.add("train/padding_waste", sum(b.num_padding for b in micro), sum(b.input_ids.numel() for b in micro))
        whole = torch.zeros((), device=modules.device)
        factor = optimizer.loss_factor * self._group.size
        failed: AgentFlyError | None = None
        if self._objective.is_divided(experience, micro, self._group.size):
            tokens, logprobs = self._present_logprobs(experience, micro, minibatch.is_first)
            slopes = torch.zeros_like(experience.sampled), torch.zeros_like(whole)
            try:  # every rank computes all slopes; rank 0 measures
                measured = totals if self._group.leads else Totals()
                slopes = self._objective.slopes(experience, tokens, logprobs, minibatch, measured)
            except AgentFlyError as error:
                failed = error
            minibatch = replace(minibatch, slopes=slopes)
        for batch in micro:
            scores = modules.scorer(batch, entropy=entropy, keep_hidden=modules.value_head is not None)
            if modules.value_head is not None:
                scores = replace(scores, values=modules.value_head(scores.hidden))
            try:
                loss = self._objective.loss(experience, batch, scores, minibatch, totals)
            except AgentFlyError as error:
                failed, loss = failed or error, no_loss(scores)
            with self._noting(factor, experience, batch, scores, minibatch, totals):
                optimizer.backward(loss * self._group.size)
            whole += loss.detach()
        try:
            self._group.agree(failed)
        except AgentFlyError:
            optimizer.zero_grad()
            raise
        return whole, totals

    def _present_logprobs(self, experience: Experience, micro: list[MicroBatch], is_first: bool) -> tuple[Tensor, Tensor]:
        """Returns the numbers of the minibatch's tokens on all ranks, and their log-probs under the present weights."""
        tokens = torch.cat([batch.tokens for batch in micro])
        if is_first and experience.recomputed is not None:
            logprobs = experience.recomputed[tokens]  # the weights have not changed since
        else:
            with torch.no_grad():
                logprobs = torch.cat([self._modules.scorer(batch).logprobs for batch in micro])
        if self._group.size == 1:
            return tokens, logprobs
        every, chosen = torch.zeros_like(experience.sampled), torch.zeros_like(experience.sampled)
        every[tokens], chosen[tokens] = logprobs.to(every.dtype), 1.0
        wanted = torch.nonzero(self._group.sum(chosen))[:, 0]
        return wanted, self._group.sum(every)[wanted]

    def of_critic(
        self, optimizer: Optimizer, experience: Experience, minibatch: Minibatch, micro: list[MicroBatch]
    ) -> tuple[Tensor, Totals]:
        """Accumulate the gradients of a separate critic."""
        critic, totals = self._modules.critic, Totals()
        assert critic is not None
        whole = torch.zeros((), device=self._modules.device)
        minibatch = replace(minibatch, part=self._part(micro))
        for batch in micro:
            values = critic(batch)
            loss = critic_loss(experience, self._objective.settings, batch, values, minibatch, totals)
            with _slope_of(values, optimizer.loss_factor * self._group.size) as slope:
                optimizer.backward(loss * self._group.size)
            if minibatch.is_first:
                totals.add("train/value_slope", slope[0].abs().sum() if slope else 0.0, minibatch.part)
            whole += loss.detach()
        return whole, totals

    def _part(self, micro: list[MicroBatch]) -> float:
        """Returns the share of one micro batch among those of all ranks."""
        return 1.0 / (len(micro) * self._group.size)

    @contextmanager
    def _noting(
        self, factor: float, experience: Experience, batch: MicroBatch, scores: Scores, minibatch: Minibatch, totals: Totals
    ) -> Iterator[None]:
        """Note which log-probs receive a gradient while the body runs; in the first and the last optimizer step, how much."""
        with (
            _slope_of(scores.logprobs, factor) as slope,
            _slope_of(scores.entropies, factor) as of_entropy,
            _slope_of(scores.values, factor) as of_value,
        ):
            yield
        if slope:
            experience.use(batch.tokens)
        name = "train/slope" if minibatch.is_first else "train/last_slope"
        slopes = slope[0] if slope else torch.zeros_like(scores.logprobs)
        totals.add(name, slopes.abs().sum(), minibatch.part)
        totals.add(f"{name}_mark", (slopes * scores.logprobs.detach()).sum(), minibatch.part)
        if self._objective.settings.entropy_coef > 0:
            totals.add(name.replace("slope", "entropy_slope"), of_entropy[0].sum() if of_entropy else 0.0, minibatch.part)
        if not minibatch.is_first:
            experience.keep_last(batch.tokens, scores.logprobs)
        elif scores.values is not None:
            totals.add("train/value_slope", of_value[0].abs().sum() if of_value else 0.0, minibatch.part)


@contextmanager
def _slope_of(tensor: Tensor | None, factor: float) -> Iterator[list[Tensor]]:
    """Yields a list that holds the derivative of the loss by the tensor after a backward pass of `factor` times the loss."""
    slopes: list[Tensor] = []
    if tensor is None or not tensor.requires_grad:
        yield slopes
        return
    hook = tensor.register_hook(lambda slope: slopes.append(slope.detach() / factor))  # type: ignore[no-untyped-call]
    try:
        yield slopes
    finally:
        hook.remove()
