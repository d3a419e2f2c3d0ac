"""Log-probs (and entropies) of given tokens under a Hugging Face causal LM, in bounded memory.

No tensor [all tokens, vocabulary] exists: the backbone computes hidden states, only positions that predict a sampled token are
kept, and the output head runs on them in chunks that the backward pass recomputes (on a GPU with Triton kernels, see `head`).
The split into backbone and head is used only if a probe on a few tokens reproduces the model's logits. Otherwise the model's
full forward runs, which holds the logits of one micro batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...errors import ConfigError
from ...kernels.replica import evaluating
from ..algorithms.losses import entropy as entropy_of
from ..batching import MicroBatch, Shape
from ..budget import TokenBudget, fills_gpu
from ..settings import OptimSettings
from .backbone import Backbone
from .evidence import OFTEN, RATIOS, fit
from .head import head_scores, serves

# Logits that may exist at the same time if no chunk is set.
MAX_LOGITS = 2**26

EntropyMode = Literal["none", "value", "gradient"]


@dataclass(frozen=True, slots=True)
class Head:
    """Hidden states to logits: linear, times scale, then soft-capped."""

    backbone: Backbone
    linear: nn.Module
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.linear(hidden).float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores per sampled token of a micro batch. `hidden` is the head's input, for a value head on the same backbone.

    `fit` is that of some tokens (`evidence.fit`), `values` are those of the value head.
    """

    logprobs: Tensor
    entropies: Tensor | None
    hidden: Tensor | None
    fit: Tensor | None = None
    values: Tensor | None = None


class Scorer:
    """Scores tokens under one model. `head` is None if the model's full forward is used."""

    def __init__(self, model: nn.Module, *, temperature: float = 1.0, chunk: int | None = None) -> None:
        self.model = model
        self.temperature = temperature
        self.head = find_head(model)
        self._chunk = chunk

    def prepare(self, optim: OptimSettings, ranks: int = 1) -> Shape:
        """Set up checkpointing and packing. Returns the shape of batches to make. Raises ConfigError if unsupported.

        `ranks` divide the model's weights.
        """
        recomputes = optim.gradient_checkpointing
        if recomputes == "auto":
            recomputes = self.head is not None and self.head.backbone.can_checkpoint and fills_gpu(self.model, ranks)
        if recomputes:
            if self.head is None:
                raise ConfigError("the layers of this model cannot be recomputed: remove train.gradient_checkpointing")
            self.head.backbone.checkpoint()
        if optim.packing == "off" or (self.head is None and optim.packing == "auto"):
            return "padded"
        shape = "padded" if self.head is None else self.head.backbone.pack()
        if optim.packing == "on" and shape == "padded":
            raise ConfigError("the rows of this model cannot be packed: its attention lacks support; remove train.packing")
        return shape

    @property
    def packs(self) -> bool:
        """Whether packed batches can be run."""
        return self.head is not None and self.head.backbone.packs

    @property
    def path(self) -> str:
        """How batches are run, and why not faster."""
        if self.head is None:
            return "padded rows; the model's own forward, because its backbone and head do not reproduce its logits"
        return self.head.backbone.path

    def plan(self, budget: TokenBudget, *, divides: bool = True) -> None:
        """Let the budget choose the tokens of the next batches, so that they run as CUDA graphs if `divides` allows it."""
        if self.head is None:
            budget.plan()
            return
        budget.plan(self.head.backbone.best_tokens if divides else None)
        self.head.backbone.settle(budget.settled)

    def __call__(
        self,
        batch: MicroBatch,
        *,
        entropy: EntropyMode = "none",
        keep_hidden: bool = False,
        drawn: tuple[Tensor, Tensor] | None = None,
    ) -> Scores:
        """`drawn` are the places in `batch.tokens` of those whose fit is wanted, and the uniform numbers of these tokens."""
        if self.head is None:
            return self._by_forward(batch, entropy, keep_hidden, drawn)
        hidden = self.head.backbone(batch)
        scores = self._by_head(batch, hidden, entropy, keep_hidden)
        if drawn is None:
            return scores
        logits = self.head.logits
        with torch.no_grad():
            return replace(
                scores, fit=self._fit(lambda places: logits(hidden[places]), _vocabulary(self.head.linear), batch, drawn)
            )

    def _fit(self, logits: Callable[[Tensor], Tensor], width: int, batch: MicroBatch, drawn: tuple[Tensor, Tensor]) -> Tensor:
        """The fit of the tokens at these places, some at a time. `width` is the size of the vocabulary."""
        sums = torch.zeros(len(RATIOS) + 1 + len(OFTEN) * width, device=drawn[0].device)
        chunk = max(1, MAX_LOGITS // (8 * width))
        for start in range(0, len(drawn[0]), chunk):
            places, numbers = (part[start : start + chunk] for part in drawn)
            sums += fit(logits(places) / self.temperature, batch.targets[places], numbers)
        return sums

    def _by_head(self, batch: MicroBatch, hidden: Tensor, entropy: EntropyMode, keep_hidden: bool) -> Scores:
        assert self.head is not None
        plain = self.head.scale == 1.0 and self.head.softcap is None
        if plain and entropy != "gradient" and len(hidden) and serves(self.head.linear):
            weight: Any = self.head.linear.weight
            scores, values = head_scores(hidden, weight, batch.targets, self.temperature, self._chunk)
            return Scores(scores, None if entropy == "none" else values, hidden if keep_hidden else None)
        parts = []
        chunk = self._chunk or max(1, MAX_LOGITS // _vocabulary(self.head.linear))
        again = torch.is_grad_enabled() and len(hidden) > chunk
        for start in range(0, max(1, len(hidden)), chunk):  # also once without tokens: ranks run equal numbers of batches
            part = hidden[start : start + chunk], batch.targets[start : start + chunk], entropy
            if again:  # hold hidden states instead of logits until the backward pass
                parts.append(checkpoint(self._chunk_scores, *part, use_reentrant=False, preserve_rng_state=False))
            else:
                parts.append(self._chunk_scores(*part))
        logprobs = torch.cat([logprobs for logprobs, _ in parts])
        entropies = None if entropy == "none" else torch.cat([values for _, values in parts])
        return Scores(logprobs, entropies, hidden if keep_hidden else None)

    def hidden(self, batch: MicroBatch) -> Tensor:
        """Returns only the hidden states that the head reads."""
        if self.head is not None:
            return self.head.backbone(batch)
        hidden = self._by_forward(batch, "none", keep_hidden=True).hidden
        assert hidden is not None
        return hidden

    def _chunk_scores(self, hidden: Tensor, targets: Tensor, entropy: EntropyMode) -> tuple[Tensor, Tensor | None]:
        assert self.head is not None
        return self._read(self.head.logits(hidden), targets, entropy)

    def _by_forward(
        self, batch: MicroBatch, entropy: EntropyMode, keep_hidden: bool, drawn: tuple[Tensor, Tensor] | None = None
    ) -> Scores:
        output: Any = self.model(input_ids=batch.input_ids, use_cache=False, output_hidden_states=keep_hidden)
        logits = output.logits.flatten(0, 1)[batch.where].float()
        logprobs, entropies = self._read(logits, batch.targets, entropy)
        hidden = output.hidden_states[-1].flatten(0, 1)[batch.where] if keep_hidden else None
        scores = Scores(logprobs, entropies, hidden)
        return scores if drawn is None else replace(scores, fit=self._fit(logits.__getitem__, logits.shape[1], batch, drawn))

    def _read(self, logits: Tensor, targets: Tensor, entropy: EntropyMode) -> tuple[Tensor, Tensor | None]:
        if self.temperature != 1.0:
            logits = logits / self.temperature
        logprobs = -nn.functional.cross_entropy(logits, targets, reduction="none")
        if entropy == "none":
            return logprobs, None
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy == "gradient"):
            return logprobs, entropy_of(logits)


def find_head(model: nn.Module) -> Head | None:
    """Returns the model's head, or None if backbone and linear output do not reproduce the model's logits."""
    backbone = getattr(model, "base_model", None)
    get_head: Callable[[], Any] | None = getattr(model, "get_output_embeddings", None)
    linear = get_head() if get_head is not None else None
    if not isinstance(backbone, nn.Module) or backbone is model or not isinstance(linear, nn.Module):
        return None
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    head = Head(Backbone(backbone), linear, scale, getattr(config, "final_logit_softcapping", None))
    return head if _agrees(model, head) else None


def _agrees(model: nn.Module, head: Head) -> bool:
    """Whether backbone and head give the model's logits on two short rows."""
    device = next(model.parameters()).device
    ids = torch.arange(8, device=device).reshape(2, 4) % _vocabulary(head.linear)
    try:
        with torch.no_grad(), evaluating(model):
            output: Any = model(input_ids=ids, use_cache=False)
            states: Any = head.backbone.module(input_ids=ids, use_cache=False)
            if not isinstance(getattr(states, "last_hidden_state", None), Tensor):
                return False
            ours, theirs = head.logits(states.last_hidden_state), output.logits.float()
    except (RuntimeError, TypeError, ValueError):  # the head does not fit the backbone: use the full forward
        return False
    tolerance = 1e-5 if next(model.parameters()).dtype == torch.float32 else 2e-2
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance)


def _vocabulary(linear: nn.Module) -> int:
    weight: Any = linear.weight
    return int(weight.shape[0])
