"""Micro batches of the rows of a step, and passes without gradients that score their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...engines.local.load import context_of
from ...types import Sample, TokenFit
from ..batching import MicroBatch, Rows
from ..budget import TokenBudget
from ..experience import Experience
from ..hint import Prompts, hinted_rows
from ..metrics import Totals
from ..model.evidence import UNKNOWN, token_fit
from .division import rank_batches
from .modules import LearnerModules
from .objective import measure_gap


class Scoring:
    """Scores tokens under the present weights. Every rank runs its own micro batches and gets the scores of all tokens."""

    def __init__(self, modules: LearnerModules, budget: TokenBudget, hint: Prompts | None = None) -> None:
        self._modules, self._budget, self._group, self._hint = modules, budget, modules.group, hint

    def batches(self, table: Rows, rows: Sequence[int]) -> Iterator[MicroBatch]:
        """Returns this rank's micro batches of some rows of a table."""
        modules, tokens = self._modules, self._budget.tokens
        return rank_batches(table, rows, tokens, modules.device, modules.shape, modules.group, modules.width)

    def trained_batches(self, experience: Experience, rows: Sequence[int]) -> list[MicroBatch]:
        """Returns micro batches whose predictions are trained tokens only. Every loss is computed on these."""
        with self._group.together():
            batches = [experience.only_trained(batch) for batch in self.batches(experience.rows, rows)]
            experience.check_window(batches)
        return batches

    @torch.no_grad()
    def score_policy(self, experience: Experience, rows: Sequence[int], totals: Totals) -> None:
        """Compute the log-probs of the weights before the update, and how far the sampler's differ from them."""
        experience.recomputed = torch.zeros_like(experience.sampled)
        for batch, logprobs in self._scored(experience.rows, rows, lambda batch: self._modules.scorer(batch).logprobs):
            experience.recomputed[batch.tokens] = logprobs
            measure_gap(experience, logprobs, batch.tokens, totals)
        self._group.sum(experience.recomputed)

    @torch.no_grad()
    def score_reference(self, experience: Experience, rows: Sequence[int]) -> Tensor:
        """Returns the log-probs of the reference model, which reads the hint if there is one."""
        reference, table = self._modules.checked_reference(), experience.rows
        if self._hint is not None:
            config: Any = reference.model.config
            table = hinted_rows(experience, self._hint, context_of(config))
        experience.reference = torch.zeros_like(experience.sampled)
        for batch, logprobs in self._scored(table, rows, lambda batch: reference(batch).logprobs):
            experience.reference[batch.tokens] = logprobs
        return self._group.sum(experience.reference)

    @torch.no_grad()
    def score_values(self, experience: Experience, rows: Sequence[int]) -> Tensor:
        """Returns the values of the critic."""
        experience.values = torch.zeros_like(experience.sampled)
        for batch, values in self._scored(experience.rows, rows, self._modules.values):
            experience.values[batch.tokens] = values
        return self._group.sum(experience.values)

    def _scored(
        self, table: Rows, rows: Sequence[int], score: Callable[[MicroBatch], Tensor]
    ) -> Iterator[tuple[MicroBatch, Tensor]]:
        return self._budget.each(partial(self.batches, table), rows, score)

    @torch.no_grad()
    def examine(self, samples: Sequence[Sample], drawn: int, numbers: Sequence[float]) -> TokenFit:
        """Returns the log-probs of the sampled tokens, and how the tokens of the last `drawn` rows fit. Ranks divide no row."""
        rows = Rows(samples)
        first, logprobs = int(rows.starts[len(rows) - drawn]), np.zeros(rows.num_tokens)
        known = torch.full((rows.num_tokens,), UNKNOWN, device=self._modules.device)
        known[rows.num_tokens - len(numbers) :] = torch.tensor(numbers, device=self._modules.device)
        fits: list[Tensor] = []

        def score(batch: MicroBatch) -> Tensor:
            places = torch.nonzero(batch.tokens >= first)[:, 0]
            scores = self._modules.scorer(batch, drawn=(places, known[batch.tokens[places]]) if drawn else None)
            fits.extend([] if scores.fit is None else [scores.fit])
            return scores.logprobs

        def divide(left: Sequence[int]) -> Iterator[MicroBatch]:
            return rows.batches(left, self._budget.tokens, self._modules.device, self._modules.shape)

        for batch, scores in self._budget.each(divide, range(len(rows)), score):
            logprobs[batch.tokens.cpu().numpy()] = scores.double().cpu().numpy()
        return token_fit([part.tolist() for part in np.split(logprobs, rows.starts[1:-1])], fits)
