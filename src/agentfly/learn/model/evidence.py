"""Measurements that only a fault changes: how far weights moved, and where in its distribution each token was drawn.

They read a sample, so that all of them together take well under a hundredth of a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

PICKED = 2048
"""Numbers that are read of each tensor of a model that must not change."""
STEPPED = 256
"""Numbers of each tensor whose optimizer step is computed again."""
ROUNDING = 3e-7
"""Relative difference of a weight that a few roundings to float32 make."""
POSITIONS = 512
"""Tokens of an update, at most, whose place in their distribution is computed."""
GOLDEN = 0.6180339887498949


def local_part(tensor: Tensor) -> Tensor:
    """Returns the part of a tensor that this rank holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def strided(tensor: Tensor, count: int) -> Tensor:
    """Returns a view of at least `count` evenly spaced numbers of a tensor or of its local part, or all if it has fewer."""
    flat = local_part(tensor).detach().reshape(-1)
    return flat[:: max(1, flat.numel() // count)]


def pick(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns a copy of some numbers of each tensor."""
    return [strided(tensor, PICKED).clone() for tensor in tensors]


@dataclass(frozen=True, slots=True)
class ExpectedStep:
    """A sample of the weights before an optimizer step, and what AdamW makes of it. `shares`: weights that each stands for."""

    before: Tensor
    after: Tensor
    shares: Tensor

    def compare(self, now: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns three squared norms: of the change of the weights, of its difference from AdamW's, of AdamW's change.

        A difference that may come from rounding to float32 is 0.
        """
        apart = ((now - self.after).abs() - ROUNDING * self.before.abs()).clamp(min=0.0)
        found = [(self.shares * part**2).sum() for part in (now - self.before, apart, self.after - self.before)]
        return found[0], found[1], found[2]


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
