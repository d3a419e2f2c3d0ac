"""Log-probs of tokens from hidden states and the output head's weight, for a GPU.

Logits are in the precision of the weights, and the backward pass overwrites them with their gradient. If all of them fit into
KEPT_SHARE of the free memory, they are kept for the backward pass. Otherwise they exist for one chunk of tokens at a time and
are computed again, and no memory grows with the number of tokens times the vocabulary. `serves` tells whether a head can be
computed this way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import find_kernels
from .budget import CudaMemory

MAX_LOGITS = 2**28
"""Logits per chunk: half a GiB in half precision."""
KEPT_SHARE = 0.25
"""Of the free memory. The logits are freed before the backward pass of the layers begins."""


def serves(linear: nn.Module) -> bool:
    """Whether the head is a linear layer without bias on a GPU, and Triton is installed."""
    weight: Any = linear.weight
    plain = type(linear) is nn.Linear and linear.bias is None
    return plain and find_kernels("log_probs", weight.device) is not None


def head_scores(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int | None
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets, with a gradient, and entropies, without one.

    `chunk` tokens at a time; None: all of them if the logits fit into memory.
    """
    function: Any = _HeadScores
    keep = chunk is None and torch.is_grad_enabled() and _fits(hidden, weight)
    found = function.apply(hidden, weight, targets, temperature, chunk or max(1, MAX_LOGITS // weight.shape[0]), keep)
    return found[0], found[1]


def _fits(hidden: Tensor, weight: Tensor) -> bool:
    """Whether the logits of all tokens take at most KEPT_SHARE of the free memory."""
    if hidden.device.type != "cuda":
        return True
    return len(hidden) * weight.shape[0] * weight.element_size() <= KEPT_SHARE * CudaMemory(hidden.device).free()


class _HeadScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int, keep: bool) -> Any:
        from ..kernels.log_probs import score

        ctx.kept = None
        if keep:
            ctx.kept = hidden @ weight.T
            logprobs, entropies, totals = score(ctx.kept, targets, temperature)
        else:
            parts = []
            for start in range(0, len(hidden), chunk):
                logits = hidden[start : start + chunk] @ weight.T
                parts.append(score(logits, targets[start : start + chunk], temperature))
                del logits
            logprobs, entropies, totals = (torch.cat(each) for each in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, targets, totals)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        from ..kernels.log_probs import backward

        hidden, weight, targets, totals = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, None  # overwritten: a second backward pass computes the logits again
        if kept is not None:
            gradient = backward(kept, targets, totals, grads[0], ctx.temperature)
            by_hidden = gradient @ weight if ctx.needs_input_grad[0] else None
            by_weight = gradient.T @ hidden if ctx.needs_input_grad[1] else None
            return by_hidden, by_weight, None, None, None, None
        by_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Several chunks add up in float32: in half precision each addition would round the sum.
        full = torch.float32 if len(hidden) > ctx.chunk else weight.dtype
        by_weight = torch.zeros_like(weight, dtype=full) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = hidden[part] @ weight.T
            gradient = backward(logits, targets[part], totals[part], grads[0][part], ctx.temperature)
            if by_hidden is not None:
                torch.mm(gradient, weight, out=by_hidden[part])
            if by_weight is not None:
                by_weight += gradient.T @ hidden[part]
            del logits, gradient
        return by_hidden, None if by_weight is None else by_weight.to(weight.dtype), None, None, None, None
