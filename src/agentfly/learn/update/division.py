"""Rows over ranks: equal cost on every rank, and the same number of micro batches.

    cost of a row      tokens + tokens^2 / (12 x width): the linear layers, and attention on top of them
    padded, packed     longest first, each row to the rank with the least cost so far
    shared             rows in the order of their ids, cut into stretches of equal cost: rows that begin alike stay together

FSDP's collectives run in every forward pass, so a rank with fewer micro batches runs padding ones without any trained token.
Every rank computes the division of all ranks; nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch

from ..batching import WORTH_SHARING, MicroBatch, Rows, Shape
from ..group import LearnerGroup
from ..packed import PackedLayout


def balance(costs: Sequence[float], size: int) -> list[list[int]]:
    """Returns `size` lists of indices with nearly equal sums of costs."""
    shares: list[list[int]] = [[] for _ in range(size)]
    loads = [0.0] * size
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        least = min(range(size), key=lambda rank: (loads[rank], rank))
        shares[least].append(index)
        loads[least] += costs[index]
    return shares


def cut(costs: Sequence[float], size: int) -> list[range]:
    """Returns `size` adjacent ranges of indices with nearly equal sums of costs."""
    ends = np.cumsum([0.0, *costs])
    # The cost up to the middle of each item decides its range.
    middles = (ends[:-1] + ends[1:]) / 2.0
    edges = np.searchsorted(middles, np.arange(1, size) * ends[-1] / size).tolist()
    return [range(a, b) for a, b in pairwise([0, *edges, len(costs)])]


def share_rows(table: Rows, rows: Sequence[int], shape: Shape, size: int, width: int) -> list[list[int]]:
    """Returns the rows of each rank."""
    if size == 1:
        return [list(rows)]
    if shape == "shared":
        order, common = table.in_order(rows)
        if sum(common) > WORTH_SHARING * sum(table.lengths[row] for row in rows):
            costs = [_cost(table.lengths[row] - own, table.lengths[row], width) for row, own in zip(order, common, strict=True)]
            return [[order[i] for i in part] for part in cut(costs, size)]
    costs = [_cost(table.lengths[row], table.lengths[row], width) for row in rows]
    return [[rows[i] for i in sorted(part)] for part in balance(costs, size)]


def _cost(queries: int, keys: int, width: int) -> float:
    return queries * (1.0 + keys / (12.0 * width))


def rank_batches(
    table: Rows, rows: Sequence[int], max_tokens: int, device: torch.device, shape: Shape, group: LearnerGroup, width: int
) -> Iterator[MicroBatch]:
    """Yield the micro batches of this rank; the last ones are padding if another rank has more."""
    divided = [table.micro_batches(share, max_tokens, shape) for share in share_rows(table, rows, shape, group.size, width)]
    own = divided[group.rank]
    for members in own:
        yield table.batch(members, device, shape)
    for _ in range(max(map(len, divided)) - len(own)):
        yield padding(table, rows[0], device, shape)


def padding(table: Rows, row: int, device: torch.device, shape: Shape) -> MicroBatch:
    """Returns a micro batch of two tokens that predicts nothing."""
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    ids = torch.from_numpy(table.ids[row][:2].copy())[None].to(device)
    layout = None if shape == "padded" else PackedLayout((2,), device)
    return MicroBatch(input_ids=ids, where=nothing, targets=nothing, tokens=nothing, rows=(), num_padding=2, layout=layout)
