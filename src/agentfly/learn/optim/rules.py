"""The optimizers by name (`train.optimizer`): AdamW with shorter moments, and Muon.

Both work on the rows that a rank holds, in pieces, so that little memory is used beside the moments. Their state per parameter
is that of AdamW: `step`, `exp_avg` and, except for Muon's matrices, `exp_avg_sq`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..model.evidence import local_part
from ..model.sharded import first_row, like_shard, whole
from . import moments

PIECE = 2**24
"""Numbers whose moments exist in float32 at the same time."""
EPS = 1e-8
MOMENTUM = 0.95
"""Of Muon's matrices, with Nesterov's look ahead."""
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5

Groups = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class NamedOptimizer:
    """An optimizer whose steps are computed again: `make` builds it from parameter groups and the betas.

    `keeps`: whether the averages that were stored are those that were computed, without rounding.
    """

    make: Callable[[Groups, tuple[float, float]], torch.optim.Optimizer]
    orthogonal: bool = False
    keeps: bool = True


class CompactAdamW(torch.optim.Optimizer):
    """AdamW whose moments are stored in `kind` ("bf16", "8bit"; None: float32). A step is computed before they are rounded.

    A group with `orthogonal` is stepped by Muon.
    """

    def __init__(self, groups: Groups, betas: tuple[float, float], kind: str | None = None) -> None:
        self.kind = kind
        super().__init__(groups, {"lr": 1e-3, "betas": betas, "weight_decay": 0.0, "orthogonal": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient."""
        number = 0
        for group in self.param_groups:
            for weight in group["params"]:
                number += 1
                if weight.grad is None:
                    continue
                state = self.state[weight] or self._begin(weight, group)
                state["step"] += 1
                if group["orthogonal"]:
                    _muon(weight, state["exp_avg"], group)
                else:
                    _adamw(weight, state, group, number)

    def _begin(self, weight: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[weight]
        state["step"] = torch.tensor(0.0)
        for name in ("exp_avg",) if group["orthogonal"] else ("exp_avg", "exp_avg_sq"):
            for part, rows in moments.make(local_part(weight), self.kind).items():
                state[name + part] = like_shard(weight, rows)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state. torch's own method would turn short moments into float32."""
        weights = [weight for group in self.param_groups for weight in group["params"]]
        self.state.clear()
        for number, values in state_dict["state"].items():
            place = weights[number].device
            self.state[weights[number]] = {
                name: value.clone() if name == "step" else value.to(place, copy=True) for name, value in values.items()
            }


def _adamw(weight: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any], number: int) -> None:
    assert weight.grad is not None
    local, grad = (local_part(each) for each in (weight, weight.grad))
    flat, slope = moments.flat(local), moments.flat(grad.contiguous())
    held = {name: local_part(tensor) for name, tensor in state.items()}
    (beta1, beta2), count, first = group["betas"], int(state["step"]), first_row(weight)
    bias1, bias2 = 1.0 - beta1**count, 1.0 - beta2**count
    length = max(1, PIECE // max(1, flat.shape[1]))
    for start in range(0, len(flat), length):
        rows = slice(start, start + length)
        mean = moments.read(held, "exp_avg", rows, signed=True).lerp(slope[rows], 1.0 - beta1)
        square = (
            moments.read(held, "exp_avg_sq", rows, signed=False).mul(beta2).addcmul(slope[rows], slope[rows], value=1.0 - beta2)
        )
        flat[rows].mul_(1.0 - group["lr"] * group["weight_decay"])
        flat[rows].addcdiv_(mean, (square / bias2).sqrt_().add_(EPS), value=-group["lr"] / bias1)
        place, seed = (first + start) * flat.shape[1], 2 * (8191 * count + number)
        moments.write(held, "exp_avg", rows, mean, True, seed, place)
        moments.write(held, "exp_avg_sq", rows, square, False, seed + 1, place)


def _muon(weight: Tensor, momentum: Tensor, group: Mapping[str, Any]) -> None:
    assert weight.grad is not None
    local_part(momentum).lerp_(local_part(weight.grad), 1.0 - MOMENTUM)
    ahead = local_part(weight.grad).lerp(local_part(momentum), MOMENTUM)
    change, local, first = muon_change(whole(like_shard(weight, ahead))), local_part(weight), first_row(weight)
    local.mul_(1.0 - group["lr"] * group["weight_decay"])
    local.add_(change[first : first + len(local)], alpha=-group["lr"])


def muon_change(matrix: Tensor) -> Tensor:
    """Returns the nearest orthogonal matrix, about, with the root mean square of AdamW's steps (arXiv:2502.16982).

    The quintic Newton-Schulz iteration of K. Jordan's Muon brings all singular values near 1. Of a tensor with more dimensions,
    such as stacked experts, each matrix is taken by itself. It is computed in the format of `matrix`: in float32 a step can be
    computed again and compared.
    """
    rows, columns = matrix.shape[-2:]
    made: Tensor = matrix.mT if rows > columns else matrix
    made = made / (torch.linalg.matrix_norm(made, keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(ITERATIONS):
        square = made @ made.mT
        made = a * made + (b * square + c * square @ square) @ made
    made = made.mT if rows > columns else made
    return made * float(0.2 * max(rows, columns) ** 0.5)


def _torch_adamw(groups: Groups, betas: tuple[float, float]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, betas=betas, fused=True)


ADAMW = NamedOptimizer(_torch_adamw)
ADAMW_BF16 = NamedOptimizer(partial(CompactAdamW, kind="bf16"), keeps=False)
ADAMW_8BIT = NamedOptimizer(partial(CompactAdamW, kind="8bit"), keeps=False)
MUON = NamedOptimizer(CompactAdamW, orthogonal=True, keeps=False)

Make = Callable[[Sequence[dict[str, Any]]], torch.optim.Optimizer]
"""An optimizer of a user: parameter groups with `params`, `lr` and `weight_decay` in, an optimizer out."""
