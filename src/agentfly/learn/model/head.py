"""Log-probs of tokens from hidden states and the output head's weight, for a GPU.

Logits are computed for one chunk of tokens at a time, in the precision of the weights, and the backward pass overwrites them
with their gradient. As many chunks as fit into KEPT_SHARE of the free memory are kept for the backward pass; it computes the
others again. So memory for logits is bounded, whatever the number of tokens. `serves` tells whether a head can be computed this
way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...kernels import has_kernels
from ..budget import CudaMemory

MAX_LOGITS = 2**29
"""Logits per chunk: a GiB in half precision."""
KEPT_SHARE = 0.1
"""Of the free memory. Kept logits are freed before the backward pass of the layers begins."""


def serves(linear: nn.Module) -> bool:
    """Whether the head is a linear layer without bias on a GPU, and Triton is installed."""
    weight: Any = linear.weight
    plain = type(linear) is nn.Linear and linear.bias is None
    return plain and has_kernels(weight.device)


def head_scores(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int | None
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets, with a gradient, and entropies, without one. `chunk` tokens at a time."""
    function: Any = _HeadScores
    chunk = chunk or max(1, MAX_LOGITS // weight.shape[0])
    keep = _num_kept(weight, min(chunk, len(hidden))) if torch.is_grad_enabled() else 0
    results = function.apply(hidden, weight, targets, temperature, chunk, keep)
    return results[0], results[1]


def _num_kept(weight: Tensor, chunk: int) -> int:
    """How many chunks of logits may be kept."""
    if weight.device.type != "cuda":
        return 1
    return int(KEPT_SHARE * CudaMemory(weight.device).free() / max(1, chunk * weight.shape[0] * weight.element_size()))


class _HeadScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int, keep: int) -> Any:
        from ...kernels.log_probs import score

        parts, ctx.kept = [], {}
        for start in range(0, len(hidden), chunk):
            logits = hidden[start : start + chunk] @ weight.T
            parts.append(score(logits, targets[start : start + chunk], temperature))
            if len(ctx.kept) < keep:
                ctx.kept[start] = logits
            del logits
        logprobs, entropies, totals = (torch.cat(each) for each in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, targets, totals)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        from ...kernels.log_probs import backward

        hidden, weight, targets, totals = ctx.saved_tensors
        by_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Several chunks add up in float32: in half precision each addition would round the sum.
        full = torch.float32 if len(hidden) > ctx.chunk else weight.dtype
        by_weight = torch.zeros_like(weight, dtype=full) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = ctx.kept.pop(start, None)  # overwritten below: a second backward pass computes them again
            if logits is None:
                logits = hidden[part] @ weight.T
            gradient = backward(logits, targets[part], totals[part], grads[0][part], ctx.temperature)
            if by_hidden is not None:
                torch.mm(gradient, weight, out=by_hidden[part])
            if by_weight is not None:
                by_weight += gradient.T @ hidden[part]
            del logits, gradient
        return by_hidden, None if by_weight is None else by_weight.to(weight.dtype), None, None, None, None
