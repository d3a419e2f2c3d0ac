"""Attention over a paged KV cache in Triton: `decode` with one query per sequence, `prefill` with many.

Keys and values stay in their pages; none are copied. Sums are float32. `decode` computes the query heads that share a key head
together, so each key is read once. It rotates the query and the new key, and writes the new key and value into their page. With
few sequences it splits long contexts over several programs and combines the partial results by their log-sum-exp. Both can be
captured in a CUDA graph: no size depends on the data and nothing waits for the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64  # keys per iteration of `prefill`
MAX_SPLITS = 16  # parts of one context that are computed in parallel
PROGRAMS = 512  # `decode` splits contexts until it has as many programs


class NewToken(NamedTuple):
    """The tokens that `decode` computes: key and value [rows, kv_heads, dim], and their places in the pools [rows].

    `turn`: cos and sin [rows, dim] by which the query and the key are still to be rotated.
    """

    key: Tensor
    value: Tensor
    places: Tensor
    turn: tuple[Tensor, Tensor] | None = None


class DecodeTuning(NamedTuple):
    """Launch parameters of `decode`: keys per iteration, warps, pipeline stages."""

    block: int
    warps: int
    stages: int


def tuning(dim: int, folds: int, dtype: torch.dtype) -> DecodeTuning:
    """The fastest parameters of those measured on an H200 with 256 and 512 sequences of 600 tokens."""
    if dim * dtype.itemsize > 256:
        return DecodeTuning(32, 4, 2)
    return DecodeTuning(32, 1, 6) if folds > 4 and dim <= 64 else DecodeTuning(64, 2, 3)


@triton.jit
def _scores(q, k, scale, SOFTCAP: tl.constexpr, EXACT: tl.constexpr):
    """Scores of queries and keys, in units of log2."""
    s = tl.dot(q, tl.trans(k), input_precision=EXACT) * scale
    if SOFTCAP > 0:
        x = s * (2.0 / SOFTCAP)
        s = SOFTCAP * (1.0 - 2.0 / (tl.exp(x) + 1.0))
    return s * 1.4426950408889634  # log2(e)


@triton.jit
def _block(
    q, k_ptr, v_ptr, table_ptr, start, first, end, scale, kv_page, kv_token, best, total, acc,
    DIM: tl.constexpr, DIM_2: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, ALIGN: tl.constexpr,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Attend to the block of keys at `start`, the first position of a page. With MASKED, only [first, end) counts."""
    at, dims = start + tl.arange(0, BLOCK), tl.arange(0, DIM_2)
    here = (at >= first) & (at < end)
    if MASKED:
        page = tl.load(table_ptr + at // PAGE, mask=here, other=0)
    else:
        page = tl.load(table_ptr + at // PAGE)
    where = page.to(tl.int64) * kv_page + (at % PAGE) * kv_token
    if ALIGN > 1:
        where = tl.multiple_of(where, ALIGN)
    where = where[:, None] + dims[None, :]
    if MASKED:
        take = here[:, None] & (dims[None, :] < DIM)
        k = tl.load(k_ptr + where, mask=take, other=0.0)
        v = tl.load(v_ptr + where, mask=take, other=0.0)
    elif DIM < DIM_2:
        k = tl.load(k_ptr + where, mask=dims[None, :] < DIM, other=0.0)
        v = tl.load(v_ptr + where, mask=dims[None, :] < DIM, other=0.0)
    else:
        k = tl.load(k_ptr + where)
        v = tl.load(v_ptr + where)
    s = _scores(q, k, scale, SOFTCAP, EXACT)
    if MASKED:
        s = tl.where(here[None, :], s, float("-inf"))
    top = tl.maximum(best, tl.max(s, 1))
    p = tl.exp2(s - top[:, None])
    fade = tl.exp2(best - top)
    total = total * fade + tl.sum(p, 1)
    acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision=EXACT).to(tl.float32)
    return top, total, acc


@triton.jit
def _turned(ptr, at, cos_ptr, sin_ptr, dims, take, DIM: tl.constexpr):
    """Load numbers and rotate their halves, rounded in the order of `layers.rotary`. `at`: offset of each number's head."""
    kind = ptr.dtype.element_ty
    cos = tl.load(cos_ptr + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    low = dims < DIM // 2
    x = tl.load(ptr + at + dims, mask=take, other=0.0).to(tl.float32)
    y = tl.load(ptr + at + tl.where(low, dims + DIM // 2, dims - DIM // 2), mask=take, other=0.0).to(tl.float32)
    near, far = (x * cos).to(kind).to(tl.float32), (y * sin).to(kind).to(tl.float32)
    return tl.where(low, near - far, near + far).to(kind)


@triton.jit(do_not_specialize=["splits"])
def _decode(
    q_ptr, k_ptr, v_ptr, table_ptr, length_ptr, out_ptr, part_ptr, sum_ptr, key_ptr, value_ptr, place_ptr, cos_ptr, sin_ptr,
    scale, table_width, q_row, kv_page, kv_token, kv_head, key_row, value_row, cos_row, sin_row, splits,
    FOLDS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_2: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    SPLIT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr,
    ALIGN: tl.constexpr, NEW: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """One sequence, the query heads of one key head, one part of the context.

    `splits` is not a constexpr, so that a few compiled kernels serve every batch size. With NEW, the program that attends to
    the last position first writes its key and value; with TURN, they and the queries are rotated.
    """
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1) * FOLDS
    length = tl.load(length_ptr + row)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    lowest = first // PAGE * PAGE
    blocks = tl.cdiv(length - lowest, BLOCK)
    share = tl.cdiv(blocks, splits)
    begin = lowest + split * share * BLOCK
    end = tl.minimum(begin + share * BLOCK, length)
    folds, dims = tl.arange(0, ROWS), tl.arange(0, DIM_2)
    inside = (folds[:, None] < FOLDS) & (dims[None, :] < DIM)
    q_at = row * q_row + (head * FOLDS + folds[:, None]) * DIM
    cos_ptr += row * cos_row
    sin_ptr += row * sin_row
    if TURN:
        q = _turned(q_ptr, q_at, cos_ptr, sin_ptr, dims[None, :], inside, DIM)
    else:
        q = tl.load(q_ptr + q_at + dims[None, :], mask=inside, other=0.0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_2], tl.float32)
    k_ptr += head * kv_head
    v_ptr += head * kv_head
    table_ptr += row * table_width
    if NEW:
        if (begin < end) & (end == length):
            place = tl.load(place_ptr + row).to(tl.int64)
            to = place // PAGE * kv_page + place % PAGE * kv_token + dims
            if TURN:
                key = _turned(key_ptr, row * key_row + head * DIM, cos_ptr, sin_ptr, dims, dims < DIM, DIM)
            else:
                key = tl.load(key_ptr + row * key_row + head * DIM + dims, mask=dims < DIM)
            value = tl.load(value_ptr + row * value_row + head * DIM + dims, mask=dims < DIM)
            tl.store(k_ptr + to, key, mask=dims < DIM)
            tl.store(v_ptr + to, value, mask=dims < DIM)
        tl.debug_barrier()  # other threads of this program read them below
    if WINDOW > 0:
        for start in range(begin, end, BLOCK):
            best, total, acc = _block(q, k_ptr, v_ptr, table_ptr, start, first, end, scale, kv_page, kv_token, best, total, acc,
                                     DIM, DIM_2, BLOCK, PAGE, ALIGN, True, SOFTCAP, EXACT)  # fmt: skip
    else:
        whole = begin + tl.maximum(end - begin, 0) // BLOCK * BLOCK  # up to here no key needs a mask
        for start in range(begin, whole, BLOCK):
            best, total, acc = _block(q, k_ptr, v_ptr, table_ptr, start, first, end, scale, kv_page, kv_token, best, total, acc,
                                     DIM, DIM_2, BLOCK, PAGE, ALIGN, False, SOFTCAP, EXACT)  # fmt: skip
        if whole < end:
            best, total, acc = _block(q, k_ptr, v_ptr, table_ptr, whole, first, end, scale, kv_page, kv_token, best, total, acc,
                                     DIM, DIM_2, BLOCK, PAGE, ALIGN, True, SOFTCAP, EXACT)  # fmt: skip
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    place = row * heads + head * FOLDS + folds
    if not SPLIT:
        tl.store(out_ptr + place[:, None] * DIM + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        part = place * splits + split
        tl.store(part_ptr + part[:, None] * DIM + dims[None, :], acc, mask=inside)
        weight = tl.where(total > 0, best + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(sum_ptr + part, weight, mask=folds < FOLDS)


@triton.jit(do_not_specialize=["splits"])
def _join(part_ptr, sum_ptr, out_ptr, splits, DIM: tl.constexpr, DIM_2: tl.constexpr, MOST: tl.constexpr):
    place = tl.program_id(0)
    numbers, dims = tl.arange(0, MOST), tl.arange(0, DIM_2)
    weight = tl.load(sum_ptr + place * splits + numbers, mask=numbers < splits, other=float("-inf"))
    top = tl.max(weight, 0)
    share = tl.where(weight > float("-inf"), tl.exp2(weight - tl.where(top > float("-inf"), top, 0.0)), 0.0)
    take = (dims[None, :] < DIM) & (numbers[:, None] < splits)
    part = tl.load(part_ptr + (place * splits + numbers[:, None]) * DIM + dims[None, :], mask=take, other=0.0)
    total = tl.sum(share, 0)
    out = tl.sum(part * share[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + place * DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dims < DIM)


@triton.jit
def _prefill(
    q_ptr, k_ptr, v_ptr, table_ptr, tile_row_ptr, tile_query_ptr, start_ptr, past_ptr, out_ptr,
    scale, table_width, kv_page, kv_token, kv_head, heads,
    FOLDS: tl.constexpr, DIM: tl.constexpr, DIM_2: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One tile: up to TILE new tokens of one sequence, for one head."""
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(tile_row_ptr + tile)
    query = tl.load(tile_query_ptr + tile)
    token = tl.load(start_ptr + row)
    count = tl.load(start_ptr + row + 1) - token
    past = tl.load(past_ptr + row)
    numbers, dims = query + tl.arange(0, TILE), tl.arange(0, DIM_2)
    inside = (numbers[:, None] < count) & (dims[None, :] < DIM)
    place = ((token + numbers[:, None]) * heads + head) * DIM + dims[None, :]
    q = tl.load(q_ptr + place, mask=inside, other=0.0)
    positions = past + numbers
    end = past + tl.minimum(query + TILE, count)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(past + query - WINDOW + 1, 0) // BLOCK * BLOCK
    best = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, DIM_2], tl.float32)
    for start in range(first, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        here = at < end
        page = tl.load(table_ptr + row * table_width + at // PAGE, mask=here, other=0)
        where = page.to(tl.int64) * kv_page + (at % PAGE) * kv_token + (head // FOLDS) * kv_head
        take = here[:, None] & (dims[None, :] < DIM)
        k = tl.load(k_ptr + where[:, None] + dims[None, :], mask=take, other=0.0)
        v = tl.load(v_ptr + where[:, None] + dims[None, :], mask=take, other=0.0)
        seen = here[None, :] & (at[None, :] <= positions[:, None])
        if WINDOW > 0:
            seen = seen & (at[None, :] > positions[:, None] - WINDOW)
        s = tl.where(seen, _scores(q, k, scale, SOFTCAP, EXACT), float("-inf"))
        top = tl.maximum(best, tl.max(s, 1))
        safe = tl.where(top > float("-inf"), top, 0.0)
        p = tl.exp2(s - safe[:, None])
        fade = tl.exp2(best - safe)
        total = total * fade + tl.sum(p, 1)
        acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision=EXACT).to(tl.float32)
        best = top
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=inside)


def decode(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, *,
    scale: float, window: int | None, softcap: float | None, new: NewToken | None = None,
) -> Tensor:  # fmt: skip
    """query [rows, heads, dim] -> the same shape. Row i attends to its first `lengths[i]` tokens; length 0 gives zeros.

    With `new`, key and value of the last of these tokens are first written to their places in the pools; not for length 0.
    """
    rows, heads, dim = query.shape
    kv_heads = keys.shape[2]
    folds = heads // kv_heads
    splits = num_splits(rows * kv_heads)
    cut = tuning(dim, folds, query.dtype)
    query = _heads_adjacent(query)
    key, value, places = (query, query, lengths) if new is None else (*map(_heads_adjacent, new[:2]), new.places.contiguous())
    turn = None if new is None else new.turn
    cos, sin = (query, query) if turn is None else turn
    out = query.new_empty(rows, heads, dim)
    part = query.new_empty((rows, heads, splits, dim) if splits > 1 else (1,), dtype=torch.float32)
    sums = query.new_empty((rows, heads, splits) if splits > 1 else (1,), dtype=torch.float32)
    _decode[(rows, kv_heads, splits)](
        query, keys, values, table, lengths, out, part, sums, key, value, places, cos, sin,
        scale, table.stride(0), query.stride(0), keys.stride(0), keys.stride(1), keys.stride(2),
        key.stride(0), value.stride(0), cos.stride(0), sin.stride(0), splits,
        FOLDS=folds, ROWS=max(16, _power(folds)), DIM=dim, DIM_2=max(16, _power(dim)), BLOCK=cut.block, PAGE=keys.shape[1],
        SPLIT=splits > 1, WINDOW=window or 0, SOFTCAP=softcap or 0.0, EXACT=_precision(query), ALIGN=_align(keys),
        NEW=new is not None, TURN=turn is not None, num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    if splits > 1:
        _join[(rows * heads,)](part, sums, out, splits, DIM=dim, DIM_2=max(16, _power(dim)), MOST=MAX_SPLITS, num_warps=4)
    return out


def prefill(
    query: Tensor, keys: Tensor, values: Tensor, metadata: object, *, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """query [tokens, heads, dim] -> the same shape. `metadata` is an `engines.local.paged_attention.PrefillMetadata`."""
    _, heads, dim = query.shape
    query = query.contiguous()
    out = torch.zeros_like(query)  # padding tokens stay 0
    _prefill[(len(metadata.tile_rows), heads)](
        query, keys, values, metadata.table, metadata.tile_rows, metadata.tile_queries, metadata.starts, metadata.past, out,
        scale, metadata.table.stride(0), keys.stride(0), keys.stride(1), keys.stride(2), heads,
        FOLDS=heads // keys.shape[2], DIM=dim, DIM_2=max(16, _power(dim)), TILE=metadata.tile, BLOCK=BLOCK, PAGE=keys.shape[1],
        WINDOW=window or 0, SOFTCAP=softcap or 0.0, EXACT=_precision(query), num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


def num_splits(programs: int) -> int:
    """Splits of each context so that a large GPU is filled: a power of two, 1 if there are many programs already."""
    splits = 1
    while splits < MAX_SPLITS and programs * splits < PROGRAMS:
        splits *= 2
    return splits


def _precision(tensor: Tensor) -> str:
    """Multiply float32 in full precision: TF32 would lose four decimal digits."""
    return "ieee" if tensor.dtype == torch.float32 else "tf32"


def _align(pool: Tensor) -> int:
    """A divisor (in elements) of every key's offset; loads of 16 bytes need 16."""
    return 16 if all(stride % 16 == 0 for stride in pool.stride()[:3]) else 1


def _heads_adjacent(tensor: Tensor) -> Tensor:
    """The tensor itself if the heads of a row follow one another, as in a part of a merged product; else a copy."""
    return tensor if tensor.stride()[1:] == (tensor.shape[2], 1) else tensor.contiguous()


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()
