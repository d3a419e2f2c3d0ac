"""Norms, gates and rotary positions with gradients, each in one Triton kernel forward and one back.

In: tensors of a packed line's forward pass. Out: `rms_norm`, `gated` and `rotary` as transformers' own modules compute them, in
their order of rounding, by the kernels that the engine decodes with (`engines.local.fused`). Kept for the backward pass is what
came in, and nothing else: sums and activations are computed again there, in float32. A weight that is frozen costs nothing. The
gradients themselves have none. Imported only where Triton is.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..engines.local import fused

NORMS, GATES = fused.NORMS, fused.GATES
TILE = 1024


@triton.jit
def _norm_back(
    x_ptr, weight_ptr, grad_ptr, out_ptr, part_ptr, eps, count,
    SIZE: tl.constexpr, SIZE_2: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr, LEARNS: tl.constexpr,
):  # fmt: skip
    """Each program reads every n-th tile of rows and keeps what it saw of the weight's gradient until its end."""
    dims = tl.arange(0, SIZE_2)
    here = dims[None, :] < SIZE
    kind = out_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + dims[None, :], mask=here, other=0.0).to(tl.float32)
    if KIND == "gemma":
        weight = 1.0 + weight
    seen = tl.zeros([ROWS, SIZE_2], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        rows = tile * ROWS + tl.arange(0, ROWS)
        take = (rows[:, None] < count) & here
        at = rows[:, None].to(tl.int64) * SIZE + dims[None, :]
        x = tl.load(x_ptr + at, mask=take, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + at, mask=take, other=0.0).to(tl.float32)
        slope = grad * weight
        if KIND == "llama":
            slope = slope.to(kind).to(tl.float32)
        along = tl.sum(slope * x, 1)[:, None]  # before x is scaled: neither sum waits for the other
        scale = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None]
        x = x * scale
        along = along * scale / SIZE
        if LEARNS:
            if KIND == "llama":
                seen += grad * x.to(kind).to(tl.float32)
            else:
                seen += grad * x
        tl.store(out_ptr + at, ((slope - x * along) * scale).to(kind), mask=take)
    if LEARNS:
        tl.store(part_ptr + tl.program_id(0) * SIZE + dims, tl.sum(seen, 0), mask=dims < SIZE)


@triton.jit
def _gated_back(
    gate_ptr, up_ptr, grad_ptr, gate_out, up_out, gate_row, up_row, SIZE: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    take = dims < SIZE
    x = tl.load(gate_ptr + row * gate_row + dims, mask=take, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + dims, mask=take, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * SIZE + dims, mask=take, other=0.0).to(tl.float32)
    if KIND == "silu":
        share = 1.0 / (1.0 + tl.exp(-x))
        steep = 1.0
    else:
        share = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))  # 2 sqrt(2 / pi)
        steep = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    kind = gate_out.dtype.element_ty
    act = (x * share).to(kind).to(tl.float32)
    slope = (grad * up).to(kind).to(tl.float32)
    tl.store(gate_out + row * SIZE + dims, (slope * share * (1.0 + x * steep * (1.0 - share))).to(kind), mask=take)
    tl.store(up_out + row * SIZE + dims, (grad * act).to(kind), mask=take)


def rms_norm(x: Tensor, weight: Tensor, eps: float, kind: str) -> Tensor:
    """x [..., size] -> the same shape; `kind` one of NORMS; x and weight of one type."""
    function: Any = _Norm
    out: Tensor = function.apply(x, weight, eps, kind)
    return out


def gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """act(gate) * up, both [..., size] and of one type; `kind` one of GATES."""
    function: Any = _Gated
    out: Tensor = function.apply(gate, up, kind)
    return out


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q [1, heads, tokens, dim], k [1, kv_heads, tokens, dim], cos and sin [1, tokens, dim], without gradients for these."""
    function: Any = _Rotary
    out: tuple[Tensor, Tensor] = function.apply(q, k, cos, sin)
    return out


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, kind: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.kind = eps, kind
        return fused.rms_norm(x, weight, eps, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        x, grad = x.contiguous(), grad.contiguous()
        learns = ctx.needs_input_grad[1]
        size = x.shape[-1]
        size_2 = triton.next_power_of_2(size)
        rows, warps = max(1, TILE // size_2), 4 if size_2 <= 2048 else 8 if size_2 <= 4096 else 16
        count = x.numel() // size
        programs = min(triton.cdiv(count, rows), _processors(x.device) * (32 // warps))
        out = torch.empty_like(x)
        parts = torch.empty(programs if learns else 1, size, dtype=torch.float32, device=x.device)
        _norm_back[(programs,)](
            x, weight, grad, out, parts, ctx.eps, count,
            SIZE=size, SIZE_2=size_2, ROWS=rows, KIND=ctx.kind, LEARNS=learns, num_warps=warps,
        )  # fmt: skip
        return out, parts.sum(0).to(weight.dtype) if learns else None, None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return fused.gated(gate, up, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        size = gate.shape[-1]
        gate_rows, count, gate_stride = fused.lines(gate)
        up_rows, _, up_stride = fused.lines(up)
        by_gate, by_up = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in (gate, up))
        block = min(TILE, triton.next_power_of_2(size))
        _gated_back[(count, triton.cdiv(size, block))](
            gate_rows, up_rows, grad.contiguous(), by_gate, by_up, gate_stride, up_stride,
            SIZE=size, BLOCK=block, KIND=ctx.kind, num_warps=4,
        )  # fmt: skip
        return by_gate, by_up, None


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return fused.rotary(q, k, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        by_q, by_k = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
        return *fused.rotary(by_q, by_k, *ctx.saved_tensors, back=True), None, None


@cache
def _processors(device: torch.device) -> int:
    """Of a GPU; for Triton's interpreter, few enough that each of its programs reads more than one tile."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
