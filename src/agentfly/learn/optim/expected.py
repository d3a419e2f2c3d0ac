"""Optimizer steps computed again on a sample of the weights, from the settings of the run.

Of AdamW with float32 moments only gradients are taken from the optimizer: the averages of the sample are kept here in float64.
Short moments are read from the optimizer before each step, because a step begins with what they were rounded to. They must be
the ones that it stored in the step before, and after a step within rounding of those computed here. Of Muon's matrices one is
computed again in each step, in turn, because each number of a step depends on the whole matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...errors import InvariantError
from ..model.evidence import STEPPED, ExpectedStep, local_part, same, strided
from ..model.sharded import first_row, like_shard, whole
from ..settings import OptimSettings
from . import moments
from .rules import EPS, MOMENTUM, NamedOptimizer, muon_change

SUMMED = 1e-5
"""Relative rounding of a sum in float32, as a share of its largest term."""


class StepCheck:
    """Computes the steps of one optimizer again. `rule` None: of a user's own, whose steps are not known."""

    def __init__(
        self, masters: Sequence[Tensor], lrs: Sequence[float], orthogonal: Sequence[bool], settings: OptimSettings,
        optimizer: torch.optim.Optimizer, rule: NamedOptimizer | None,
    ) -> None:  # fmt: skip
        self._masters, self._lrs, self._orthogonal = masters, lrs, orthogonal
        self._settings, self._optimizer, self._rule = settings, optimizer, rule
        self._matrices = [number for number, muon in enumerate(orthogonal) if muon]
        self._steps = 0
        self._raw: tuple[Tensor, Tensor | None] | None = None  # a sample of the gradient before clipping, and of one matrix all
        self._norm: Tensor | None = None
        self.forget()

    @property
    def knows(self) -> bool:
        """Whether the steps can be computed again."""
        return self._rule is not None

    def forget(self) -> None:
        """The optimizer has loaded another state."""
        self._averages: tuple[Tensor, Tensor, Tensor] | None = None  # those of `expected`; None: not known
        self._widths: tuple[Tensor, Tensor] | None = None  # the size of the numbers that they are sums of
        self._stored: list[Tensor] = []

    def note(self) -> None:
        """Note the gradient before it is clipped."""
        chosen = self._chosen
        whole_one = None if chosen is None else self._masters[chosen].grad
        self._raw = (
            self._sample([master.grad for master in self._masters]),
            None if whole_one is None else local_part(whole_one).clone(),
        )

    def clipped(self, norm: Tensor) -> None:
        """Note the norm that the gradient had before it was clipped."""
        self._norm = norm

    @property
    def _chosen(self) -> int | None:
        """The matrix of Muon's that is computed again in this step."""
        return self._matrices[self._steps % len(self._matrices)] if self._matrices else None

    @torch.no_grad()
    def expected(self, factor: float) -> ExpectedStep:
        """Returns what the next step must make of a sample of the weights. `factor` is that of the schedule."""
        assert self._raw is not None
        assert self._norm is not None
        before, shares = self.weights(), self._spread(self._shares)
        if self._rule is None:
            return ExpectedStep(before, before, shares, torch.zeros_like(shares))
        held = self._samples_of_state() if self._stored else []
        if len(held) != len(self._stored) or not same(self._stored, held):
            raise InvariantError("the optimizer's moments have changed between two of its steps")
        scale = (self._settings.max_grad_norm / (self._norm.double() + 1e-6)).clamp(max=1.0)
        moves = self._spread([float(master.grad is not None) for master in self._masters])
        made, decay = self._adamw(self._raw[0] * scale, moves), self._settings.weight_decay
        change = made + before * self._spread([decay * (master.dim() >= 2) for master in self._masters])
        after = before - torch.where(moves > 0, factor * self._spread(self._lrs) * change, 0.0)
        checked = self._spread([float(not muon) for muon in self._orthogonal])
        if (chosen := self._chosen) is not None and self._raw[1] is not None:
            of_matrix = self._owners == chosen
            after[of_matrix] = strided(self._muon(chosen, self._raw[1] * scale, factor), STEPPED).double()
            checked = torch.where(of_matrix, 1.0, checked)
        self._steps += 1
        return ExpectedStep(before, after, shares, checked)

    def _adamw(self, gradient: Tensor, moves: Tensor) -> Tensor:
        """Returns AdamW's direction, and notes the averages that it stores."""
        assert self._rule is not None
        mean, square, steps = (self._averages if self._rule.keeps else None) or self._read_averages()[:3]
        beta1, beta2 = self._settings.betas
        self._widths = torch.maximum(mean.abs(), gradient.abs()), torch.maximum(square, gradient**2)
        mean = torch.lerp(mean, gradient, moves * (1.0 - beta1))
        square = torch.lerp(square, gradient**2, moves * (1.0 - beta2))
        steps = steps + moves
        self._averages = mean, square, steps
        return mean / (1.0 - beta1**steps) / ((square / (1.0 - beta2**steps)).sqrt() + EPS)

    def _muon(self, number: int, gradient: Tensor, factor: float) -> Tensor:
        """Returns the local part of a matrix after its next step."""
        master, held = self._masters[number], self._optimizer.state.get(self._masters[number], {})
        former = local_part(held["exp_avg"]).double() if held else torch.zeros_like(gradient, dtype=torch.float64)
        momentum = torch.lerp(former, gradient.double(), 1.0 - MOMENTUM)
        ahead = torch.lerp(gradient.double(), momentum, MOMENTUM)
        change, local, first = muon_change(whole(like_shard(master, ahead))), local_part(master).double(), first_row(master)
        lr = factor * self._lrs[number]
        return local * (1.0 - lr * self._settings.weight_decay) - lr * change[first : first + len(local)]

    def compare(self, expected: ExpectedStep) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the squared norms of `ExpectedStep.compare` after the step. Raises InvariantError for other short moments."""
        if self._rule is not None and not self._rule.keeps and self._averages is not None and self._widths is not None:
            *stored, _, rounding = self._read_averages()
            by_adamw = self._spread([float(not muon) for muon in self._orthogonal])
            for now, made, width, rest in zip(stored, self._averages, self._widths, rounding, strict=False):
                if bool((by_adamw * ((now - made).abs() - rest - SUMMED * width) > 0.0).any()):
                    raise InvariantError(
                        "the moments that the optimizer stored are not those of its step, beyond their rounding"
                    )
            self._stored = self._samples_of_state()
        return expected.compare(self.weights())

    def weights(self) -> Tensor:
        """A sample of the weights."""
        return self._sample(self._masters)

    def _samples_of_state(self) -> list[Tensor]:
        held = [local_part(value) for each in self._masters for value in self._optimizer.state.get(each, {}).values()]
        return [strided(value, STEPPED).clone() for value in held]

    def _read_averages(self) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
        """The sample's averages of the gradient and of its square, the steps that they hold, and their rounding."""
        pairs = list(zip(self._masters, self._orthogonal, strict=True))
        states: list[dict[str, Any]] = [{} if muon else self._optimizer.state.get(master, {}) for master, muon in pairs]
        (mean, around), (square, beside) = (self._moment(states, *each) for each in (("exp_avg", True), ("exp_avg_sq", False)))
        none = torch.zeros((), device=mean.device)
        steps = self._spread(torch.stack([state.get("step", none).to(none) for state in states]))
        return mean, square, steps, (around, beside)

    def _moment(self, states: Sequence[dict[str, Any]], name: str, signed: bool) -> tuple[Tensor, Tensor]:
        nothing = [strided(master, STEPPED).double() * 0.0 for master in self._masters]
        parts = [{key: local_part(value) for key, value in state.items()} for state in states]
        samples = [
            moments.sample(state, name, signed, STEPPED) if name in state else (none, none)
            for state, none in zip(parts, nothing, strict=True)
        ]
        return torch.cat([value for value, _ in samples]), torch.cat([rounding for _, rounding in samples])

    def _sample(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Some numbers of a tensor per master, 0 if there is none, as one vector."""
        pairs = zip(tensors, self._masters, strict=True)
        views = [strided(master, STEPPED) * 0.0 if each is None else strided(each, STEPPED) for each, master in pairs]
        return torch.cat(views).double()

    def _spread(self, values: Tensor | Sequence[float]) -> Tensor:
        """One value per master, repeated for each of its numbers in `_sample`."""
        return torch.as_tensor(values, dtype=torch.float64, device=self._owners.device)[self._owners]

    @cached_property
    def _owners(self) -> Tensor:
        """The number of the master of each number in `_sample`."""
        counts = torch.tensor([len(strided(master, STEPPED)) for master in self._masters])
        return torch.arange(len(counts)).repeat_interleave(counts).to(local_part(self._masters[0]).device)

    @cached_property
    def _shares(self) -> Tensor:
        """How many weights of its master each number in `_sample` stands for, per master."""
        counts = torch.bincount(self._owners, minlength=len(self._masters)).clamp(min=1)
        sizes = [local_part(master).numel() for master in self._masters]
        return torch.tensor(sizes, dtype=torch.float64, device=counts.device) / counts
