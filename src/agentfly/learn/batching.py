"""Rows become micro batches: rows of like length together, up to a budget of tokens.

In: training rows. Out: index lists, and the tensors of one micro batch. The same rows always give the same batches. Every
row is in exactly one; a row longer than the budget is alone in its own. Nothing is cut off.

`Rows` numbers every sampled token of all rows from 0 on, in order, so that whatever is known per sampled token (log-probs,
advantages, values) is one flat tensor, and a micro batch picks its part of it with `tokens`.

    row 0   P P A A R B      tokens 0 1 . 2  ->  A A . B
    row 1   P C C            tokens   3 4    ->  C C
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import InvariantError
from ..types import Sample

# A batch is closed early when more than this share of it would be padding: one more small batch costs less than padding.
MAX_WASTE = 0.08


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """`input_ids` [rows, longest] is padded on the right, so that causal attention never sees the padding and needs no mask.

    `where` are the flat positions whose output predicts a sampled token, `targets` that token, `tokens` its number in `Rows`.
    `prefix` is how many ids all rows begin with alike, before anything that predicts a sampled token.
    """

    input_ids: Tensor
    where: Tensor
    targets: Tensor
    tokens: Tensor
    prefix: int = 0
    lengths: tuple[int, ...] | None = None
    """Of a packed batch: all rows stand in one line [1, tokens], one behind the other, and there is no padding."""


class Rows:
    """Training rows, laid out so that micro batches are quick to make."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.ids = [np.asarray(sample.token_ids, dtype=np.int64) for sample in samples]
        self.positions = [np.flatnonzero(np.asarray(sample.mask)) for sample in samples]
        for sample, positions in zip(samples, self.positions, strict=True):
            if len(positions) == 0 or positions[0] == 0:
                raise InvariantError(f"a row of chain {sample.trajectory!r} has no sampled token after its first token")
        counts = [len(positions) for positions in self.positions]
        self.starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.num_tokens = int(self.starts[-1])
        # The last id of a row is only ever a target.
        self.lengths = [len(ids) - 1 for ids in self.ids]

    def __len__(self) -> int:
        return len(self.ids)

    def micro_batches(self, rows: Sequence[int], max_tokens: int, *, packed: bool = False) -> list[list[int]]:
        """The given rows in micro batches."""
        divide = packs if packed else micro_batches
        return [[rows[i] for i in batch] for batch in divide([self.lengths[row] for row in rows], max_tokens)]

    def batches(self, rows: Sequence[int], max_tokens: int, device: torch.device, *, packed: bool) -> Iterator[MicroBatch]:
        """The given rows as the tensors of one micro batch after the other."""
        for members in self.micro_batches(rows, max_tokens, packed=packed):
            yield self.packed(members, device) if packed else self.tensors(members, device)

    def packed(self, rows: Sequence[int], device: torch.device) -> MicroBatch:
        """The tensors of one packed micro batch."""
        lengths = [self.lengths[row] for row in rows]
        starts = np.cumsum([0, *lengths[:-1]])
        line = np.concatenate([self.ids[row][:-1] for row in rows])
        where = np.concatenate([start + self.positions[row] - 1 for start, row in zip(starts, rows, strict=True)])
        return self._batch(rows, line[None], where, device, lengths=tuple(lengths))

    def tensors(self, rows: Sequence[int], device: torch.device) -> MicroBatch:
        width = max(self.lengths[row] for row in rows)
        input_ids = np.zeros((len(rows), width), dtype=np.int64)
        for i, row in enumerate(rows):
            input_ids[i, : self.lengths[row]] = self.ids[row][:-1]
        where = np.concatenate([i * width + self.positions[row] - 1 for i, row in enumerate(rows)])
        first = min(int(self.positions[row][0]) - 1 for row in rows)
        alike = (input_ids[:, :first] == input_ids[0, :first]).all(axis=0)
        prefix = first if alike.all() else int(alike.argmin())
        return self._batch(rows, input_ids, where, device, prefix=prefix)

    def _batch(
        self, rows: Sequence[int], input_ids: NDArray[Any], where: NDArray[Any], device: torch.device, **more: Any
    ) -> MicroBatch:
        targets = np.concatenate([self.ids[row][self.positions[row]] for row in rows])
        tokens = np.concatenate([np.arange(self.starts[row], self.starts[row + 1]) for row in rows])
        return MicroBatch(
            input_ids=torch.from_numpy(input_ids).to(device),
            where=torch.from_numpy(where).to(device),
            targets=torch.from_numpy(targets).to(device),
            tokens=torch.from_numpy(tokens).to(device),
            **more,
        )


def micro_batches(lengths: Sequence[int], max_tokens: int, *, max_waste: float = MAX_WASTE) -> list[list[int]]:
    """Indices of rows, longest first; a batch holds rows x longest <= max_tokens tokens and little padding."""
    batches: list[list[int]] = []
    real = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches:
            size = (len(batches[-1]) + 1) * lengths[batches[-1][0]]
            if size <= max_tokens and real + lengths[index] >= (1.0 - max_waste) * size:
                batches[-1].append(index)
                real += lengths[index]
                continue
        batches.append([index])
        real = lengths[index]
    return batches


def packs(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of rows, longest first, each into the first batch that still has room for it."""
    batches: list[list[int]] = []
    left: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        room = next((number for number, free in enumerate(left) if free >= lengths[index]), None)
        if room is None:
            batches.append([index])
            left.append(max_tokens - lengths[index])
        else:
            batches[room].append(index)
            left[room] -= lengths[index]
    return batches


def padding_waste(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> float:
    """The share of padding among all tokens of the batches."""
    size = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)
    return 1.0 - sum(lengths[i] for batch in batches for i in batch) / size if size else 0.0


def passes(count: int, *, epochs: int, minibatches: int, seed: str) -> Iterator[list[int]]:
    """The indices of each optimizer step: each of `count` once per epoch, in an order of its own, in near equal shares."""
    shares = min(minibatches, count)
    for epoch in range(epochs):
        order = list(range(count))
        if shares > 1:
            random.Random(f"{seed}/{epoch}").shuffle(order)
        for share in range(shares):
            yield order[share * count // shares : (share + 1) * count // shares]
