"""The run of a model up to its last hidden states, with what rows have in common run once.

In: a micro batch. Out: hidden states at the positions that predict a sampled token. Rows of one batch mostly begin alike: the
system message with its tools, and between siblings the whole prompt. That prefix is run once, as one row, and the rest of every
row attends to its keys and values; gradients flow back through them, so values and gradients are those of the plain run.

    P P P A A        P P P            P P P run once
    P P P B B B  ->        A A .      A, B and C attend to it
    P P P C                B B B
                           C . .

Used only where a probe has shown, once per model, that the two runs agree: a model whose cache is not a plain list of keys and
values per layer (recurrent state, sliding windows) is run plainly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .batching import MicroBatch

# Sharing spares (rows - 1) x prefix tokens and costs a second, short run: not worth it below this share of the batch.
WORTH_SHARING = 0.1


class Backbone:
    """A transformer without its output head."""

    def __init__(self, module: nn.Module, *, shares: bool | None = None) -> None:
        """`shares` skips the probe, for a copy of a backbone that has passed or failed it."""
        self.module = module
        self.shares = _can_share(module) if shares is None else shares

    def __call__(self, batch: MicroBatch) -> Tensor:
        """Hidden states [sampled tokens, width]."""
        rows, width = batch.input_ids.shape
        if self.shares and (rows - 1) * batch.prefix > WORTH_SHARING * rows * width:
            hidden = _run_shared(self.module, batch.input_ids, batch.prefix)
            where = batch.where - (batch.where // width + 1) * batch.prefix
        else:
            hidden, where = _run(self.module, batch.input_ids), batch.where
        return hidden.flatten(0, 1)[where]


def _run(module: nn.Module, input_ids: Tensor) -> Tensor:
    output: Any = module(input_ids=input_ids, use_cache=False)
    hidden: Tensor = output.last_hidden_state
    return hidden


def _run_shared(module: nn.Module, input_ids: Tensor, prefix: int) -> Tensor:
    """Hidden states of what follows the prefix."""
    first: Any = module(input_ids=input_ids[:1, :prefix], use_cache=True)
    cache = first.past_key_values
    cache.batch_repeat_interleave(len(input_ids))
    rest: Any = module(input_ids=input_ids[:, prefix:], past_key_values=cache, use_cache=True)
    hidden: Tensor = rest.last_hidden_state
    return hidden


def _can_share(module: nn.Module) -> bool:
    """On two short rows that begin alike: is the cache plain, does it carry gradients, and are the hidden states the same?"""
    parameter = next(module.parameters())
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 6]], device=parameter.device)
    was_training = module.training
    module.eval()
    try:
        with torch.enable_grad():
            probe: Any = module(input_ids=ids[:1, :2], use_cache=True)
        layers = getattr(probe.past_key_values, "layers", None)
        if not layers or any(type(layer).__name__ != "DynamicLayer" for layer in layers):
            return False
        if any(p.requires_grad for p in module.parameters()) and not layers[-1].keys.requires_grad:
            return False
        with torch.no_grad():
            shared, plain = _run_shared(module, ids, 2), _run(module, ids)[:, 2:]
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # not this kind of model: run it plainly
        return False
    finally:
        module.train(was_training)
    tolerance = 1e-4 if parameter.dtype == torch.float32 else 5e-2
    return torch.allclose(shared.float(), plain.float(), rtol=tolerance, atol=tolerance)
