"""Attention of packed rows by `scaled_dot_product_attention`: rows of similar size are padded to one call.

    rows (queries x keys)    9x9  8x8 | 4x12  4x11  3x12 | 1x13
    calls                    2 x 9 x 9   3 x 4 x 12        1 x 1 x 13

`Take` copies tokens by their place in the line. Its backward pass adds up the gradients of tokens that several rows share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# A call may compute this many times the scores of its rows, plus a number that costs as much as another call.
MAX_WASTE, CALL_COST = 1.5, 3000
# Scores of one call, beyond which rows are computed alone: the mask has as many entries.
MAX_SCORES = 2**22


class Take:
    """Copies the rows `index` of a tensor with `count` rows. Those with `real` False are padding and get no gradient."""

    def __init__(
        self, index: NDArray[np.int64], count: int, device: torch.device, real: NDArray[np.bool_] | None = None
    ) -> None:
        self.index, self.count = torch.from_numpy(index).to(device), count
        self._places: Tensor | None = None
        self._sums: dict[torch.dtype, Tensor] = {}
        if device.type == "cpu":
            order = np.arange(len(index)) if real is None else np.flatnonzero(real)
            order = order[np.argsort(index[order], kind="stable")]
            self._places = torch.from_numpy(np.stack([index[order], order]))

    def __call__(self, tensor: Tensor) -> Tensor:
        function: Any = _Take
        taken: Tensor = function.apply(tensor, self)
        return taken

    def add_up(self, grad: Tensor) -> Tensor:
        """Returns the sum of the gradients of all copies, in float32: in half precision each addition would round it."""
        full = torch.promote_types(grad.dtype, torch.float32)
        if self._places is None:
            total = torch.zeros(self.count, *grad.shape[1:], dtype=full, device=grad.device)
            return total.index_add_(0, self.index, grad.to(full)).to(grad.dtype)
        if full not in self._sums:
            ones = torch.ones(self._places.shape[1], dtype=full)
            size = self.count, len(self.index)
            self._sums[full] = torch.sparse_coo_tensor(self._places, ones, size, check_invariants=False, is_coalesced=True)
        summed: Tensor = torch.sparse.mm(self._sums[full], grad.reshape(len(grad), -1).to(full))
        return summed.view(self.count, *grad.shape[1:]).to(grad.dtype)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, take: Take) -> Tensor:
        ctx.take = take
        return tensor.index_select(0, take.index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.take.add_up(grads[0]), None


class Buckets:
    """The calls that compute the attention of rows with these numbers of queries and keys.

    `keys` are the places of each row's keys in the line; the queries of all rows are the line itself, in order. The last query
    of a row is at the position of its last key. `window` is that of sliding attention.
    """

    def __init__(
        self, lengths: Sequence[int], keys: Sequence[NDArray[np.int64]], window: int | None, device: torch.device
    ) -> None:
        self.calls: list[tuple[tuple[int, int, int], Tensor | None]] = []
        firsts = np.cumsum([0, *lengths])
        count = int(firsts[-1])
        back = np.zeros(count, dtype=np.int64)
        taken: list[list[NDArray[Any]]] = [[], [], [], []]
        size = 0
        for rows in divide(lengths, [len(places) for places in keys]):
            queries, longest = max(lengths[row] for row in rows), max(len(keys[row]) for row in rows)
            own, whole = np.array([lengths[row] for row in rows]), np.array([len(keys[row]) for row in rows])
            from_line = np.zeros((len(rows), queries), dtype=np.int64)
            from_keys = np.zeros((len(rows), longest), dtype=np.int64)
            for i, row in enumerate(rows):
                from_line[i, : own[i]] = np.arange(firsts[row], firsts[row + 1])
                from_keys[i, : whole[i]] = keys[row]
                back[firsts[row] : firsts[row + 1]] = size + i * queries + np.arange(own[i])
            size += from_line.size
            real = np.arange(queries) < own[:, None], np.arange(longest) < whole[:, None]
            for part, found in zip(taken, (from_line, from_keys, *real), strict=True):
                part.append(found.ravel())
            self.calls.append(((len(rows), queries, longest), _mask(own, whole, queries, longest, window, device)))
        self.take_queries = Take(np.concatenate(taken[0]), count, device, np.concatenate(taken[2]))
        self.take_keys = Take(np.concatenate(taken[1]), count, device, np.concatenate(taken[3]))
        self.put_back = Take(back, size, device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Returns [tokens, heads, dim] for query [tokens, heads, dim], key and value [tokens, kv_heads, dim]."""
        gqa = query.shape[1] != key.shape[1]
        queries, keys, values = self.take_queries(query), self.take_keys(key), self.take_keys(value)
        own = [rows * length for (rows, length, _), _ in self.calls]
        whole = [rows * length for (rows, _, length), _ in self.calls]
        parts = torch.split(queries, own), torch.split(keys, whole), torch.split(values, whole)
        outs = []
        for (sizes, mask), q, k, v in zip(self.calls, *parts, strict=True):
            q, k, v = (part.view(sizes[0], -1, *part.shape[1:]).transpose(1, 2) for part in (q, k, v))
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=gqa)
            outs.append(out.transpose(1, 2).flatten(0, 1))
        return self.put_back(torch.cat(outs))


def divide(lengths: Sequence[int], key_lengths: Sequence[int]) -> list[list[int]]:
    """Returns rows that are computed in one call. Rows that share nothing need no mask and are not mixed with others."""
    sizes = [(whole != own, -own, -whole) for own, whole in zip(lengths, key_lengths, strict=True)]
    calls: list[list[int]] = []
    real = longest = 0
    for row in sorted(range(len(lengths)), key=lambda row: (sizes[row], row)):
        scores = lengths[row] * key_lengths[row]
        if calls and sizes[calls[-1][0]][0] == sizes[row][0]:
            first = calls[-1][0]
            computed = (len(calls[-1]) + 1) * lengths[first] * max(longest, key_lengths[row])
            if computed <= min(MAX_SCORES, MAX_WASTE * (real + scores) + CALL_COST):
                calls[-1].append(row)
                real, longest = real + scores, max(longest, key_lengths[row])
                continue
        calls.append([row])
        real, longest = scores, key_lengths[row]
    return calls


def _mask(
    own: NDArray[np.int64], whole: NDArray[np.int64], queries: int, longest: int, window: int | None, device: torch.device
) -> Tensor | None:
    """True where a query sees a key. None if `is_causal` says it: padding is on the right, where no query looks."""
    if window is not None and window >= longest:
        window = None
    if window is None and bool((own == whole).all()):
        return None
    at = (whole - own)[:, None] + np.arange(queries)
    distance = at[:, :, None] - np.arange(longest)
    seen = (distance >= 0) & (np.arange(longest) < whole[:, None])[:, None]
    if window is not None:
        seen &= distance < window
    seen[:, :, 0] |= np.arange(queries) >= own[:, None]  # padded queries see one key: seeing none gives NaN
    return torch.from_numpy(seen[:, None]).to(device)
