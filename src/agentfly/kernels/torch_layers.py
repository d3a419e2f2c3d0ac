"""RMSNorm and rotary embedding in torch with backward passes written out, for a CPU: about half the passes over memory.

The functions are those of `layers`, for float32. The gated activation of torch is as good as it gets here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

NORMS: tuple[str, ...] = ("llama", "gemma")
GATES: tuple[str, ...] = ()


def rms_norm(x: Tensor, weight: Tensor, eps: float, kind: str = "llama") -> Tensor:
    """Normalise x [..., size]. `kind` is one of NORMS; in float32 they differ in what the weight stands for."""
    function: Any = _TorchNorm
    out: Tensor = function.apply(x, weight if kind == "llama" else 1.0 + weight, eps)
    return out


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q [1, heads, tokens, dim] and k [1, kv_heads, tokens, dim] by cos and sin [1, tokens, dim]."""
    function: Any = _TorchRotary
    return function.apply(q, cos, sin), function.apply(k, cos, sin)


class _TorchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_() / x.shape[-1] + eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        out: Tensor = (x * scale).mul_(weight)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        size = x.shape[-1]
        product = (grads[0] * x).reshape(-1, size)
        by_weight = product.T.mv(scale.reshape(-1)) if ctx.needs_input_grad[1] else None
        along = product.mv(weight).reshape(scale.shape) * scale.pow(3) / size
        by_x = (grads[0] * weight).mul_(scale).addcmul_(x, along, value=-1.0)
        return by_x, by_weight, None


class _TorchRotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        first, second = sin.chunk(2, -1)
        return _rotate(x, cos, -first, second)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        first, second = sin.chunk(2, -1)
        return _rotate(grads[0], cos, second, -first), None, None


def _rotate(x: Tensor, cos: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """x cos, plus the other half of x times `first` and `second`; in memory [tokens, heads, dim], as x is in a model."""
    x = x.transpose(1, 2)
    half = x.shape[-1] // 2
    out = (x * cos[:, :, None]).contiguous()
    out[..., :half].addcmul_(x[..., half:], first[:, :, None])
    out[..., half:].addcmul_(x[..., :half], second[:, :, None])
    return out.transpose(1, 2)
