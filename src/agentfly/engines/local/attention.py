"""Attention of one step: many chains, each with its own past, in one forward pass without padding.

In: the rows of a step (slot, tokens already cached, new tokens). Out: a `Plan`, and the attention function that a model calls
in each layer with it. The new tokens of all rows are packed into one line, so linear layers do no work on padding; attention
takes them apart:

    row            A     B     C C C C       D D          A, B decode: one new token each; C, D read 4 and 2 new tokens
    packed         a     b     c c c c       d d          input_ids [1, 8], position_ids [1, 8]
    groups        (A B)       (C C C C / D D - -)         rows of like size attend together, keys are views of the slots

Grouped-query heads are folded into the query's length, so keys are never repeated. Sliding windows and soft-capped scores
come with the layer's own arguments. Refuses what it would compute wrongly: attention sinks, position biases, attention that
is not causal.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...errors import ConfigError
from .cache import SlotCache

NAME = "agentfly_slots"
SIZES = (1, 16, 64)  # rows are grouped by how many new tokens they have: up to 1, 16, 64, and more
DENSE = 0.75  # a span of slots is read in place when at least this share of it is wanted, else gathered


class Group:
    """Rows that attend together. `start:stop` are its tokens in the packed line."""

    def __init__(self, rows: Sequence[tuple[int, int, int]], start: int, device: torch.device) -> None:
        """`rows` are (slot, tokens cached before, new tokens), in the order of the packed line."""
        slots = [slot for slot, _, _ in rows]
        counts = [count for _, _, count in rows]
        low, high = min(slots), max(slots) + 1
        self.start, self.stop = start, start + sum(counts)
        self.count = max(counts)
        self.length = max(past + count for _, past, count in rows)
        self.keys: slice | Tensor
        if len(rows) >= (high - low) * DENSE:
            self.width, self.keys = high - low, slice(low, high)
            places = [slot - low for slot in slots]
        else:
            self.width, self.keys = len(rows), torch.tensor(slots, device=device)
            places = list(range(len(rows)))
        self.take: Tensor | None = None
        self.back: Tensor | None = None
        exact = self.stop - start == self.width * self.count and places == list(range(self.width))
        positions = [0] * (self.width * self.count)
        take = [start] * (self.width * self.count)
        back: list[int] = []
        token = start
        for place, (_, past, count) in zip(places, rows, strict=True):
            at = place * self.count
            positions[at : at + count] = range(past, past + count)
            if not exact:
                take[at : at + count] = range(token, token + count)
                back.extend(range(at, at + count))
                token += count
        if not exact:
            self.take, self.back = torch.tensor(take, device=device), torch.tensor(back, device=device)
        self.positions = torch.tensor(positions, device=device).view(self.width, self.count)
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """What each new token may not see, additive [rows, 1, count, length]; one for all layers with this window."""
        found = self._masks.get((window, dtype))
        if found is None:
            keys = torch.arange(self.length, device=self.positions.device)
            queries = self.positions[:, :, None]
            hidden = keys > queries
            if window is not None:
                hidden |= keys <= queries - window
            found = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)[:, None]
            self._masks[(window, dtype)] = found
        return found


class Plan:
    """One step: what is written where, and who attends to what."""

    def __init__(self, cache: SlotCache, rows: Sequence[tuple[int, int, int]], device: torch.device) -> None:
        """`rows` are (slot, tokens cached before, new tokens), sorted by `order` so that groups are runs of the packed line."""
        self.cache = cache
        slots: list[int] = []
        positions: list[int] = []
        self.groups: list[Group] = []
        for _, run in groupby(rows, key=lambda row: size_class(row[2])):
            alike = list(run)
            self.groups.append(Group(alike, len(slots), device))
            for slot, past, count in alike:
                slots.extend([slot] * count)
                positions.extend(range(past, past + count))
        self.slots = torch.tensor(slots, device=device)
        self.positions = torch.tensor(positions, device=device)


def size_class(count: int) -> int:
    return bisect_left(SIZES, count)


def order(row: tuple[int, int, int]) -> tuple[int, int]:
    """Sorts rows into groups, and inside a group by slot."""
    return size_class(row[2]), row[0]


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    agentfly_plan: Plan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Called by each layer of the model: query [1, heads, tokens, head_dim], key and value [1, kv_heads, tokens, head_dim]."""
    if agentfly_plan is None:
        raise ConfigError(
            f"{type(module).__name__} does not hand its arguments on to attention: the local engine cannot serve it"
        )
    for unknown in ("s_aux", "position_bias"):
        if kwargs.get(unknown) is not None:
            raise ConfigError(f"{type(module).__name__} uses {unknown} in its attention, which the local engine does not know")
    plan = agentfly_plan
    lines = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    query, new_keys, new_values = lines
    keys, values = plan.cache.layer(int(getattr(module, "layer_idx", 0)), new_keys, new_values)
    keys[plan.slots, :, plan.positions] = new_keys
    values[plan.slots, :, plan.positions] = new_values
    outs = [_attend(group, query, keys, values, scaling, sliding_window, softcap) for group in plan.groups]
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out[None], None


def _attend(
    group: Group, query: Tensor, keys: Tensor, values: Tensor, scale: float | None, window: int | None, softcap: float | None
) -> Tensor:
    """The new tokens of one group: [tokens, heads, head_dim] -> the same."""
    if isinstance(group.keys, slice):
        keys, values = keys[group.keys, :, : group.length], values[group.keys, :, : group.length]
    else:
        keys = keys[:, :, : group.length].index_select(0, group.keys)
        values = values[:, :, : group.length].index_select(0, group.keys)
    mask = group.mask(window, query.dtype)
    query = query[group.start : group.stop] if group.take is None else query[group.take]
    heads, kv_heads, dim = query.shape[1], keys.shape[1], query.shape[2]
    folds = heads // kv_heads
    query = query.reshape(group.width, group.count, kv_heads, folds, dim)
    if group.count == 1:
        # One query per row: the heads that share a key become the query's length.
        out = _product(query[:, 0], keys, values, mask, scale, softcap)
        out = out.reshape(group.width, heads, values.shape[3])
    else:
        parts = [
            _product(query[:, :, :, fold].transpose(1, 2), keys, values, mask, scale, softcap).transpose(1, 2)
            for fold in range(folds)
        ]
        out = torch.stack(parts, dim=3).view(group.width * group.count, heads, values.shape[3])
    return out if group.back is None else out[group.back]


def _product(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float | None, softcap: float | None) -> Tensor:
    if softcap is None:
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    scores = query @ keys.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = torch.tanh(scores / softcap) * softcap + mask
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype) @ values
