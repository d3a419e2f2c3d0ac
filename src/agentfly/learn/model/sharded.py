"""Tensors over ranks: which rows a rank holds, how it gets those of a saved tensor, and how all make it whole again.

Each function also takes a plain tensor, of which one rank holds everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from .shard_files import Shard


def layers_of(root: nn.Module) -> list[nn.Module]:
    """Returns the transformer layers: members of a list that transformers does not divide over devices either."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    names = {name for module in root.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    lists = [module for module in root.modules() if isinstance(module, nn.ModuleList)]
    members = [layer for layers in lists for layer in layers]
    return [  # FSDP puts a class before that of a layer
        layer
        for layer in members
        if isinstance(layer, GradientCheckpointingLayer) or not names.isdisjoint(each.__name__ for each in type(layer).__mro__)
    ]


def first_row(tensor: Any) -> int:
    """Returns the first row of the whole tensor that this rank holds. FSDP divides rows as `torch.chunk` does."""
    if not hasattr(tensor, "to_local"):
        return 0
    mesh, rows = tensor.device_mesh, tensor.shape[0]
    return int(min(rows, mesh.get_local_rank() * -(-rows // mesh.size())))


def shard_of(tensor: Any) -> Shard:
    """Returns a copy of the rows that this rank holds, in the CPU's memory."""
    return Shard(tensor.detach().to_local().to("cpu", copy=True), first_row(tensor), tuple(tensor.shape))


Read = Callable[[int, int], Tensor]
"""Returns rows of a whole tensor."""


@torch.no_grad()
def assign(target: Any, read: Read) -> None:
    """Copy the rows of a whole tensor that belong to this rank into a parameter or buffer."""
    if not hasattr(target, "to_local"):
        target.copy_(read(0, target.shape[0] if target.dim() else 1).reshape(target.shape))
        return
    local, first = target.to_local(), first_row(target)
    if len(local):
        local.copy_(read(first, first + len(local)))


def rows_of(saved: Any) -> Read:
    """Returns a function that gives rows of a saved tensor, which is there or is read when it is needed."""
    if isinstance(saved, Tensor):
        return lambda first, last: saved[first:last] if saved.dim() else saved.reshape(1)
    read: Read = saved
    return read


def shard_like(target: object, saved: object) -> Any:
    """Returns what belongs to this rank of a saved tensor, sharded as `target` is; the tensor itself if that is not sharded."""
    if not hasattr(target, "to_local"):
        return saved
    local, first = target.to_local(), first_row(target)
    return like_shard(target, rows_of(saved)(first, first + len(local)).to(local.device, copy=True))


def like_shard(target: Any, rows: Tensor) -> Tensor:
    """Returns the tensor of which every rank holds such rows, as many as of `target`; `rows` if that is not sharded."""
    if not hasattr(target, "to_local"):
        return rows
    from torch.distributed.tensor import DTensor

    shape = torch.Size((target.shape[0], *rows.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    made: Tensor = DTensor.from_local(rows, target.device_mesh, target.placements, run_check=False, shape=shape, stride=stride)
    return made


def whole(tensor: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Returns the full tensor: a collective for a sharded one. `dtype` converts the shards, before they are gathered."""
    tensor = tensor.detach()
    tensor = tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
    if not hasattr(tensor, "to_local"):
        plain: Tensor = tensor
        return plain
    # Not `full_tensor`: its functional collective crashes the process with gloo on a GPU (torch 2.11).
    local, rows, ranks = tensor.to_local(), tensor.shape[0], tensor.device_mesh.size()
    each = -(-rows // ranks)
    if len(local) < each:
        local = torch.cat([local, local.new_zeros(each - len(local), *local.shape[1:])])
    full: Tensor = local.new_empty(each * ranks, *local.shape[1:])
    torch.distributed.all_gather_into_tensor(full, local.contiguous(), tensor.device_mesh.get_group())
    return full[:rows]
