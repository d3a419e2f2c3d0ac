"""Triton kernels over logits: `score` gives log-probs and entropies, `backward` turns the logits into their own gradient.

Logits [rows, vocabulary] may have any precision; sums are float32. Each kernel reads the logits once. The gradient is written
over the logits, so nothing of their size is allocated.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _score(x_ptr, target_ptr, logprob_ptr, entropy_ptr, total_ptr, stride, scale, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    total, mean = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, SIZE, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + at, mask=at < SIZE, other=float("-inf")).to(tl.float32) * scale
        top = tl.maximum(best, x)
        safe = tl.where(top > float("-inf"), top, 0.0)
        fade, share = tl.exp(best - safe), tl.exp(x - safe)
        total = total * fade + share
        mean = mean * fade + tl.where(share > 0, share * x, 0.0)
        best = top
    top = tl.max(best, 0)
    fade = tl.exp(best - top)
    whole = tl.sum(total * fade, 0)
    log_total = top + tl.log(whole)
    wanted = tl.load(x_ptr + row * stride + tl.load(target_ptr + row)).to(tl.float32) * scale
    tl.store(logprob_ptr + row, wanted - log_total)
    tl.store(entropy_ptr + row, log_total - tl.sum(mean * fade, 0) / whole)
    tl.store(total_ptr + row, log_total)


@triton.jit
def _backward(x_ptr, target_ptr, total_ptr, grad_ptr, stride, scale, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = x_ptr + row * stride + at
    x = tl.load(place, mask=at < SIZE, other=0.0).to(tl.float32) * scale
    share = tl.exp(x - tl.load(total_ptr + row))
    gradient = (tl.where(at == tl.load(target_ptr + row), 1.0, 0.0) - share) * tl.load(grad_ptr + row) * scale
    tl.store(place, gradient.to(x_ptr.dtype.element_ty), mask=at < SIZE)


def score(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs of the targets, entropies, and the log-sum-exp that `backward` needs, at this temperature."""
    rows, size = logits.shape
    outputs: Any = [torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3)]
    _score[(rows,)](logits, targets, *outputs, logits.stride(0), 1.0 / temperature, SIZE=size, BLOCK=BLOCK, num_warps=8)
    return outputs[0], outputs[1], outputs[2]


def backward(logits: Tensor, targets: Tensor, totals: Tensor, grads: Tensor, temperature: float) -> Tensor:
    """Overwrite the logits with the gradient of sum(grads x log-probs) with respect to them, and return them."""
    rows, size = logits.shape
    blocks = triton.cdiv(size, BLOCK)
    _backward[(rows, blocks)](
        logits, targets, totals, grads.contiguous(), logits.stride(0), 1.0 / temperature, SIZE=size, BLOCK=BLOCK, num_warps=8
    )
    return logits
