"""The keys and values of every chain, in slots: per layer two tensors [slots, kv_heads, length, head_dim].

In: keys and values as attention computes them, written at (slot, position). Out: views of whole slots, which attention reads
without a copy. Grows and shrinks in both directions when told to; how much may be held, and whose slot is whose, is decided
elsewhere (`slots.py`). A layer's tensors are made when that layer first writes, so no model's shapes need to be known here.
Refuses nothing: whoever holds a slot is trusted to write inside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class SlotCache:
    """Keys and values by layer. `num_slots` and `length` are what is allocated now."""

    def __init__(self, num_slots: int, length: int) -> None:
        self.num_slots = num_slots
        self.length = length
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The two tensors of a layer; `key` and `value` are [tokens, kv_heads, head_dim] and give its shape."""
        found = self.layers.get(index)
        if found is None:
            # Zeros, because masked positions are multiplied by 0 and what is there must be finite.
            found = self.layers[index] = (
                key.new_zeros(self.num_slots, key.shape[1], self.length, key.shape[2]),
                value.new_zeros(self.num_slots, value.shape[1], self.length, value.shape[2]),
            )
        return found

    def copy(self, source: int, targets: Sequence[int], count: int) -> None:
        """The first `count` positions of one slot, into others: the prompt that siblings share."""
        for tensors in self.layers.values():
            for tensor in tensors:
                head = tensor[source, :, :count]
                for target in targets:
                    tensor[target, :, :count] = head

    def reshape(self, num_slots: int, length: int, moves: Sequence[tuple[int, int, int]]) -> None:
        """Allocate anew; each (old slot, new slot, count) of `moves` is kept. One layer at a time, so the peak stays low."""
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
