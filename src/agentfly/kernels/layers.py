"""RMSNorm, rotary embedding and gated activation (GLU) as Triton kernels, with gradients.

The sampler and the learner use the same functions: `rms_norm`, `rotary` and `gated`. Each is one launch forward and one
backward, and rounds in the order of the transformers module that it replaces. Inputs may be strided views of one larger
matrix product. Sums are float32. While gradients are disabled nothing is saved and the forward kernel is launched directly.
With gradients, only the inputs are saved; the backward kernels recompute sums and activations. Double backward is not
supported. Every kernel can be captured in a CUDA graph: no size depends on the data and no launch waits for the host.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

NORMS: tuple[str, ...] = ("llama", "gemma", "plain")
"""llama: round, then multiply by the weight. gemma: multiply by 1 + weight, then round. plain: multiply, then round."""
GATES: tuple[str, ...] = ("silu", "gelu")
"""Activations of `gated`; gelu is the tanh approximation."""
TILE = 1024


@triton.jit(do_not_specialize=["count"])
def _norm(
    x_ptr, weight_ptr, out_ptr, eps, count, inner, x_outer, x_inner,
    SIZE: tl.constexpr, SIZE_2: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    rows, dims = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE_2)[None, :]
    take = (rows[:, None] < count) & (dims < SIZE)
    begin = (rows // inner).to(tl.int64) * x_outer + (rows % inner).to(tl.int64) * x_inner
    x = tl.load(x_ptr + begin[:, None] + dims, mask=take, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + dims, mask=dims < SIZE, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None]
    kind = out_ptr.dtype.element_ty
    if KIND == "llama":
        x = x.to(kind).to(tl.float32) * weight
    elif KIND == "gemma":
        x = x * (1.0 + weight)
    else:
        x = x * weight
    tl.store(out_ptr + rows[:, None].to(tl.int64) * SIZE + dims, x.to(kind), mask=take)


@triton.jit
def _norm_back(
    x_ptr, weight_ptr, grad_ptr, out_ptr, part_ptr, eps, count,
    SIZE: tl.constexpr, SIZE_2: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr, LEARNS: tl.constexpr,
):  # fmt: skip
    """Each program processes every n-th tile of rows and accumulates its part of the weight's gradient until the end."""
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
        along = tl.sum(slope * x, 1)[:, None]  # on the unscaled x, so that the two sums do not depend on each other
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
def _turn(
    x_ptr, out_ptr, head_stride, heads, first, cos, sin, cos_2, sin_2,
    HALF: tl.constexpr, HALF_2: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Rotate some heads of one token. Each product is rounded before the sum, as torch does it."""
    numbers, dims = first + tl.arange(0, GROUP), tl.arange(0, HALF_2)
    take = (numbers[:, None] < heads) & (dims[None, :] < HALF)
    at = numbers[:, None] * head_stride + dims[None, :]
    x = tl.load(x_ptr + at, mask=take, other=0.0).to(tl.float32)
    y = tl.load(x_ptr + at + HALF, mask=take, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    a = (x * cos).to(kind).to(tl.float32) - (y * sin).to(kind).to(tl.float32)
    b = (y * cos_2).to(kind).to(tl.float32) + (x * sin_2).to(kind).to(tl.float32)
    to = numbers[:, None] * (2 * HALF) + dims[None, :]
    tl.store(out_ptr + to, a.to(kind), mask=take)
    tl.store(out_ptr + to + HALF, b.to(kind), mask=take)


@triton.jit
def _rotary(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out, k_out, q_token, q_head, k_token, k_head, cos_token, sin_token, heads, kv_heads,
    HALF: tl.constexpr, HALF_2: tl.constexpr, GROUP: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, HALF_2)
    here = dims < HALF
    cos = tl.load(cos_ptr + token * cos_token + dims, mask=here, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * sin_token + dims, mask=here, other=0.0).to(tl.float32)[None, :]
    cos_2 = tl.load(cos_ptr + token * cos_token + HALF + dims, mask=here, other=0.0).to(tl.float32)[None, :]
    sin_2 = tl.load(sin_ptr + token * sin_token + HALF + dims, mask=here, other=0.0).to(tl.float32)[None, :]
    if BACK:
        sin, sin_2 = -sin_2, -sin
    groups = tl.cdiv(heads, GROUP)
    if group < groups:
        _turn(q_ptr + token * q_token, q_out + token * heads * (2 * HALF), q_head, heads, group * GROUP,
              cos, sin, cos_2, sin_2, HALF, HALF_2, GROUP)  # fmt: skip
    else:
        _turn(k_ptr + token * k_token, k_out + token * kv_heads * (2 * HALF), k_head, kv_heads, (group - groups) * GROUP,
              cos, sin, cos_2, sin_2, HALF, HALF_2, GROUP)  # fmt: skip


@triton.jit
def _gated(gate_ptr, up_ptr, out_ptr, gate_row, up_row, SIZE: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    take = dims < SIZE
    x = tl.load(gate_ptr + row * gate_row + dims, mask=take, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + dims, mask=take, other=0.0).to(tl.float32)
    if KIND == "silu":
        x = x / (1.0 + tl.exp(-x))
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)  # sqrt(2 / pi)
        x = x / (1.0 + tl.exp(-2.0 * inner))  # x (1 + tanh(inner)) / 2
    kind = out_ptr.dtype.element_ty
    tl.store(out_ptr + row * SIZE + dims, (x.to(kind).to(tl.float32) * up).to(kind), mask=take)


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


def rms_norm(x: Tensor, weight: Tensor, eps: float, kind: str = "llama") -> Tensor:
    """Normalise x [..., size]; returns the same shape, contiguous. `kind` is one of NORMS; x and weight have one dtype."""
    function: Any = _Norm
    out: Tensor = function.apply(x, weight, eps, kind) if torch.is_grad_enabled() else _launch_norm(x, weight, eps, kind)
    return out


def gated(gate: Tensor, up: Tensor, kind: str = "silu") -> Tensor:
    """Return act(gate) * up, contiguous. Both are [..., size], of one dtype, possibly halves of one tensor; `kind`: GATES."""
    function: Any = _Gated
    out: Tensor = function.apply(gate, up, kind) if torch.is_grad_enabled() else _launch_gated(gate, up, kind)
    return out


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q [1, heads, tokens, dim] and k [1, kv_heads, tokens, dim] by cos and sin [1, tokens, dim].

    The last dimension of all four is contiguous. The results lie in memory as [tokens, heads, dim], which is the layout that
    paged attention reads. cos and sin get no gradient.
    """
    function: Any = _Rotary
    out: tuple[Tensor, Tensor] = function.apply(q, k, cos, sin) if torch.is_grad_enabled() else _launch_rotary(q, k, cos, sin)
    return out


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, weight: Tensor, eps: float, kind: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.kind = eps, kind
        return _launch_norm(x, weight, eps, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: object, grad: Tensor) -> Any:
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
    def forward(ctx: object, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return _launch_gated(gate, up, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: object, grad: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        size = gate.shape[-1]
        gate_rows, count, gate_stride = _one_stride(gate)
        up_rows, _, up_stride = _one_stride(up)
        by_gate, by_up = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in (gate, up))
        block = min(TILE, triton.next_power_of_2(size))
        _gated_back[(count, triton.cdiv(size, block))](
            gate_rows, up_rows, grad.contiguous(), by_gate, by_up, gate_stride, up_stride,
            SIZE=size, BLOCK=block, KIND=ctx.kind, num_warps=4,
        )  # fmt: skip
        return by_gate, by_up, None


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _launch_rotary(q, k, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: object, *grads: Tensor) -> Any:
        by_q, by_k = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
        return *_launch_rotary(by_q, by_k, *ctx.saved_tensors, back=True), None, None


def _launch_norm(x: Tensor, weight: Tensor, eps: float, kind: str) -> Tensor:
    size = x.shape[-1]
    x, count, inner, outer_stride, inner_stride = _two_strides(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    size_2 = triton.next_power_of_2(size)
    rows = max(1, 1024 // size_2)
    _norm[(triton.cdiv(count, rows),)](
        x, weight, out, eps, count, inner, outer_stride, inner_stride,
        SIZE=size, SIZE_2=size_2, ROWS=rows, KIND=kind, num_warps=4 if size_2 <= 2048 else 8,
    )  # fmt: skip
    return out


def _launch_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> tuple[Tensor, Tensor]:
    """`back`: q and k are gradients of the rotated tensors; the results are the gradients of the inputs."""
    _, heads, tokens, dim = q.shape
    kv_heads = k.shape[1]
    q_out, k_out = q.new_empty(tokens, heads, dim), k.new_empty(tokens, kv_heads, dim)
    group = min(16, triton.next_power_of_2(max(heads, kv_heads)))
    _rotary[(tokens, triton.cdiv(heads, group) + triton.cdiv(kv_heads, group))](
        q, k, cos, sin, q_out, k_out, q.stride(2), q.stride(1), k.stride(2), k.stride(1), cos.stride(1), sin.stride(1),
        heads, kv_heads, HALF=dim // 2, HALF_2=triton.next_power_of_2(dim // 2), GROUP=group, BACK=back, num_warps=2,
    )  # fmt: skip
    return q_out.transpose(0, 1)[None], k_out.transpose(0, 1)[None]


def _launch_gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    size = gate.shape[-1]
    gate_rows, count, gate_stride = _one_stride(gate)
    up_rows, _, up_stride = _one_stride(up)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    block = min(1024, triton.next_power_of_2(size))
    _gated[(count, triton.cdiv(size, block))](
        gate_rows, up_rows, out, gate_stride, up_stride, SIZE=size, BLOCK=block, KIND=kind, num_warps=4
    )
    return out


@cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of a GPU. 1 under Triton's interpreter, so that tests cover programs with more than one tile."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _two_strides(x: Tensor) -> tuple[Tensor, int, int, int, int]:
    """View x as rows addressed by two strides; copies x if its layout needs more.

    Returns (tensor, number of rows, rows per outer step, outer stride, inner stride).
    """
    sizes, strides = _merged(x)
    if len(sizes) > 2 or x.stride(-1) != 1:
        x = x.contiguous()
        sizes, strides = _merged(x)
    sizes, strides = [*sizes, 1, 1], [*strides, 0, 0]
    return x, sizes[0] * sizes[1], sizes[1], strides[0], strides[1]


def _one_stride(x: Tensor) -> tuple[Tensor, int, int]:
    """View x as rows of one stride, copied if necessary: (tensor, number of rows, stride)."""
    sizes, strides = _merged(x)
    if len(sizes) > 1 or x.stride(-1) != 1:
        x = x.contiguous()
        sizes, strides = _merged(x)
    return (x, sizes[0], strides[0]) if sizes else (x, 1, 0)


def _merged(x: Tensor) -> tuple[list[int], list[int]]:
    """Sizes and strides of all but the last dimension, with dimensions that are contiguous in memory merged."""
    sizes: list[int] = []
    strides: list[int] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if sizes and strides[-1] == size * stride:
            sizes[-1], strides[-1] = sizes[-1] * size, stride
        else:
            sizes.append(size)
            strides.append(stride)
    return sizes, strides
