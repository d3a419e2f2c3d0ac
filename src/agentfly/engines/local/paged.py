"""Keys and values in a pool of pages, and the attention that reads them.

In: for one forward pass, which rows it computes (`Reading`: many tokens of a few rows) or that every lane goes on by one token
(`Decoding`). Out: what each layer of the model needs: where its new keys and values go, and who attends to what. The pools are
made once, at their full size, so that a CUDA graph may hold their addresses. On a GPU attention is a Triton kernel (`kernels`);
elsewhere, and where Triton is not installed, pages are gathered and read with torch, which is right everywhere and slow.
Refuses what it would compute wrongly: attention sinks, position biases.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError
from .pages import PAGE

NAME = "agentfly_pages"
TILE = 64  # new tokens of one row that are read together


class Pools:
    """Per layer two tensors [pages, PAGE, kv_heads, head_dim]."""

    def __init__(self, num_pages: int, like: Sequence[tuple[Tensor, Tensor]]) -> None:
        """`like` are keys and values of each layer, [..., kv_heads, tokens, head_dim], for their shape, type and place."""
        # Zeros, because masked positions are multiplied by 0 and what is there must be finite.
        self.layers = [
            (key.new_zeros(num_pages, PAGE, *_sizes(key)), value.new_zeros(num_pages, PAGE, *_sizes(value)))
            for key, value in like
        ]
        self.num_pages = num_pages

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for pair in self.layers for tensor in pair)


class Decoding:
    """Every lane computes one token. All tensors are the lanes' own, at fixed addresses."""

    def __init__(self, pools: Pools, table: Tensor, places: Tensor, lengths: Tensor) -> None:
        """`table` [lanes, pages], `places` where each new key goes (page x PAGE + offset), `lengths` with the new token."""
        self.pools, self.table, self.places, self.lengths = pools, table, places, lengths


class Reading:
    """Some rows compute many tokens each. All tensors are on the device; `rows` are (cached before, new tokens), for torch.

    A tile is up to TILE new tokens of one row; `starts` says where each row's tokens begin on the line, and where they end.
    """

    tile = TILE

    def __init__(
        self,
        pools: Pools,
        table: Tensor,
        places: Tensor,
        positions: Tensor,
        starts: Tensor,
        past: Tensor,
        tile_rows: Tensor,
        tile_queries: Tensor,
        rows: Sequence[tuple[int, int]] | None,
    ) -> None:
        self.pools, self.table, self.places, self.positions = pools, table, places, positions
        self.starts, self.past, self.tile_rows, self.tile_queries, self.rows = starts, past, tile_rows, tile_queries, rows

    @classmethod
    def of(cls, pools: Pools, rows: Sequence[tuple[Sequence[int], int, int]], device: torch.device) -> Reading:
        """For rows of (pages, tokens cached before, new tokens)."""
        width = max(len(pages) for pages, _, _ in rows)
        table = torch.zeros(len(rows), width, dtype=torch.int32)
        places: list[int] = []
        positions: list[int] = []
        starts: list[int] = [0]
        tile_rows: list[int] = []
        tile_queries: list[int] = []
        for number, (pages, past, count) in enumerate(rows):
            table[number, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
            places += [pages[at // PAGE] * PAGE + at % PAGE for at in range(past, past + count)]
            positions += range(past, past + count)
            starts.append(starts[-1] + count)
            tiles = range(0, count, TILE)
            tile_rows += [number] * len(tiles)
            tile_queries += tiles

        def short(numbers: list[int]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device=device)

        return cls(
            pools,
            table.to(device),
            torch.tensor(places, device=device),
            torch.tensor(positions, device=device),
            short(starts),
            short([past for _, past, _ in rows]),
            short(tile_rows),
            short(tile_queries),
            rows=[(past, count) for _, past, count in rows],
        )


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    agentfly_plan: Decoding | Reading | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Called by each layer of the model: query [1, heads, tokens, head_dim], key and value [1, kv_heads, tokens, head_dim]."""
    unknown = [name for name in ("s_aux", "position_bias") if kwargs.get(name) is not None]
    if agentfly_plan is None or unknown:
        why = f"uses {unknown[0]} in its attention" if unknown else "does not hand its arguments on to attention"
        raise ConfigError(f"{type(module).__name__} {why}: the local engine cannot serve it")
    plan = agentfly_plan
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    keys, values = plan.pools.layers[int(getattr(module, "layer_idx", 0))]
    fused = fused_kernels(query.device)
    if fused is not None and key.shape == value.shape:
        fused.store(key, value, keys, values, plan.places)
    else:
        keys.view(-1, *keys.shape[2:]).index_copy_(0, plan.places, key.contiguous())
        values.view(-1, *values.shape[2:]).index_copy_(0, plan.places, value.contiguous())
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    options: dict[str, Any] = {"scale": scale, "window": sliding_window, "softcap": softcap}
    kernels = _kernels() if query.is_cuda else None
    if isinstance(plan, Decoding):
        if kernels is not None:
            out = kernels.decode(query, keys, values, plan.table, plan.lengths, **options)
        else:
            out = decode_plainly(query, keys, values, plan.table, plan.lengths, **options)
    elif kernels is not None:
        out = kernels.read(query, keys, values, plan, **options)
    else:
        out = read_plainly(query, keys, values, plan, **options)
    return out[None], None


def decode_plainly(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, *,
    scale: float, window: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """The same as `kernels.decode`, by gathering every page."""
    rows, heads, dim = query.shape
    at = torch.arange(table.shape[1] * PAGE, device=query.device)
    hidden = at[None] >= lengths[:, None]
    if window is not None:
        hidden |= at[None] < lengths[:, None] - window
    k, v = (pool[table.long()].flatten(1, 2).transpose(1, 2) for pool in (keys, values))
    folded = query.view(rows, k.shape[1], heads // k.shape[1], dim)
    return _attend(folded, k, v, hidden[:, None, None], scale, softcap).reshape(rows, heads, v.shape[-1])


def read_plainly(
    query: Tensor, keys: Tensor, values: Tensor, plan: Reading, *, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """The same as `kernels.read`, row by row."""
    outs, start = [], 0
    for number, (past, count) in enumerate(plan.rows or ()):
        end = past + count
        pages = plan.table[number, : -(-end // PAGE)].long()
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
    # A lane without tokens sees nothing: zeros, not NaN.
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    return weights.to(values.dtype) @ values


def _sizes(tensor: Tensor) -> tuple[int, int]:
    return tensor.shape[-3], tensor.shape[-1]


@cache
def _kernels() -> Any:
    """The Triton kernels, or None where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    from . import kernels

    return kernels


def fused_kernels(device: torch.device) -> Any:
    """The step's other Triton kernels, or None where there are none."""
    if device.type != "cuda" or _kernels() is None:
        return None
    from . import fused

    return fused
