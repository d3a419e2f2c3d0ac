"""The slot cache and its attention: many sequences with different contexts in one forward pass without padding.

Per layer the cache has two tensors [slots, kv_heads, length, head_dim]. The new tokens of all sequences are packed into one
line, so linear layers compute no padding; attention takes the line apart again:

    sequence       A     B     C C C C       D D          A, B decode: one new token each; C, D prefill 4 and 2 tokens
    packed         a     b     c c c c       d d          input_ids [1, 8], position_ids [1, 8]
    groups        (A B)       (C C C C / D D - -)         sequences of similar size attend together; keys are views of the slots

Query heads that share a key head are folded into the query length, so keys are never repeated. Attention sinks and position
biases raise a ConfigError: they would be computed wrongly.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...kernels.replica import check_attention

NAME = "agentfly_slots"
SIZES = (1, 16, 64)  # sequences are grouped by their number of new tokens: up to 1, 16, 64, and more
DENSE = 0.75  # a range of slots is read in place if at least this share of it is needed, else gathered


class SlotCache:
    """Keys and values by layer. `num_slots` x `length` positions are allocated now; `reshape` changes that.

    A layer's tensors are created at its first write, so the model's shapes need not be known here.
    """

    def __init__(self, num_slots: int, length: int) -> None:
        self.num_slots = num_slots
        self.length = length
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The two tensors of a layer. `key` and `value` [tokens, kv_heads, head_dim] give the shape at the first call."""
        tensors = self.layers.get(index)
        if tensors is None:
            # Zeros: masked positions have weight 0, and 0 x NaN would be NaN.
            tensors = self.layers[index] = (
                key.new_zeros(self.num_slots, key.shape[1], self.length, key.shape[2]),
                value.new_zeros(self.num_slots, value.shape[1], self.length, value.shape[2]),
            )
        return tensors

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` positions of one slot to another: a prefix that sequences share."""
        for tensors in self.layers.values():
            for tensor in tensors:
                tensor[target, :, :count] = tensor[source, :, :count]

    def reshape(self, num_slots: int, length: int, moves: Sequence[tuple[int, int, int]]) -> None:
        """Reallocate and keep each (old slot, new slot, count) of `moves`. Goes layer by layer to keep the memory peak low."""
        for index, (keys, values) in self.layers.items():
            self.layers[index] = (_moved(keys, num_slots, length, moves), _moved(values, num_slots, length, moves))
        self.num_slots, self.length = num_slots, length

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for pair in self.layers.values() for tensor in pair)

    @property
    def bytes_per_token(self) -> int:
        return self.num_bytes // (self.num_slots * self.length)


def _moved(old: Tensor, num_slots: int, length: int, moves: Sequence[tuple[int, int, int]]) -> Tensor:
    new = torch.zeros(num_slots, old.shape[1], length, old.shape[3], dtype=old.dtype, device=old.device)
    for source, target, count in moves:
        new[target, :, :count] = old[source, :, :count]
    return new


class AttentionGroup:
    """Sequences that attend together. `start:stop` are their tokens in the packed line."""

    def __init__(self, rows: Sequence[tuple[int, int, int]], start: int, device: torch.device) -> None:
        """`rows` are (slot, cached tokens, new tokens), in the order of the packed line."""
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
        """The additive mask [rows, 1, count, length], computed once for all layers with this window."""
        mask = self._masks.get((window, dtype))
        if mask is None:
            keys = torch.arange(self.length, device=self.positions.device)
            queries = self.positions[:, :, None]
            hidden = keys > queries
            if window is not None:
                hidden |= keys <= queries - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)[:, None]
            self._masks[(window, dtype)] = mask
        return mask


class SlotMetadata:
    """The attention metadata of one step: where keys and values are written, and which sequences attend together."""

    def __init__(self, cache: SlotCache, rows: Sequence[tuple[int, int, int]], device: torch.device) -> None:
        """`rows` are (slot, cached tokens, new tokens), sorted by `order` so that each group is contiguous in the line."""
        self.cache = cache
        slots: list[int] = []
        positions: list[int] = []
        self.groups: list[AttentionGroup] = []
        for _, run in groupby(rows, key=lambda row: size_class(row[2])):
            alike = list(run)
            self.groups.append(AttentionGroup(alike, len(slots), device))
            for slot, past, count in alike:
                slots.extend([slot] * count)
                positions.extend(range(past, past + count))
        self.slots = torch.tensor(slots, device=device)
        self.positions = torch.tensor(positions, device=device)


def size_class(count: int) -> int:
    return bisect_left(SIZES, count)


def order(row: tuple[int, int, int]) -> tuple[int, int]:
    """Sort key: by group, and inside a group by slot."""
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
    agentfly_metadata: Any = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Called by every layer: query [1, heads, tokens, head_dim], key and value [1, kv_heads, tokens, head_dim]."""
    check_attention(module, agentfly_metadata, kwargs, "the local engine cannot serve it")
    metadata: SlotMetadata = agentfly_metadata
    query, new_keys, new_values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    keys, values = metadata.cache.layer(int(getattr(module, "layer_idx", 0)), new_keys, new_values)
    keys[metadata.slots, :, metadata.positions] = new_keys
    values[metadata.slots, :, metadata.positions] = new_values
    outs = [_attend(group, query, keys, values, scaling, sliding_window, softcap) for group in metadata.groups]
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out[None], None


def _attend(
    group: AttentionGroup,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attention of one group: [tokens, heads, head_dim] -> the same shape."""
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
        # One query per sequence: the heads that share a key head become the query length.
        out = _attention_of(query[:, 0], keys, values, mask, scale, softcap)
        out = out.reshape(group.width, heads, values.shape[3])
    else:
        parts = [
            _attention_of(query[:, :, :, fold].transpose(1, 2), keys, values, mask, scale, softcap).transpose(1, 2)
            for fold in range(folds)
        ]
        out = torch.stack(parts, dim=3).view(group.width * group.count, heads, values.shape[3])
    return out if group.back is None else out[group.back]


def _attention_of(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float | None, softcap: float | None
) -> Tensor:
    if softcap is None:
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    scores = query @ keys.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = torch.tanh(scores / softcap) * softcap + mask
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype) @ values


def forward(model: torch.nn.Module, ids: list[int], metadata: SlotMetadata, ends: list[int]) -> Tensor:
    """Logits [ends, vocabulary] of a packed line of tokens, at the positions `ends` of the line."""
    keep = torch.tensor(ends, device=metadata.positions.device)
    out = model(
        input_ids=torch.tensor([ids], device=metadata.positions.device),
        position_ids=metadata.positions[None],
        use_cache=False,
        logits_to_keep=keep,
        agentfly_metadata=metadata,
    )
    logits: Tensor = out.logits[0]
    return logits if logits.shape[0] == len(ends) else logits[keep]
