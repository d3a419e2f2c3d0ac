"""Rows to micro batches, up to a token budget: rows of similar length together, or rows that begin alike.

The division is deterministic. Every row is in exactly one batch and is never truncated; a row longer than the budget gets a
batch for itself.

    padded    rows of similar length, filled up to the longest
    packed    rows one after another in one line, see `packed`
    shared    packed, and the tokens that a row has in common with rows before it are computed once

`Rows` numbers the sampled tokens of all rows from 0, in order. Log-probs, advantages and values are flat tensors with an entry
per sampled token, and a micro batch selects its entries with `tokens`.

    row 0   P P A A R B      tokens 0 1 . 2  ->  A A . B
    row 1   P C C            tokens   3 4    ->  C C
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import InvariantError
from ..types import Sample
from .packed import PackedLayout

Shape = Literal["padded", "packed", "shared"]

# A batch is closed before more than this share of it is padding: another small batch costs less.
MAX_WASTE = 0.08
# What the copied key and value of a shared token cost in memory, in units of a token that is computed.
COPY_COST = 1 / 16
# Rows that begin alike are divided where they have least in common, if the batch is this full by then.
MIN_FULL = 0.75
# Attempts to make such batches of equal size, and the share of their tokens that may be computed again for it.
EVEN_TRIES, EVEN_COST = 5, 0.01
# Below this share of common tokens a line is packed without sharing: copying keys and values costs more.
WORTH_SHARING = 0.05


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The tensors of some rows.

    A padded batch has `input_ids` [rows, longest], padded on the right: causal attention never sees the padding and needs no
    mask. A packed one has [1, tokens] and a `layout`. `where` are the flat positions whose output predicts a sampled token
    (of several rows, if they share it), `targets` are those tokens, `tokens` their numbers in `Rows`. `prefix` is the length of
    the common prefix of padded rows, before any position that predicts a sampled token.
    """

    input_ids: Tensor
    where: Tensor
    targets: Tensor
    tokens: Tensor
    rows: tuple[int, ...]
    num_padding: int = 0
    prefix: int = 0
    layout: PackedLayout | None = None


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

    def micro_batches(self, rows: Sequence[int], max_tokens: int, shape: Shape = "padded") -> list[list[int]]:
        """Divide the given rows into micro batches."""
        if shape == "shared":
            order, common = self.in_order(rows)
            return [order[part] for part in shared_packs([self.lengths[row] for row in order], common, max_tokens)]
        divide = packs if shape == "packed" else micro_batches
        return [[rows[i] for i in batch] for batch in divide([self.lengths[row] for row in rows], max_tokens)]

    def batches(self, rows: Sequence[int], max_tokens: int, device: torch.device, shape: Shape) -> Iterator[MicroBatch]:
        """Yield the tensors of each micro batch of the given rows."""
        for members in self.micro_batches(rows, max_tokens, shape):
            yield self.batch(members, device, shape)

    def batch(self, rows: Sequence[int], device: torch.device, shape: Shape) -> MicroBatch:
        """Returns the tensors of one micro batch."""
        return self.tensors(rows, device) if shape == "padded" else self.packed(rows, device, share=shape == "shared")

    def packed(self, rows: Sequence[int], device: torch.device, *, share: bool = False) -> MicroBatch:
        """Returns the tensors of one packed micro batch. With `share`, common beginnings are computed once."""
        members = self._alphabetical(rows) if share else list(rows)
        common = [self._common(before, row) for before, row in pairwise(members)] if share else []
        if sum(common) <= WORTH_SHARING * sum(self.lengths[row] for row in rows):
            common = [0] * (len(members) - 1)
        line: list[NDArray[np.int64]] = []
        places: list[NDArray[np.int64]] = []
        size = 0
        for row, shared in zip(members, [0, *common], strict=True):
            own = self.lengths[row] - shared
            before = places[-1][:shared] if shared else np.zeros(0, dtype=np.int64)
            places.append(np.concatenate([before, np.arange(size, size + own)]))
            line.append(self.ids[row][shared:-1])
            size += own
        lengths = [len(part) for part in line]
        keys = [place for place, own in zip(places, lengths, strict=True) if own] if any(common) else None
        where = np.concatenate([place[self.positions[row] - 1] for place, row in zip(places, members, strict=True)])
        layout = PackedLayout([own for own in lengths if own], device, keys)
        return self._batch(members, np.concatenate(line)[None], where, device, layout=layout)

    def in_order(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns the rows in the order of their ids, and how many ids each has in common with the row before it."""
        order = self._alphabetical(rows)
        return order, [0, *(self._common(before, row) for before, row in pairwise(order))][: len(order)]

    def _alphabetical(self, rows: Sequence[int]) -> list[int]:
        """The rows in the order of their ids, so that each has most in common with the row before it."""
        return sorted(rows, key=lambda row: (self._texts[row], row))

    @cached_property
    def _texts(self) -> list[bytes]:
        return [ids[:-1].astype(">u4").tobytes() for ids in self.ids]  # compare as the ids do

    def _common(self, before: int, row: int) -> int:
        """The number of ids that two rows have in common from their start, without the last id of each."""
        length = min(self.lengths[before], self.lengths[row])
        differs = self.ids[before][:length] != self.ids[row][:length]
        return int(differs.argmax()) if differs.any() else length

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
        padding = input_ids.size - sum(self.lengths[row] for row in rows)
        return self._batch(rows, input_ids, where, device, prefix=prefix, num_padding=padding)

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
            rows=tuple(rows),
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


def shared_packs(lengths: Sequence[int], common: Sequence[int], max_tokens: int) -> list[slice]:
    """Divide rows in the order of their ids, of which each has `common` tokens in common with the row before it.

    The size of a batch counts each common token once, and a little for its copied key and value. Rows that have much in common
    stay together: a batch ends where its last quarter has least in common. As few batches as this allows are made, of about
    equal size if that divides nothing more.
    """
    batches = _fill(lengths, common, max_tokens)
    total = sum(lengths) - (1.0 - COPY_COST) * sum(common)
    most = _repeated(batches, common) + EVEN_COST * total
    low, high = total / max(1, len(batches)), float(max_tokens)
    for _ in range(EVEN_TRIES if len(batches) > 1 else 0):
        middle = (low + high) / 2.0
        tried = _fill(lengths, common, middle)
        if len(tried) <= len(batches) and _repeated(tried, common) <= most:
            batches, high = tried, middle
        else:
            low = middle
    return batches


def _repeated(batches: Sequence[slice], common: Sequence[int]) -> int:
    """The tokens that a batch computes although the batch before it does, too."""
    return sum(common[part.start] for part in batches)


def _fill(lengths: Sequence[int], common: Sequence[int], max_tokens: float) -> list[slice]:
    """Fill one batch after the other."""
    batches: list[slice] = []
    start, count = 0, len(lengths)
    while start < count:
        sizes = [float(lengths[start])]  # with 1, 2, 3 ... rows
        for row in range(start + 1, count):
            size = sizes[-1] + lengths[row] - (1.0 - COPY_COST) * common[row]
            if size > max_tokens:
                break
            sizes.append(size)
        end = start + len(sizes)
        if end < count:
            full = [row for row in range(start + 1, end + 1) if sizes[row - start - 1] >= MIN_FULL * max_tokens]
            end = min(full, key=lambda row: (common[row], -row), default=end)
        batches.append(slice(start, end))
        start = end
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
