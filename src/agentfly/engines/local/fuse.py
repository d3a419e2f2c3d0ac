"""Faster parts for a twin: its norms, its gated layers, its rotary positions, and products of one input made one.

In: a model, its twin, and the kernels (`fused`). Out: the twin with other `forward`s on some of its modules, and how many of
each kind. No class is touched, and of the learner's model nothing but where some weights lie: those that are multiplied with
the same input come to lie side by side (`merge_products`), the same parameters, names and values, updated in place as before. A
part is replaced only where a probe on the device has shown that it computes the same; every other part stays as it was. With
gradients on, or for shapes they are not made for, all replacements call what they replaced.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .parts import replace_parts
from .swap import put, restore

PRODUCTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_refused: weakref.WeakSet[Any] = weakref.WeakSet()


@torch.no_grad()
def fuse(model: Any, twin: Any, kernels: Any) -> dict[str, int]:
    """Replace what can be; how many parts of each kind. Nothing at all where a model has been refused (see `unfuse`)."""
    if model in _refused:
        return {}
    merged = merge_products(model, twin)
    return {"products": merged, **replace_parts(twin, kernels, slopes=False)}


def unfuse(model: Any, twin: Any) -> bool:
    """Take everything back, and do not try this model again. False: there was nothing."""
    _refused.add(model)
    found = restore(twin)
    for module in found:
        vars(module).pop("agentfly_product", None)
    return bool(found)


def merge_products(model: Any, twin: Any) -> int:
    """Let plain linear layers of one input be one product in the twin; how many such. May be called again for a model."""
    spans = _spans(model)
    count = 0
    for module in list(twin.modules()):
        for names in PRODUCTS:
            layers: list[Any] = [getattr(module, name, None) for name in names]
            if not _mergeable(layers):
                continue
            weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
            groups = [weights] if biases[0] is None else [weights, biases]
            if any(_overlaps(tensor, spans) for group in groups for tensor in group):
                continue
            product = Product(groups)
            for number, layer in enumerate(layers):
                layer.agentfly_product = product
                put(layer, _PARTS[number])
            count += 1
    return count


class Product:
    """Several linear layers of one input as one: the first computes all, the others take their part of it."""

    def __init__(self, groups: Sequence[Sequence[Tensor]]) -> None:
        self.groups = groups
        self.joined = [_join(group) for group in groups]
        self.sizes = [tensor.shape[0] for tensor in groups[0]]
        self.kept: tuple[Tensor, int, Sequence[Tensor]] | None = None

    def whole(self) -> bool:
        """Whether every part still is where it was put: the joined weights are then those of the parts."""
        for group, joined in zip(self.groups, self.joined, strict=True):
            at = joined.data_ptr()
            for tensor in group:
                if tensor.data_ptr() != at or tensor.dtype != joined.dtype:
                    return False
                at += tensor.numel() * tensor.element_size()
        return True

    def take(self, number: int, x: Tensor) -> Tensor:
        """Part `number` of the product with x."""
        if torch.is_grad_enabled():
            return self._alone(number, x)
        version = -1 if x.is_inference() else x._version
        if number == 0:
            self.kept = None
            if not self.whole():
                return self._alone(number, x)
            out = nn.functional.linear(x, *self.joined)
            self.kept = (x, version, torch.split(out, self.sizes, dim=-1))
        kept = self.kept
        if kept is None or kept[0] is not x or kept[1] != version:
            return self._alone(number, x)
        if number == len(self.sizes) - 1:
            self.kept = None
        return kept[2][number]

    def _alone(self, number: int, x: Tensor) -> Tensor:
        return nn.functional.linear(x, *(group[number] for group in self.groups))


def _part(number: int) -> Callable[[Any, Tensor], Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        out: Tensor = self.agentfly_product.take(number, x)
        return out

    return forward


_PARTS = tuple(_part(number) for number in range(3))


def _mergeable(layers: Sequence[Any]) -> bool:
    """Plain linear layers with plain weights and nothing around them: no adapters, no short numbers, no hooks."""
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


def _spans(model: Any) -> list[tuple[int, int, int]]:
    """Where each tensor of the model lies: (begin, end, who)."""
    tensors = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    return [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), id(t)) for t in tensors.values() if not t.is_meta]


def _overlaps(tensor: Tensor, spans: Sequence[tuple[int, int, int]]) -> bool:
    """Whether another tensor of the model is in the same memory: if this one moved, they would part."""
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
    return any(begin < other_end and other < end and who != id(tensor) for other, other_end, who in spans)


@torch.no_grad()
def _join(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor over all of these, which lie side by side in it from now on (or did already)."""
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
