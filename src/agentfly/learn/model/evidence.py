"""Measurements that only a fault changes: how far weights moved, and where in its distribution each token was drawn.

They read a sample, so that all of them together take well under a hundredth of a step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

PICKED = 2048
"""Numbers that are read of each tensor."""
POSITIONS = 512
"""Tokens of an update, at most, whose place in their distribution is computed."""
GOLDEN = 0.6180339887498949


def pick(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns a copy of evenly spaced numbers of each tensor; of a shard, of its local part."""
    found = []
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        flat = local.detach().reshape(-1)
        found.append(flat[:: max(1, len(flat) // PICKED)].clone())
    return found


def squared_distance(before: list[Tensor], after: list[Tensor], tensors: Iterable[Tensor]) -> Tensor:
    """Returns an estimate of the squared distance between tensors of which `before` and `after` were picked."""
    parts = []
    for old, new, tensor in zip(before, after, tensors, strict=True):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        parts.append((new.float() - old.float()).square().sum() * (local.numel() / max(1, len(old))))
    return torch.stack(parts).sum() if parts else torch.zeros(())


def same(before: list[Tensor], after: list[Tensor]) -> bool:
    """Whether two picks hold equal numbers."""
    return all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def to_place(tokens: Tensor, fresh: Tensor, count: int) -> Tensor:
    """Returns the places in `tokens` of those whose position is computed: some of the fresh ones of `count` tokens."""
    return torch.nonzero((tokens % max(1, -(-count // POSITIONS)) == 0) & fresh)[:, 0]


@torch.no_grad()
def positions(logits: Tensor, targets: Tensor, tokens: Tensor) -> Tensor:
    """Returns the position of each target in its distribution, from 0 (the most probable token) to 1 (the least).

    It is the probability of all more probable tokens, plus a fixed share of the target's own that depends on its number alone:
    uniform on [0, 1] if, and only if, the target was drawn from the whole distribution.
    """
    probs = torch.softmax(logits.float(), -1)
    own = probs.gather(1, targets[:, None])
    above = probs.masked_fill(probs <= own, 0.0).sum(-1)
    equal = probs.masked_fill(probs != own, 0.0).sum(-1)
    return above + equal * (tokens.double() * GOLDEN).frac().to(probs.dtype)
