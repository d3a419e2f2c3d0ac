"""Measurements that only a fault changes: how far weights moved, and how well tokens fit the learner's distributions.

They read a sample, so that all of them together take well under a hundredth of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...types import TokenFit

PICKED = 2048
"""Numbers that are read of each tensor of a model that must not change."""
STEPPED = 256
"""Numbers of each tensor whose optimizer step is computed again."""
ROUNDING = 3e-7
"""Relative difference of a weight that a few roundings to float32 make."""
TEMPERATURES = (0.6, 0.8, 0.9, 1.1, 1.3, 1.6)
MIN_PS, TOP_PS = (0.02, 0.05, 0.1), (0.8, 0.9, 0.95, 0.98)
RATIOS = [
    *(f"{each:g} times the temperature" for each in TEMPERATURES),
    *(f"min_p = {each:g}" for each in MIN_PS),
    *(f"top_p = {each:g}" for each in TOP_PS),
]
"""The samplers that a run's sampler is compared with."""
OFTEN = (0.1, 4.0)
"""And those that draw one id so many times as often."""
UNKNOWN = -1.0
"""In place of the uniform number of a token."""
STRAY = 5e-3
"""A token whose part of the cumulative distribution is further than this from its number was not drawn there. The limit of the
mean |sampled - recomputed log-prob| in float32 lies below it.
"""
LEAK = 0.02
"""Share of a truncating sampler's draws that are from the whole distribution: otherwise one token outside disproves it."""


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


def weight_sum(model: nn.Module) -> Tensor:
    """Returns the sum of some weights of a model, by which another model is told from it."""
    return torch.stack([part.double().sum().cpu() for part in pick(model.parameters())]).sum()


@dataclass(frozen=True, slots=True)
class ExpectedStep:
    """A sample of the weights before an optimizer step, and what the optimizer makes of it.

    `shares`: weights that each stands for; `checked`: 1 where `after` is known.
    """

    before: Tensor
    after: Tensor
    shares: Tensor
    checked: Tensor

    def compare(self, now: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns three squared norms: of the change of the weights, of its difference from that to `after`, and of the latter.

        A difference that may come from rounding to float32 is 0.
        """
        apart = self.checked * ((now - self.after).abs() - ROUNDING * self.before.abs()).clamp(min=0.0)
        planned = self.checked * (self.after - self.before)
        norms = [(self.shares * part**2).sum() for part in (now - self.before, apart, planned)]
        return norms[0], norms[1], norms[2]


def same(before: list[Tensor], after: list[Tensor]) -> bool:
    """Whether two picks hold equal numbers."""
    return all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@torch.no_grad()
def fit(logits: Tensor, targets: Tensor, numbers: Tensor) -> Tensor:
    """Returns sums over tokens: the log-likelihood ratios of `RATIOS`, a count, and for each of `OFTEN` the ratio of every id.

    Under softmax(logits) every ratio has the mean 1, so that a large product of many proves another sampler. The count is that
    of the tokens at which inverting the cumulative distribution at their `numbers`, from 0 to 1, does not arrive.
    """
    logs = torch.log_softmax(logits.float(), -1)
    probs, own = logs.exp(), logs.gather(1, targets[:, None])
    ratios = [own[:, 0] * (1.0 / each - 1.0) - torch.logsumexp(logs / each, -1) for each in TEMPERATURES]
    lowest = logs.max(-1, keepdim=True).values
    for share in MIN_PS:
        likely = logs >= lowest + math.log(share)
        ratios.append(_leaking(likely.gather(1, targets[:, None])[:, 0] / probs.masked_fill(~likely, 0.0).sum(-1)))
    above = probs.masked_fill(logs <= own, 0.0).sum(-1)
    equal = probs.masked_fill(logs != own, 0.0).sum(-1).clamp(min=1e-30)
    ratios += [_leaking(((share - above) / equal).clamp(0.0, 1.0) / share) for share in TOP_PS]
    lower = torch.arange(logits.shape[1], device=logits.device) < targets[:, None]
    begin = probs.masked_fill(~lower, 0.0).sum(-1)
    astray = (torch.maximum(begin - numbers, numbers - begin - own[:, 0].exp()) > STRAY) & (numbers != UNKNOWN)
    seen = torch.bincount(targets, minlength=logits.shape[1])
    of_ids = [math.log(often) * seen - torch.log1p((often - 1.0) * probs).sum(0) for often in OFTEN]
    return torch.cat([torch.stack(ratios).sum(1), astray.sum()[None], *of_ids])


def token_fit(logprobs: list[list[float]], found: Sequence[Tensor]) -> TokenFit:
    """Returns the sum of what `fit` found in some batches."""
    if not found:
        return TokenFit(logprobs, {}, {})
    whole = torch.stack(list(found)).double().sum(0).cpu()
    of_ids = dict(zip(OFTEN, whole[len(RATIOS) + 1 :].reshape(len(OFTEN), -1).numpy(), strict=True))
    return TokenFit(logprobs, dict(zip(RATIOS, whole.tolist(), strict=False)), of_ids, astray=int(whole[len(RATIOS)]))


def _leaking(ratio: Tensor) -> Tensor:
    """The logarithm of the likelihood ratio of a sampler that truncates all but a few of its draws."""
    return (LEAK + (1.0 - LEAK) * ratio).log()
