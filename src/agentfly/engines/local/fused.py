"""What a decode step does beside its products and its attention, each in one Triton kernel.

In: tensors of the twin's forward pass, often strided views of one larger product. Out: `rms_norm`, `rotary`, `gated` as the
model's own modules compute them, in their order of rounding; `store`, new keys and values into the pools; `draw`, one token per
row. Sums are float32. All can run inside a CUDA graph: no size depends on the data and nothing waits for the host. What each
may be asked for is said at its launcher; `fuse` asks where a probe has shown the same result. Imported only where Triton is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sampler import ALMOST_ONE

NORMS = ("llama", "gemma", "plain")  # round, then times weight; times (1 + weight), then round; times weight, then round
GATES = ("silu", "gelu")  # the second by tanh


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
def _turn(
    x_ptr, out_ptr, head_stride, heads, first, cos, sin, cos_2, sin_2,
    HALF: tl.constexpr, HALF_2: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Some heads of one token; every product is rounded before the sum, as torch does it."""
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
def _store(
    k_ptr, v_ptr, keys_ptr, values_ptr, place_ptr, k_token, k_head, v_token, v_head, keys_token, keys_head, values_token,
    values_head, HEADS: tl.constexpr, HEADS_2: tl.constexpr, DIM: tl.constexpr, DIM_2: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(place_ptr + token).to(tl.int64)
    heads, dims = tl.arange(0, HEADS_2)[:, None], tl.arange(0, DIM_2)[None, :]
    take = (heads < HEADS) & (dims < DIM)
    k = tl.load(k_ptr + token * k_token + heads * k_head + dims, mask=take)
    v = tl.load(v_ptr + token * v_token + heads * v_head + dims, mask=take)
    tl.store(keys_ptr + place * keys_token + heads * keys_head + dims, k, mask=take)
    tl.store(values_ptr + place * values_token + heads * values_head + dims, v, mask=take)


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
def _draw(
    logit_ptr, uniform_ptr, temperature_ptr, id_ptr, logprob_ptr, logit_row, uniform_row, temperature_row, limit,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_2: tl.constexpr,
):  # fmt: skip
    """The row is read once, for the best and the sum of each block; then the one block in which the token lies."""
    row = tl.program_id(0).to(tl.int64)
    asked = tl.load(temperature_ptr + row * temperature_row)
    cold = asked <= 0.0
    temperature = tl.where(cold, 1.0, asked)
    numbers, slots = tl.arange(0, BLOCK), tl.arange(0, BLOCKS_2)
    base = logit_ptr + row * logit_row
    tops = tl.full([BLOCKS_2], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCKS_2], tl.float32)
    ahead = tl.load(base + numbers, mask=numbers < SIZE, other=float("-inf"))
    for i in range(BLOCKS):
        z = ahead.to(tl.float32) / temperature
        after = (i + 1) * BLOCK + numbers
        ahead = tl.load(base + after, mask=after < SIZE, other=float("-inf"))
        top = tl.max(z, 0)
        part = tl.sum(tl.exp(z - tl.where(top > float("-inf"), top, 0.0)), 0)
        tops = tl.where(slots == i, top, tops)
        sums = tl.where(slots == i, part, sums)
    best = tl.max(tops, 0)
    level = tl.where(best > float("-inf"), best, 0.0)
    weights = tl.where(sums > 0.0, tl.exp(tops - level) * sums, sums)  # NaN stays NaN
    total = tl.sum(weights, 0)
    point = tl.minimum(tl.load(uniform_ptr + row * uniform_row), limit) * total
    reached = (tl.cumsum(weights, 0) > point) & (weights > 0.0)
    block = tl.min(tl.where(reached, slots, BLOCKS_2), 0)
    block = tl.where(block < BLOCKS_2, block, tl.max(tl.where(weights > 0.0, slots, 0), 0))
    hottest = tl.min(tl.where(tops == best, slots, BLOCKS_2), 0)
    block = tl.where(cold, tl.where(hottest < BLOCKS_2, hottest, 0), block)
    before = tl.sum(tl.where(slots < block, weights, 0.0), 0)
    at = block * BLOCK + numbers
    z = tl.load(base + at, mask=at < SIZE, other=float("-inf")).to(tl.float32) / temperature
    p = tl.exp(z - level)
    # A sum by halves need not grow from one token to the next: p says which tokens can be drawn at all.
    drawn = (before + tl.cumsum(p, 0) > point) & (p > 0.0)
    found = tl.min(tl.where(tl.where(cold, z == best, drawn) & (at < SIZE), at, SIZE), 0)
    last = tl.max(tl.where((p > 0.0) & (at < SIZE), at, 0), 0)
    found = tl.where(found < SIZE, found, last)
    chosen = tl.sum(tl.where(at == found, z, 0.0), 0)
    tl.store(id_ptr + row, found.to(tl.int64))
    tl.store(logprob_ptr + row, chosen - best - tl.log(total))


def rms_norm(x: Tensor, weight: Tensor, eps: float, kind: str = "llama") -> Tensor:
    """x [..., size] -> the same shape, contiguous; `kind` one of NORMS; x and weight of one type."""
    size = x.shape[-1]
    x, count, inner, outer_stride, inner_stride = _rows(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    size_2 = triton.next_power_of_2(size)
    rows = max(1, 1024 // size_2)
    _norm[(triton.cdiv(count, rows),)](
        x, weight, out, eps, count, inner, outer_stride, inner_stride,
        SIZE=size, SIZE_2=size_2, ROWS=rows, KIND=kind, num_warps=4 if size_2 <= 2048 else 8,
    )  # fmt: skip
    return out


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> tuple[Tensor, Tensor]:
    """q [1, heads, tokens, dim], k [1, kv_heads, tokens, dim], cos and sin [1, tokens, dim] -> q and k, turned.

    The last dimension of all is contiguous. The results lie in memory as [tokens, heads, dim], as attention over pages reads
    them. `back`: q and k are gradients of turned ones, and what comes out are gradients of those that were turned.
    """
    _, heads, tokens, dim = q.shape
    kv_heads = k.shape[1]
    q_out, k_out = q.new_empty(tokens, heads, dim), k.new_empty(tokens, kv_heads, dim)
    group = min(16, triton.next_power_of_2(max(heads, kv_heads)))
    _rotary[(tokens, triton.cdiv(heads, group) + triton.cdiv(kv_heads, group))](
        q, k, cos, sin, q_out, k_out, q.stride(2), q.stride(1), k.stride(2), k.stride(1), cos.stride(1), sin.stride(1),
        heads, kv_heads, HALF=dim // 2, HALF_2=triton.next_power_of_2(dim // 2), GROUP=group, BACK=back, num_warps=2,
    )  # fmt: skip
    return q_out.transpose(0, 1)[None], k_out.transpose(0, 1)[None]


def store(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, places: Tensor) -> None:
    """key and value [tokens, kv_heads, dim] into pools [pages, PAGE, kv_heads, dim], at `places` (page x PAGE + offset)."""
    tokens, heads, dim = key.shape
    if key.stride(2) != 1 or value.stride(2) != 1:
        key, value = key.contiguous(), value.contiguous()
    _store[(tokens,)](
        key, value, keys, values, places.contiguous(), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        keys.stride(1), keys.stride(2), values.stride(1), values.stride(2),
        HEADS=heads, HEADS_2=triton.next_power_of_2(heads), DIM=dim, DIM_2=triton.next_power_of_2(dim), num_warps=2,
    )  # fmt: skip


def gated(gate: Tensor, up: Tensor, kind: str = "silu") -> Tensor:
    """act(gate) * up, both [..., size] and possibly halves of one tensor -> the same shape, contiguous; `kind` one of GATES."""
    size = gate.shape[-1]
    gate_rows, count, gate_stride = lines(gate)
    up_rows, _, up_stride = lines(up)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    block = min(1024, triton.next_power_of_2(size))
    _gated[(count, triton.cdiv(size, block))](
        gate_rows, up_rows, out, gate_stride, up_stride, SIZE=size, BLOCK=block, KIND=kind, num_warps=4
    )
    return out


def draw(logits: Tensor, uniforms: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """logits [rows, vocabulary], float32 uniforms in [0, 1) and temperatures [rows] -> ids (int64) and log-probs (float32).

    As `sampler.draw_lanes` with nothing cut. A row with NaN gives some id and a NaN log-prob.
    """
    rows, size = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(4096 if size <= 65536 else 8192, max(16, triton.next_power_of_2(size)))
    blocks = triton.cdiv(size, block)
    _draw[(rows,)](
        logits, uniforms, temperatures, ids, logprobs, logits.stride(0), uniforms.stride(0), temperatures.stride(0), ALMOST_ONE,
        SIZE=size, BLOCK=block, BLOCKS=blocks, BLOCKS_2=max(2, triton.next_power_of_2(blocks)), num_warps=8,
    )  # fmt: skip
    return ids, logprobs


def _rows(x: Tensor) -> tuple[Tensor, int, int, int, int]:
    """x as rows in two levels, copied if it must be: (tensor, rows, rows of the inner level, outer stride, inner stride)."""
    sizes, strides = _merged(x)
    if len(sizes) > 2 or x.stride(-1) != 1:
        x = x.contiguous()
        sizes, strides = _merged(x)
    sizes, strides = [*sizes, 1, 1], [*strides, 0, 0]
    return x, sizes[0] * sizes[1], sizes[1], strides[0], strides[1]


def lines(x: Tensor) -> tuple[Tensor, int, int]:
    """x as rows of one stride: (tensor, rows, stride)."""
    sizes, strides = _merged(x)
    if len(sizes) > 1 or x.stride(-1) != 1:
        x = x.contiguous()
        sizes, strides = _merged(x)
    return (x, sizes[0], strides[0]) if sizes else (x, 1, 0)


def _merged(x: Tensor) -> tuple[list[int], list[int]]:
    """Sizes and strides of all but the last dimension, with those that follow each other in memory made one."""
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
