"""Log-probs of tokens straight from hidden states and the head's weights, for a GPU.

In: hidden states [tokens, width], the head's weight, the wanted tokens. Out: their log-probs, and entropies as plain numbers.
Logits exist for one chunk of tokens at a time, in the weights' own precision, and are computed again in the backward pass,
where their gradient takes their place. So a vocabulary of 150,000 costs its matrix products and two passes over a chunk, and no
memory that grows with the tokens. Refuses nothing: whether a head is of this form is for the caller to see (`serves`).
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

MAX_LOGITS = 2**28
"""Logits of one chunk: half a GiB in half precision."""


def serves(linear: nn.Module) -> bool:
    """Whether the head is a plain product, on a GPU, with Triton there to read its logits."""
    weight: Any = linear.weight
    return type(linear) is nn.Linear and getattr(linear, "bias", None) is None and weight.is_cuda and _has_triton()


def head_scores(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int | None
) -> tuple[Tensor, Tensor]:
    """Log-probs, with a gradient, and entropies, without one."""
    function: Any = _HeadScores
    found = function.apply(hidden, weight, targets, temperature, chunk or max(1, MAX_LOGITS // weight.shape[0]))
    return found[0], found[1]


class _HeadScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int) -> Any:
        from .head_kernels import score

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
        from .head_kernels import slope

        hidden, weight, targets, totals = ctx.saved_tensors
        by_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        by_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = hidden[part] @ weight.T
            sloped = slope(logits, targets[part], totals[part], grads[0][part], ctx.temperature)
            if by_hidden is not None:
                torch.mm(sloped, weight, out=by_hidden[part])
            if by_weight is not None:
                by_weight.addmm_(sloped.T, hidden[part])
            del logits, sloped
        return by_hidden, by_weight, None, None, None


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
