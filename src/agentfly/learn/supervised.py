"""Supervised learning: the rows and masks of reinforcement learning, trained by likelihood.

Rows come from `to_samples` on demonstrations. The loss is the mean negative log-likelihood over the masked tokens of a
minibatch, independent of its division into micro batches. Rewards, advantages and versions are not read. `preference` has
another loss for the same rows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from ..errors import ConfigError, InvariantError
from ..kernels import launching_on
from ..kernels.memory import naming_memory
from ..types import Sample
from .batching import MicroBatch, Rows, passes
from .budget import TokenBudget
from .metrics import Totals
from .model.logprobs import Scorer
from .optim import Optimizer
from .settings import OptimSettings

Item = TypeVar("Item")


class RowLearner(ABC, Generic[Item]):
    """Trains one model on items of one or more rows, with a loss of the log-probs of their masked tokens."""

    def __init__(
        self, model: nn.Module, *, optim: OptimSettings | None = None, device: torch.device | str | None = None, seed: int = 0
    ) -> None:
        self.optim = optim or OptimSettings()
        if keys := self.optim.critic_keys:
            raise ConfigError(f"supervised training has no critic: remove train.{keys[0]}")
        self.optim.lr_factor(self.optim.warmup_steps)
        self.model = model.to(device) if device is not None else model
        self.model.eval()
        self.device = next(self.model.parameters()).device
        self._scorer = Scorer(self.model, chunk=self.optim.logprob_chunk)
        self._budget = TokenBudget(self.optim.max_tokens_per_batch, self.device)
        with launching_on(self.device):
            self._shape = self._scorer.prepare(self.optim)
        adapters = not all(weight.requires_grad for weight in self.model.parameters())
        self._lr = self.optim.lr_of(0, adapters)  # imitation stands a higher rate than a policy gradient, at any size
        self._optimizer = Optimizer([(self.model, self._lr)], self.optim)
        self._seed = seed
        self._version = 0

    @property
    def version(self) -> int:
        """Number of updates so far."""
        return self._version

    @abstractmethod
    def rows_of(self, item: Item) -> Sequence[Sample]:
        """Returns the rows of an item."""

    @abstractmethod
    def slopes(self, rows: Rows, items: Sequence[Item], members: Sequence[int], totals: Totals) -> tuple[Tensor, float]:
        """Returns the derivative of the loss of some items by each log-prob, and the loss minus slopes x log-probs.

        `members` are the rows of the items. The loss of micro batches is then a sum, however they divide the rows.
        """

    def update(self, items: Sequence[Item]) -> dict[str, float]:
        """Take epochs x minibatches optimizer steps on these items. Returns metrics."""
        if not items:
            raise ConfigError("the batch has no demonstration to train on")
        self._scorer.plan(self._budget)
        rows, parts = self._table(items)
        totals = Totals()
        factor = self.optim.lr_factor(self._version)
        self._optimizer.set_lr(factor)
        order = f"{self._seed}/{self._version}"
        for chosen in passes(len(items), epochs=self.optim.epochs, num_minibatches=self.optim.num_minibatches, seed=order):
            members = [row for item in chosen for row in parts[item]]
            with launching_on(self.device), naming_memory(f"supervised update {self._version + 1}"):
                self._step(rows, members, self.slopes(rows, [items[item] for item in chosen], members, totals), totals)
        self._version += 1
        return totals.means() | {
            "train/lr": self._lr * factor,
            "train/samples": float(len(rows)),
            "train/tokens": float(rows.num_tokens),
        }

    def _table(self, items: Sequence[Item]) -> tuple[Rows, list[range]]:
        """Returns the rows of all items, and which of them are whose."""
        by_item = [self.rows_of(item) for item in items]
        ends = [0, *accumulate(map(len, by_item))]
        return Rows([sample for samples in by_item for sample in samples]), [range(a, b) for a, b in pairwise(ends)]

    def _step(self, rows: Rows, members: Sequence[int], slopes: tuple[Tensor, float], totals: Totals) -> None:
        def gradients() -> tuple[float, float, list[MicroBatch]]:
            work = partial(self._gradients, *slopes)
            return self._budget.run(lambda: list(self._batches(rows, members)), work, self._optimizer.zero_grad)

        loss_value, norm, micro = gradients()
        while not math.isfinite(norm) and self._optimizer.retry() and math.isfinite(loss_value):
            loss_value, norm, micro = gradients()
        size = sum(batch.input_ids.numel() for batch in micro)
        totals.add("train/padding_waste", sum(batch.num_padding for batch in micro), size)
        if not (math.isfinite(loss_value) and math.isfinite(norm)):
            self._optimizer.zero_grad()
            raise InvariantError(
                f"step {self._version}: the loss is {loss_value}; this step was not applied: lower train.lr"
                f"{self._optimizer.range_hint}"
            )
        self._optimizer.step()
        totals.add("train/loss", loss_value, 1)
        totals.add("train/grad_norm", norm, 1)

    def _batches(self, rows: Rows, members: Sequence[int]) -> Iterator[MicroBatch]:
        return rows.batches(members, self._budget.tokens, self.device, self._shape)

    def _gradients(self, slopes: Tensor, rest: float, micro: list[MicroBatch]) -> tuple[float, float, list[MicroBatch]]:
        """Accumulate the gradients of a minibatch on the parameters. Returns its loss, the gradient's norm and the batches."""
        whole = torch.full((), rest, device=self.device)
        for batch in micro:
            loss = (slopes[batch.tokens] * self._scorer(batch).logprobs).sum()
            self._optimizer.backward(loss)
            whole += loss.detach()
        return float(whole), float(self._optimizer.clip()), micro

    def _log_probs(self, batch: MicroBatch) -> Tensor:
        with launching_on(self.device):
            return self._scorer(batch).logprobs

    @torch.no_grad()
    def logprobs(self, rows: Rows, members: Sequence[int] | None = None) -> Tensor:
        """Returns the log-probs of the masked tokens of some rows, or of all; 0 at the others."""
        logprobs = torch.zeros(rows.num_tokens, device=self.device)
        wanted = range(len(rows)) if members is None else members
        for batch, scores in self._budget.each(partial(self._batches, rows), wanted, self._log_probs):
            logprobs[batch.tokens] = scores.float()
        return logprobs

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the learner without the model's weights."""
        return {"version": self._version, "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        self._version = int(state["version"])


class SupervisedLearner(RowLearner[Sample]):
    """Trains one model on demonstrations. An item is a row."""

    def rows_of(self, item: Sample) -> Sequence[Sample]:
        return [item]

    def slopes(self, rows: Rows, items: Sequence[Sample], members: Sequence[int], totals: Totals) -> tuple[Tensor, float]:
        num_tokens = sum(len(rows.positions[row]) for row in members)
        return torch.full((rows.num_tokens,), -1.0 / num_tokens, device=self.device), 0.0

    def evaluate(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Returns the mean negative log-likelihood per token of held-out rows."""
        return {"eval/loss": -float(self.logprobs(Rows(samples)).double().mean())}
