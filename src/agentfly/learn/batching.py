"""Rows to micro batches: rows of similar length together, up to a token budget.

The division is deterministic. Every row is in exactly one batch and is never truncated; a row longer than the budget gets a
batch for itself.

`Rows` numbers the sampled tokens of all rows from 0, in order. Log-probs, advantages and values are flat tensors with an entry
per sampled token, and a micro batch selects its entries with `tokens`.

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

# A batch is closed before more than this share of it is padding: another small batch costs less.
MAX_WASTE = 0.08


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """`input_ids` [rows, longest] is padded on the right: causal attention never sees the padding and needs no mask.

    `where` are the flat positions whose output predicts a sampled token, `targets` are those tokens, `tokens` their numbers
    in `Rows`. `prefix` is the length of the rows' common prefix, before any position that predicts a sampled token.
    """

    input_ids: Tensor
    where: Tensor
    targets: Tensor
    tokens: Tensor
    prefix: int = 0
    lengths: tuple[int, ...] | None = None
    """Row lengths of a packed batch, whose rows are concatenated to [1, tokens] without padding; None for a padded one."""


class Rows:
    """Training rows as arrays, from which micro batches are made."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.ids = [np.asarray(sample.token_ids, dtype=np.int64) for sample in samples]
        self.positions = [np.flatnonzero(np.asarray(sample.mask)) for sample in samples]
        for sample, positions in zip(samples, self.positions, strict=True):
            if len(positions) == 0 or positions[0] == 0:
                raise InvariantError(f"a row of chain {sample.trajectory!r} has no sampled token after its first token")
        counts = [len(positions) for positions in self.positions]
        self.starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.num_tokens = int(self.starts[-1])
        # The last id of a row is a target only.
        self.lengths = [len(ids) - 1 for ids in self.ids]

    def __len__(self) -> int:
        return len(self.ids)

    def micro_batches(self, rows: Sequence[int], max_tokens: int, *, packed: bool = False) -> list[list[int]]:
        """Divide the given rows into micro batches."""
        divide = packs if packed else micro_batches
        return [[rows[i] for i in batch] for batch in divide([self.lengths[row] for row in rows], max_tokens)]

    def batches(self, rows: Sequence[int], max_tokens: int, device: torch.device, *, packed: bool) -> Iterator[MicroBatch]:
        """Yield the tensors of each micro batch of the given rows."""
        for members in self.micro_batches(rows, max_tokens, packed=packed):
            yield self.packed(members, device) if packed else self.tensors(members, device)

    def packed(self, rows: Sequence[int], device: torch.device) -> MicroBatch:
        """Returns the tensors of one packed micro batch."""
        lengths = [self.lengths[row] for row in rows]
        starts = np.cumsum([0, *lengths[:-1]])
        line = np.concatenate([self.ids[row][:-1] for row in rows])
        where = np.concatenate([start + self.positions[row] - 1 for start, row in zip(starts, rows, strict=True)])
        return self._batch(rows, line[None], where, device, lengths=tuple(lengths))

    def tensors(self, rows: Sequence[int], device: torch.device) -> MicroBatch:
        """Returns the tensors of one padded micro batch."""
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
    """Returns batches of row indices, longest first, with rows x longest <= max_tokens and little padding."""
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
    """Returns batches of row indices by first-fit decreasing: each row goes into the first batch with room for it."""
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


def passes(count: int, *, epochs: int, num_minibatches: int, seed: str) -> Iterator[list[int]]:
    """Yield the indices of each optimizer step: per epoch a new order of all `count`, divided into nearly equal shares."""
    shares = min(num_minibatches, count)
    for epoch in range(epochs):
        order = list(range(count))
        if shares > 1:
            random.Random(f"{seed}/{epoch}").shuffle(order)
        for share in range(shares):
            yield order[share * count // shares : (share + 1) * count // shares]
