"""Direct preference optimisation, arXiv:2305.18290: of two chains of one task, the better one becomes more likely.

    loss of a pair     -log sigmoid(margin)
    margin             beta x (log p/q of the chosen chain - log p/q of the rejected one), p the policy, q the reference

The log-prob of a chain is the sum over its sampled tokens, in all of its turns and rows; prompts and observations do not count.
The reference does not change, so its part of each margin is computed once (`with_reference`), and no model is kept for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from ..errors import ConfigError
from ..types import Sample
from .batching import Rows
from .metrics import Totals
from .model.logprobs import Scorer
from .settings import OptimSettings
from .supervised import RowLearner


@dataclass(frozen=True, slots=True)
class Pair:
    """The rows of two chains of one task. `reference`: log-prob of the chosen minus that of the rejected one, if known."""

    chosen: Sequence[Sample]
    rejected: Sequence[Sample]
    reference: float | None = None


class PreferenceLearner(RowLearner[Pair]):
    """Trains one model on pairs of chains, which `with_reference` has completed."""

    def __init__(
        self,
        model: nn.Module,
        *,
        beta: float = 0.1,
        optim: OptimSettings | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
    ) -> None:
        if not beta > 0:
            raise ConfigError(f"beta must be greater than 0, not {beta}: with 0 no pair teaches anything")
        super().__init__(model, optim=optim, device=device, seed=seed)
        self.beta = beta

    def rows_of(self, item: Pair) -> Sequence[Sample]:
        return [*item.chosen, *item.rejected]

    def with_reference(self, pairs: Sequence[Pair], reference: nn.Module | None = None) -> list[Pair]:
        """Returns the pairs with their part of the margin by the reference; by default by the model as it is now."""
        policy = self._scorer, self._shape
        if reference is not None:
            self._scorer = Scorer(reference.eval(), chunk=self.optim.logprob_chunk)
            self._shape = self._scorer.prepare(replace(self.optim, gradient_checkpointing=False))
        try:
            apart = self._apart(pairs).tolist()
        finally:
            self._scorer, self._shape = policy
        return [replace(pair, reference=each) for pair, each in zip(pairs, apart, strict=True)]

    def slopes(self, rows: Rows, items: Sequence[Pair], members: Sequence[int], totals: Totals) -> tuple[Tensor, float]:
        owners, signs = self._owners(rows, items, members)
        logprobs = self.logprobs(rows, members)
        margins = self._margins(items, _sums(owners, signs * logprobs, len(items)))
        # d loss / d margin = -sigmoid(-margin) / pairs
        by_pair = -self.beta * torch.sigmoid(-margins) / len(items)
        slopes = (signs * by_pair[owners]).float()
        totals.add("train/preference_accuracy", (margins > 0).sum(), len(items))
        totals.add("train/preference_margin", margins.sum(), len(items))
        return slopes, float(-logsigmoid(margins).mean() - (slopes * logprobs).double().sum())

    def evaluate(self, pairs: Sequence[Pair]) -> dict[str, float]:
        """Returns the loss of held-out pairs, the share of them whose margin is above 0, and the mean margin."""
        margins = self._margins(pairs, self._apart(pairs))
        results = {"loss": -logsigmoid(margins), "accuracy": (margins > 0).double(), "margin": margins}
        return {f"eval/{name}": float(values.mean()) for name, values in results.items()}

    def _apart(self, pairs: Sequence[Pair]) -> Tensor:
        """Returns log-prob of the chosen minus that of the rejected chain of each pair."""
        rows, parts = self._table(pairs)
        owners, signs = self._owners(rows, pairs, [row for part in parts for row in part])
        return _sums(owners, signs * self.logprobs(rows), len(pairs))

    def _margins(self, pairs: Sequence[Pair], apart: Tensor) -> Tensor:
        references = [pair.reference for pair in pairs]
        if None in references:
            raise ConfigError("a pair has no log-probs of the reference: complete the pairs with `with_reference` first")
        return self.beta * (apart - torch.tensor(references, dtype=torch.float64, device=self.device))

    def _owners(self, rows: Rows, pairs: Sequence[Pair], members: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns the pair of each token, and 1 for tokens of a chosen chain, -1 for those of a rejected one, 0 for others.

        `members` are the rows of the pairs, in their order.
        """
        owners = np.zeros(rows.num_tokens, dtype=np.int64)
        signs, left = np.zeros(rows.num_tokens), iter(members)
        for number, pair in enumerate(pairs):
            for sign, samples in ((1.0, pair.chosen), (-1.0, pair.rejected)):
                for row in islice(left, len(samples)):
                    tokens = slice(int(rows.starts[row]), int(rows.starts[row + 1]))
                    owners[tokens], signs[tokens] = number, sign
        return torch.from_numpy(owners).to(self.device), torch.from_numpy(signs).to(self.device)


def _sums(owners: Tensor, values: Tensor, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.float64, device=values.device).index_add(0, owners, values.double())
