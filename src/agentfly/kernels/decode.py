"""Triton kernels of a decode step besides attention and the layers.

    apply_changes   the host's changes to the rows of the decode batch, from one uploaded buffer
    begin_step      what a step reads of each row      store   writes keys and values
    draw            samples tokens                     end_step   advances each row

All but `apply_changes` can be captured in a CUDA graph: no size depends on the data and no launch waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import ALMOST_ONE

CHANGES = 128  # rows or pages of one program


class DecodeRows(NamedTuple):
    """The tensors of the decode batch. All are contiguous, with one line per row."""

    ints: Tensor  # int64
    floats: Tensor
    uniforms: Tensor
    table: Tensor  # int32


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
    place = tl.min(tl.where(tl.where(cold, z == best, drawn) & (at < SIZE), at, SIZE), 0)
    last = tl.max(tl.where((p > 0.0) & (at < SIZE), at, 0), 0)
    place = tl.where(place < SIZE, place, last)
    chosen = tl.sum(tl.where(at == place, z, 0.0), 0)
    tl.store(id_ptr + row, place.to(tl.int64))
    tl.store(logprob_ptr + row, chosen - best - tl.log(total))


@triton.jit
def _apply(
    change_ptr, ints_ptr, floats_ptr, uniforms_ptr, table_ptr, step_ptr, LEFT: tl.constexpr, DRAWN: tl.constexpr,
    INTS: tl.constexpr, INTS_2: tl.constexpr, FLOATS: tl.constexpr, FLOATS_2: tl.constexpr, UNIFORMS: tl.constexpr,
    UNIFORMS_2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    num_added, num_windows = tl.load(change_ptr), tl.load(change_ptr + 1)
    num_pages, num_removed = tl.load(change_ptr + 2), tl.load(change_ptr + 3)
    windows_ptr = change_ptr + 4 + num_added * (1 + INTS + FLOATS)
    pages_ptr = windows_ptr + num_windows * (1 + UNIFORMS)
    removed_ptr = pages_ptr + 2 * num_pages
    page_blocks = (num_pages + BLOCK - 1) // BLOCK
    if program == 0:
        tl.store(step_ptr, tl.full([], -1, tl.int64))
    # Triton wants a name to have one type in all branches.
    if program < num_added:
        new = change_ptr + 4 + program * (1 + INTS + FLOATS)
        new_row = tl.load(new).to(tl.int64)
        column, part = tl.arange(0, INTS_2), tl.arange(0, FLOATS_2)
        value = tl.load(new + 1 + column, mask=column < INTS, other=0).to(tl.int64)
        tl.store(ints_ptr + new_row * INTS + column, value, mask=column < INTS)
        bits = tl.load(new + 1 + INTS + part, mask=part < FLOATS, other=0)
        tl.store(floats_ptr + new_row * FLOATS + part, bits.to(tl.float32, bitcast=True), mask=part < FLOATS)
    elif program < num_added + num_windows:
        window = windows_ptr + (program - num_added) * (1 + UNIFORMS)
        window_row = tl.load(window).to(tl.int64)
        number = tl.arange(0, UNIFORMS_2)
        uniform = tl.load(window + 1 + number, mask=number < UNIFORMS, other=0).to(tl.float32, bitcast=True)
        tl.store(uniforms_ptr + window_row * UNIFORMS + number, uniform, mask=number < UNIFORMS)
        tl.store(ints_ptr + window_row * INTS + DRAWN, tl.full([], 0, tl.int64))
    elif program < num_added + num_windows + page_blocks:
        entry = (program - num_added - num_windows) * BLOCK + tl.arange(0, BLOCK)
        place = tl.load(pages_ptr + 2 * entry, mask=entry < num_pages, other=0)
        page = tl.load(pages_ptr + 2 * entry + 1, mask=entry < num_pages, other=0)
        tl.store(table_ptr + place, page, mask=entry < num_pages)
    else:
        end = (program - num_added - num_windows - page_blocks) * BLOCK + tl.arange(0, BLOCK)
        end_row = tl.load(removed_ptr + end, mask=end < num_removed, other=0).to(tl.int64)
        tl.store(ints_ptr + end_row * INTS + LEFT, tl.full([BLOCK], 0, tl.int64), mask=end < num_removed)


@triton.jit
def _begin(
    ints_ptr, table_ptr, uniforms_ptr, step_ptr, token_ptr, position_ptr, place_ptr, length_ptr, number_ptr, rows,
    TOKEN: tl.constexpr, POSITION: tl.constexpr, LEFT: tl.constexpr, DRAWN: tl.constexpr, INTS: tl.constexpr,
    WIDTH: tl.constexpr, UNIFORMS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) == 0:
        tl.store(step_ptr, tl.load(step_ptr) + 1)
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = row < rows
    base = ints_ptr + row * INTS
    position = tl.load(base + POSITION, mask=valid, other=0)
    alive = tl.load(base + LEFT, mask=valid, other=0) > 0
    drawn = tl.load(base + DRAWN, mask=valid, other=0)
    at = position // PAGE
    page = tl.load(table_ptr + row * WIDTH + at, mask=valid & alive & (at < WIDTH), other=0).to(tl.int64)
    tl.store(token_ptr + row, tl.load(base + TOKEN, mask=valid, other=0), mask=valid)
    tl.store(position_ptr + row, position, mask=valid)
    # Rows that have ended write to page 0, which nothing reads.
    tl.store(place_ptr + row, page * PAGE + position % PAGE, mask=valid)
    tl.store(length_ptr + row, tl.where(alive, position + 1, 0).to(tl.int32), mask=valid)
    number = tl.load(uniforms_ptr + row * UNIFORMS + tl.minimum(drawn, UNIFORMS - 1), mask=valid, other=0.0)
    tl.store(number_ptr + row, number, mask=valid)


@triton.jit
def _end(
    ints_ptr, id_ptr, logprob_ptr, result_ptr, step_ptr, rows, result_row, TOKEN: tl.constexpr, POSITION: tl.constexpr,
    LEFT: tl.constexpr, DRAWN: tl.constexpr, STOPS: tl.constexpr, INTS: tl.constexpr, MAX_STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = row < rows
    base = ints_ptr + row * INTS
    token = tl.load(id_ptr + row, mask=valid, other=0)
    logprob = tl.load(logprob_ptr + row, mask=valid, other=0.0)
    left = tl.load(base + LEFT, mask=valid, other=0)
    alive = left > 0
    stopped = row < 0
    for at in range(STOPS, INTS):
        stopped = stopped | (tl.load(base + at, mask=valid, other=-1) == token)
    left = tl.where(stopped, 0, left - alive.to(tl.int64))
    step = tl.load(step_ptr)
    tl.store(result_ptr + step * result_row + row, token.to(tl.int32), mask=valid)
    tl.store(result_ptr + (MAX_STEPS + step) * result_row + row, logprob.to(tl.int32, bitcast=True), mask=valid)
    tl.store(result_ptr + 2 * MAX_STEPS * result_row + row, left.to(tl.int32), mask=valid)
    tl.store(base + TOKEN, token, mask=valid & alive)
    tl.store(base + POSITION, tl.load(base + POSITION, mask=valid, other=0) + 1, mask=valid & alive)
    tl.store(base + DRAWN, tl.load(base + DRAWN, mask=valid, other=0) + 1, mask=valid & alive)
    tl.store(base + LEFT, left, mask=valid)


def apply_changes(changes: Tensor, counts: Sequence[int], rows: DecodeRows, step: Tensor, *, left: int, drawn: int) -> None:
    """Change rows of the decode batch, and set `step` to -1.

    `changes` (int32) holds four counts, then

        new rows     row, the values of `ints`, the bits of `floats`
        windows      row, the bits of its uniform numbers; column `drawn` becomes 0
        pages        place in the table, page
        removed      row; column `left` becomes 0

    No row may be in two of them in a way that depends on their order. `counts` are the four numbers.
    """
    added, windows, pages, removed = counts
    ints, floats, uniforms = rows.ints.shape[1], rows.floats.shape[1], rows.uniforms.shape[1]
    programs = added + windows + triton.cdiv(pages, CHANGES) + triton.cdiv(removed, CHANGES)
    _apply[(max(1, programs),)](
        changes, rows.ints, rows.floats, rows.uniforms, rows.table, step, LEFT=left, DRAWN=drawn, INTS=ints,
        INTS_2=triton.next_power_of_2(ints), FLOATS=floats, FLOATS_2=triton.next_power_of_2(floats), UNIFORMS=uniforms,
        UNIFORMS_2=triton.next_power_of_2(uniforms), BLOCK=CHANGES, num_warps=1,
    )  # fmt: skip


def begin_step(rows: DecodeRows, step: Tensor, size: int, page: int, *, columns: Sequence[int]) -> tuple[Tensor, ...]:
    """Increment `step`. Returns token, position, place of the new key, length (int32) and uniform number of the first rows.

    `columns` are those of token, position, left and drawn in `ints`. The length of a row that has ended is 0.
    """
    device = rows.ints.device
    token, position, place = (torch.empty(size, dtype=torch.int64, device=device) for _ in range(3))
    length = torch.empty(size, dtype=torch.int32, device=device)
    number = torch.empty(size, dtype=torch.float32, device=device)
    at_token, at_position, at_left, at_drawn = columns
    _begin[(triton.cdiv(size, CHANGES),)](
        rows.ints, rows.table, rows.uniforms, step, token, position, place, length, number, size, TOKEN=at_token,
        POSITION=at_position, LEFT=at_left, DRAWN=at_drawn, INTS=rows.ints.shape[1], WIDTH=rows.table.shape[1],
        UNIFORMS=rows.uniforms.shape[1], PAGE=page, BLOCK=CHANGES, num_warps=4,
    )  # fmt: skip
    return token, position, place, length, number


def end_step(
    rows: DecodeRows, ids: Tensor, logprobs: Tensor, results: Tensor, step: Tensor, *, columns: Sequence[int], max_steps: int
) -> None:
    """Write ids, log-probs and `left` to `results`, and advance the rows that have not ended.

    `columns` as in `begin_step`, and the first column of stop ids. `results` is int32 [2 x max_steps + 1, rows]: ids, the bits
    of log-probs, left.
    """
    at_token, at_position, at_left, at_drawn, stops = columns
    _end[(triton.cdiv(len(ids), CHANGES),)](
        rows.ints, ids, logprobs, results, step, len(ids), results.stride(0), TOKEN=at_token, POSITION=at_position,
        LEFT=at_left, DRAWN=at_drawn, STOPS=stops, INTS=rows.ints.shape[1], MAX_STEPS=max_steps, BLOCK=CHANGES, num_warps=4,
    )  # fmt: skip


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
