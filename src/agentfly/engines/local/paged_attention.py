"""The paged KV cache (`KVPools`) and the attention function that models call with it.

The metadata of a forward pass says what each layer does: `PrefillMetadata` (many new tokens of a few sequences) or
`DecodeMetadata` (one new token in every row of the decode batch). Pools are allocated once at full size, because CUDA graphs
hold their addresses. On a GPU with Triton, attention is a kernel of `agentfly.kernels.paged_attention`; elsewhere the pages
are gathered and read with torch, which is correct on every device but slower. Attention sinks and position biases raise a
ConfigError: they would be computed wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels import has_kernels
from ...kernels.lent_memory import LentMemory
from ...kernels.replica import check_attention
from ...kernels.rotation import rotate_now, take_rotation
from .page_allocator import PAGE_SIZE

NAME = "agentfly_pages"
ALIGNMENT = 256  # bytes, as torch's allocator aligns tensors
TILE = 64  # new tokens of one sequence that one kernel program computes
IntArray = npt.NDArray[np.int64]


class KVPools:
    """Keys and values: per layer two tensors [pages, PAGE_SIZE, kv_heads, head_dim]."""

    def __init__(
        self, num_pages: int, like: Sequence[tuple[Tensor, Tensor]], memory: Callable[[int], LentMemory] | None = None
    ) -> None:
        """`like` are keys and values of each layer, [..., kv_heads, tokens, head_dim]; they give shape, dtype and device.

        `memory` makes memory of so many bytes that can be lent. Such pools are lent at first.
        """
        self.num_pages = num_pages
        tensors = [each for pair in like for each in pair]
        shapes = [(num_pages, PAGE_SIZE, *_sizes(each)) for each in tensors]
        sizes = [each.element_size() * math.prod(shape) for each, shape in zip(tensors, shapes, strict=True)]
        self.num_bytes = sum(sizes)
        self.memory: LentMemory | None = None
        # Zeros: masked positions have weight 0, and 0 x NaN would be NaN.
        if memory is None:
            pools = [each.new_zeros(shape) for each, shape in zip(tensors, shapes, strict=True)]
        else:
            starts = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
            self.memory = memory(starts[-1])
            held = [self.memory.tensor[start : start + size] for start, size in zip(starts, sizes, strict=False)]
            pools = [part.view(each.dtype).view(shape) for part, each, shape in zip(held, tensors, shapes, strict=True)]
        self.layers = list(zip(pools[::2], pools[1::2], strict=True))


@dataclass(frozen=True, slots=True)
class DecodeMetadata:
    """Every row of the decode batch computes one token. Its tensors have fixed addresses.

    `table` [rows, pages]. `places` [rows]: where each new key goes (page x PAGE_SIZE + offset). `lengths` [rows]: with the
    new token; 0 for an idle row.
    """

    pools: KVPools
    table: Tensor
    places: Tensor
    lengths: Tensor


@dataclass(frozen=True, slots=True)
class PrefillMetadata:
    """A few sequences compute many tokens each, packed into one line. All tensors are on the device.

    A tile is up to TILE new tokens of one sequence. `starts` are the offsets of the sequences in the line, and its end. `rows`
    are (cached tokens, new tokens), needed by the torch implementation only.
    """

    pools: KVPools
    table: Tensor
    places: Tensor
    positions: Tensor
    starts: Tensor
    past: Tensor
    tile_rows: Tensor
    tile_queries: Tensor
    rows: Sequence[tuple[int, int]] | None
    tile: ClassVar[int] = TILE

    @classmethod
    def of(cls, pools: KVPools, rows: Sequence[tuple[Sequence[int], int, int]], device: torch.device) -> PrefillMetadata:
        """Build the metadata of sequences given as (page table, cached tokens, new tokens)."""
        arrays = PrefillArrays.of(rows, max(len(pages) for pages, _, _ in rows))
        places, positions = (torch.from_numpy(each).to(device) for each in (arrays.places, arrays.positions))
        table, starts, past, tile_rows, tile_queries = (
            torch.from_numpy(each.astype(np.int32)).to(device)
            for each in (arrays.table, arrays.starts, arrays.past, arrays.tile_rows, arrays.tile_queries)
        )
        old_and_new = [(past, count) for _, past, count in rows]
        return cls(pools, table, places, positions, starts, past, tile_rows, tile_queries, rows=old_and_new)


class PrefillArrays(NamedTuple):
    """The tensors of `PrefillMetadata` as arrays on the host."""

    table: IntArray
    places: IntArray
    positions: IntArray
    starts: IntArray
    past: IntArray
    tile_rows: IntArray
    tile_queries: IntArray

    @classmethod
    def of(cls, rows: Sequence[tuple[Sequence[int], int, int]], width: int) -> PrefillArrays:
        """Of sequences given as (page table, cached tokens, new tokens). `width` is the length of the padded page tables."""
        past, count = np.array([row[1] for row in rows], np.int64), np.array([row[2] for row in rows], np.int64)
        held = np.array([len(row[0]) for row in rows], np.int64)
        numbers = np.arange(len(rows))
        table = np.zeros((len(rows), width), np.int64)
        pages = chain.from_iterable([row[0] for row in rows])
        table.ravel()[runs(numbers * width, held)] = np.fromiter(pages, np.int64, int(held.sum()))
        positions = runs(past, count)
        places = table[np.repeat(numbers, count), positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        tiles = -(-count // TILE)
        starts = np.concatenate(([0], np.cumsum(count)))
        return cls(table, places, positions, starts, past, np.repeat(numbers, tiles), TILE * runs(0 * tiles, tiles))


def runs(starts: IntArray, counts: IntArray) -> IntArray:
    """start, start + 1, ... for each start, `counts` numbers each, one run after another."""
    ends = np.cumsum(counts)
    numbers: IntArray = np.repeat(starts - ends + counts, counts) + np.arange(counts.sum())
    return numbers


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    agentfly_metadata: Any = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Called by every layer: query [1, heads, tokens, head_dim], key and value [1, kv_heads, tokens, head_dim]."""
    check_attention(module, agentfly_metadata, kwargs, "the local engine cannot serve it")
    metadata: DecodeMetadata | PrefillMetadata = agentfly_metadata
    keys, values = metadata.pools.layers[int(getattr(module, "layer_idx", 0))]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if has_kernels(query.device):
        out = _fused(metadata, query, key, value, keys, values, scale=scale, window=sliding_window, softcap=softcap)
        return out[None], None
    query, key, value = (_by_token(tensor) for tensor in (*rotate_now(query, key), value))
    _write(key, value, keys, values, metadata.places)
    if isinstance(metadata, DecodeMetadata):
        out = decode_reference(
            query, keys, values, metadata.table, metadata.lengths, scale=scale, window=sliding_window, softcap=softcap
        )
    else:
        out = prefill_reference(query, keys, values, metadata, scale=scale, window=sliding_window, softcap=softcap)
    return out[None], None


def _fused(
    metadata: DecodeMetadata | PrefillMetadata, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, *,
    scale: float, window: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """`attention` with Triton's kernels, which write a decoded token's key and value themselves if both have one shape."""
    from ...kernels import decode as token_kernels
    from ...kernels import paged_attention as kernels

    new = None
    alike = key.shape == value.shape
    if alike and isinstance(metadata, DecodeMetadata):
        turn = take_rotation(query, key)
        query, key, value = (_by_token(tensor) for tensor in (query, key, value))
        new = kernels.NewToken(key, value, metadata.places, None if turn is None else (turn[0][0], turn[1][0]))
    else:
        query, key, value = (_by_token(tensor) for tensor in (*rotate_now(query, key), value))
        (token_kernels.store if alike else _write)(key, value, keys, values, metadata.places)
    if isinstance(metadata, DecodeMetadata):
        table, lengths = metadata.table, metadata.lengths
        return kernels.decode(query, keys, values, table, lengths, scale=scale, window=window, softcap=softcap, new=new)
    return kernels.prefill(query, keys, values, metadata, scale=scale, window=window, softcap=softcap)


def _write(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, places: Tensor) -> None:
    keys.view(-1, *keys.shape[2:]).index_copy_(0, places, key.contiguous())
    values.view(-1, *values.shape[2:]).index_copy_(0, places, value.contiguous())


def _by_token(tensor: Tensor) -> Tensor:
    """[1, heads, tokens, dim] -> [tokens, heads, dim]."""
    return tensor[0].transpose(0, 1)


def decode_reference(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, *,
    scale: float, window: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """`kernels.paged_attention.decode` in torch, by gathering the pages."""
    rows, heads, dim = query.shape
    if not query.is_cuda:  # on a GPU this may run in a CUDA graph, where no size depends on the data
        table = table[:, : max(1, -(-int(lengths.max()) // PAGE_SIZE))]
    at = torch.arange(table.shape[1] * PAGE_SIZE, device=query.device)
    hidden = at[None] >= lengths[:, None]
    if window is not None:
        hidden |= at[None] < lengths[:, None] - window
    k, v = (pool[table.long()].flatten(1, 2).transpose(1, 2) for pool in (keys, values))
    folded = query.view(rows, k.shape[1], heads // k.shape[1], dim)
    return _attend(folded, k, v, hidden[:, None, None], scale, softcap).reshape(rows, heads, v.shape[-1])


def prefill_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    metadata: PrefillMetadata,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """`kernels.paged_attention.prefill` in torch, one sequence at a time."""
    outs, start = [], 0
    for number, (past, count) in enumerate(metadata.rows or ()):
        end = past + count
        pages = metadata.table[number, : -(-end // PAGE_SIZE)].long()
        k, v = (pool[pages].flatten(0, 1)[:end].transpose(0, 1) for pool in (keys, values))
        queries = torch.arange(past, end, device=query.device)[:, None]
        at = torch.arange(end, device=query.device)[None]
        hidden = at > queries
        if window is not None:
            hidden |= at <= queries - window
        folds = query.shape[1] // k.shape[0]
        q = query[start : start + count].transpose(0, 1).reshape(k.shape[0], folds, count, -1)
        out = _attend(q, k[:, None], v[:, None], hidden, scale, softcap)
        outs.append(out.reshape(query.shape[1], count, -1).transpose(0, 1))
        start += count
    return torch.cat(outs)


def _attend(query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, scale: float, softcap: float | None) -> Tensor:
    scores = (query @ keys.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(hidden, -torch.inf)
    # An idle row has no keys: its result is zeros, not NaN.
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    return weights.to(values.dtype) @ values


def _sizes(tensor: Tensor) -> tuple[int, int]:
    return tensor.shape[-3], tensor.shape[-1]
