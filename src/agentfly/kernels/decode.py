"""Triton kernels of a decode step besides attention and the layers: `store` writes keys and values, `draw` samples tokens.

Both can be captured in a CUDA graph: no size depends on the data and no launch waits for the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import ALMOST_ONE


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
def _draw(
    logit_ptr, uniform_ptr, temperature_ptr, id_ptr, logprob_ptr, logit_row, uniform_row, temperature_row, limit,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_2: tl.constexpr,
):  # fmt: skip
    """Read the row once for the maximum and the sum of each block, then read the block that contains the token again."""
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
    weights = tl.where(sums > 0.0, tl.exp(tops - level) * sums, sums)  # keeps NaN
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
    # The parallel prefix sum need not be monotonic, so p > 0 decides which tokens can be drawn at all.
    drawn = (before + tl.cumsum(p, 0) > point) & (p > 0.0)
    found = tl.min(tl.where(tl.where(cold, z == best, drawn) & (at < SIZE), at, SIZE), 0)
    last = tl.max(tl.where((p > 0.0) & (at < SIZE), at, 0), 0)
    found = tl.where(found < SIZE, found, last)
    chosen = tl.sum(tl.where(at == found, z, 0.0), 0)
    tl.store(id_ptr + row, found.to(tl.int64))
    tl.store(logprob_ptr + row, chosen - best - tl.log(total))


def store(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, places: Tensor) -> None:
    """Write key and value [tokens, kv_heads, dim] into the pools [pages, page size, kv_heads, dim].

    `places` [tokens] are positions in a pool: page x page size + offset.
    """
    tokens, heads, dim = key.shape
    if key.stride(2) != 1 or value.stride(2) != 1:
        key, value = key.contiguous(), value.contiguous()
    _store[(tokens,)](
        key, value, keys, values, places.contiguous(), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        keys.stride(1), keys.stride(2), values.stride(1), values.stride(2),
        HEADS=heads, HEADS_2=triton.next_power_of_2(heads), DIM=dim, DIM_2=triton.next_power_of_2(dim), num_warps=2,
    )  # fmt: skip


def draw(logits: Tensor, uniforms: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one id per row of logits [rows, vocabulary]. Returns ids (int64) and their log-probs (float32).

    `uniforms` in [0, 1) and `temperatures` are float32 [rows]; temperature 0 takes the largest logit. The result is that of
    `engines.local.sampler.draw_batch` without top-k, top-p and min-p. A row with NaN gives an arbitrary id and a NaN log-prob.
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
