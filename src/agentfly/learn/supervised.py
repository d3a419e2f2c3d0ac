"""Supervised learning: the rows and masks of reinforcement learning, trained by likelihood.

Rows come from `to_samples` on demonstrations. The loss is the mean negative log-likelihood over the masked tokens of a
minibatch, independent of its division into micro batches. Rewards, advantages and versions are not read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

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


class SupervisedLearner:
    """Trains one model on demonstrations."""

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

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Take epochs x minibatches optimizer steps on these rows. Returns metrics."""
        if not samples:
            raise ConfigError("the batch has no demonstration to train on")
        self._scorer.plan(self._budget)
        rows, totals = Rows(samples), Totals()
        factor = self.optim.lr_factor(self._version)
        self._optimizer.set_lr(factor)
        order = f"{self._seed}/{self._version}"
        for members in passes(len(rows), epochs=self.optim.epochs, num_minibatches=self.optim.num_minibatches, seed=order):
            with launching_on(self.device), naming_memory(f"supervised update {self._version + 1}"):
                self._step(rows, members, totals)
        self._version += 1
        return totals.means() | {
            "train/lr": self._lr * factor,
            "train/samples": float(len(rows)),
            "train/tokens": float(rows.num_tokens),
        }

    def _step(self, rows: Rows, members: Sequence[int], totals: Totals) -> None:
        num_tokens = sum(len(rows.positions[row]) for row in members)

        def gradients() -> tuple[float, float, list[MicroBatch]]:
            work = partial(self._gradients, num_tokens)
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

    def _gradients(self, num_tokens: int, micro: list[MicroBatch]) -> tuple[float, float, list[MicroBatch]]:
        """Accumulate the gradients of a minibatch on the parameters. Returns its loss, the gradient's norm and the batches."""
        whole = torch.zeros((), device=self.device)
        for batch in micro:
            loss = -self._scorer(batch).logprobs.sum() / num_tokens
            self._optimizer.backward(loss)
            whole += loss.detach()
        return float(whole), float(self._optimizer.clip()), micro

    def _log_probs(self, batch: MicroBatch) -> Tensor:
        with launching_on(self.device):
            return self._scorer(batch).logprobs

    @torch.no_grad()
    def evaluate(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Returns the mean negative log-likelihood per token of held-out rows."""
        rows, totals = Rows(samples), Totals()
        divide, score = partial(self._batches, rows), self._log_probs
        for _, logprobs in self._budget.each(divide, range(len(rows)), score):
            totals.add("eval/loss", -logprobs.sum(), len(logprobs))
        return totals.means()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the learner without the model's weights."""
        return {"version": self._version, "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        self._version = int(state["version"])
