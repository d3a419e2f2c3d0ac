"""Merges linear layers that read the same input (q, k, v; gate, up) into one matrix product.

The weights of one group are moved next to each other in memory, in the model itself: the parameters keep their names, values
and identity, and an optimizer updates them in place as before. In the replica the first layer of a group computes the whole
product and the others return their part of it.

    model      q.weight | k.weight | v.weight      three parameters, views of one storage
    replica    linear(x, all rows) -> q, k, v      one product; with gradients, or after weights moved: three products
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .replace import set_forward

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def merge_linears(model: Any, replica: Any) -> int:
    """Merge what can be merged. Returns the number of groups. May be called again for a model that was merged before."""
    spans = _spans(model)
    count = 0
    for module in list(replica.modules()):
        for names in GROUPS:
            layers: list[Any] = [getattr(module, name, None) for name in names]
            if not _mergeable(layers):
                continue
            weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
            groups = [weights] if biases[0] is None else [weights, biases]
            if any(_overlaps(tensor, spans) for group in groups for tensor in group):
                continue
            merged = MergedLinear(groups)
            for number, layer in enumerate(layers):
                layer.agentfly_merged = merged
                set_forward(layer, _FORWARDS[number])
            count += 1
    return count


class MergedLinear:
    """Several linear layers of one input. Part 0 computes the product of all; the following parts take their share of it."""

    def __init__(self, groups: Sequence[Sequence[Tensor]]) -> None:
        self.groups = groups
        self.joined = [_join(group) for group in groups]
        self.sizes = [tensor.shape[0] for tensor in groups[0]]
        self.kept: tuple[Tensor, int, Sequence[Tensor]] | None = None

    def is_intact(self) -> bool:
        """Whether every parameter still lies where it was put, so that `joined` holds the current weights.

        Loading or moving a model (`parameter.data = ...`) breaks this; each part is then computed on its own.
        """
        for group, joined in zip(self.groups, self.joined, strict=True):
            at = joined.data_ptr()
            for tensor in group:
                if tensor.data_ptr() != at or tensor.dtype != joined.dtype:
                    return False
                at += tensor.numel() * tensor.element_size()
        return True

    def part(self, number: int, x: Tensor) -> Tensor:
        """Output `number` for the input x."""
        if torch.is_grad_enabled():
            return self._single(number, x)
        version = -1 if x.is_inference() else x._version
        if number == 0:
            self.kept = None
            if not self.is_intact():
                return self._single(number, x)
            out = nn.functional.linear(x, *self.joined)
            self.kept = (x, version, torch.split(out, self.sizes, dim=-1))
        cached = self.kept
        # Another tensor, or the same one modified in place since part 0 read it: the kept product is not its product.
        if cached is None or cached[0] is not x or cached[1] != version:
            return self._single(number, x)
        if number == len(self.sizes) - 1:
            self.kept = None
        return cached[2][number]

    def _single(self, number: int, x: Tensor) -> Tensor:
        return nn.functional.linear(x, *(group[number] for group in self.groups))


def _forward_of(number: int) -> Callable[[Any, Tensor], Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        out: Tensor = self.agentfly_merged.part(number, x)
        return out

    return forward


_FORWARDS = tuple(_forward_of(number) for number in range(3))


def _mergeable(layers: Sequence[Any]) -> bool:
    """Whether all are plain nn.Linear with plain weights: no adapters, no quantised weights, no hooks."""
    for layer in layers:
        if type(layer) is not nn.Linear or "forward" in vars(layer) or hasattr(layer, "_hf_hook"):
            return False
        if layer._forward_hooks or layer._forward_pre_hooks or layer.weight.is_meta:
            return False
        for tensor in (layer.weight, layer.bias):
            if tensor is not None and (type(tensor) is not nn.Parameter or type(tensor.data) is not Tensor):
                return False
            if tensor is not None and not tensor.is_contiguous():
                return False
    first = layers[0]
    kinds = {(layer.in_features, layer.bias is None, layer.weight.dtype, layer.weight.device) for layer in layers}
    kinds |= {(first.in_features, False, layer.bias.dtype, layer.bias.device) for layer in layers if layer.bias is not None}
    return len(kinds) == 1 and len({id(layer.weight) for layer in layers}) == len(layers)


def _spans(model: torch.nn.Module) -> list[tuple[int, int, int]]:
    """The memory of each tensor of the model: (begin, end, id)."""
    tensors = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    return [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), id(t)) for t in tensors.values() if not t.is_meta]


def _overlaps(tensor: Tensor, spans: Sequence[tuple[int, int, int]]) -> bool:
    """Whether another tensor of the model lies in the same memory (tied weights): moving this one would untie them."""
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
    return any(begin < other_end and other < end and owner != id(tensor) for other, other_end, owner in spans)


@torch.no_grad()
def _join(tensors: Sequence[Tensor]) -> Tensor:
    """Return one tensor over all of these. Unless they are adjacent already, they become views of a new storage."""
    first = tensors[0]
    at = first.storage_offset()
    for tensor in tensors:
        if tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or tensor.storage_offset() != at:
            break
        at += tensor.numel()
    else:
        return first.data.as_strided((sum(len(tensor) for tensor in tensors), *first.shape[1:]), first.stride())
    joined = torch.cat([tensor.data for tensor in tensors])
    for tensor, part in zip(tensors, torch.split(joined, [len(tensor) for tensor in tensors]), strict=True):
        tensor.data = part
    return joined
