"""AdamW over a model's parameters, with what a training step needs around it.

In: gradients on the parameters. Out: changed parameters, in place, so that an engine that shares them sees the new weights.
Where parameters are of low precision, the optimizer works on float32 masters and writes them back: added to a bfloat16
weight itself, a small update would be rounded away every time. Where any is float16, gradients are computed of a scaled loss
(`loss_scale`): whoever trains calls `backward` here, and computes a gradient again after `retry`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .loss_scale import LossScale
from .settings import OptimSettings

MAX_COPIED = 2**28
"""Numbers that are copied from one precision to the other at a time: as float32, one GiB."""
_FULL = (torch.float32, torch.float64)


class Optimizer:
    """AdamW on the trainable parameters of a module."""

    def __init__(self, modules: Iterable[tuple[nn.Module, float]], settings: OptimSettings) -> None:
        """`modules` are pairs of a module and its learning rate."""
        self._max_norm = settings.max_grad_norm
        self._parameters: list[Tensor] = []
        self._masters: list[Tensor] = []
        groups: list[dict[str, Any]] = []
        modules = list(modules)
        self._scale = LossScale(parameter for module, _ in modules for parameter in module.parameters())
        for module, lr in modules:
            parameters = [p for p in module.parameters() if p.requires_grad]
            masters = [p if p.dtype in _FULL else p.detach().float().requires_grad_() for p in parameters]
            self._parameters += parameters
            self._masters += masters
            for decay, members in (
                (settings.weight_decay, [p for p in masters if p.dim() >= 2]),
                (0.0, [p for p in masters if p.dim() < 2]),
            ):
                if members:
                    groups.append({"params": members, "lr": lr, "base_lr": lr, "weight_decay": decay})
        self._adam = torch.optim.AdamW(groups, betas=settings.betas, fused=True)

    def set_lr(self, factor: float) -> None:
        """Every learning rate becomes its base times `factor`."""
        for group in self._adam.param_groups:
            group["lr"] = group["base_lr"] * factor

    def backward(self, loss: Tensor) -> None:
        """Add the loss's gradient to those of the parameters."""
        scaled: Any = loss * self._scale.factor if self._scale.active else loss
        scaled.backward()

    @property
    def loss_scale(self) -> float | None:
        """What the loss is multiplied with; None where no number is float16."""
        return self._scale.factor if self._scale.active else None

    @property
    def range_hint(self) -> str:
        """What else it may be that a number is not finite, for the end of a sentence."""
        return ", or take bfloat16: a float16 holds nothing above 65,504" if self._scale.active else ""

    def retry(self) -> bool:
        """After a gradient whose length is not finite: forget it. True: it may be finite when it is computed again."""
        self.zero_grad()
        return self._scale.lower()

    def clip(self) -> Tensor:
        """Shorten the gradient to its longest allowed length; its length before."""
        for pairs in self._copied(with_grad=True):
            short = [parameter.grad for parameter, _ in pairs if parameter.grad is not None]
            full = [torch.empty_like(parameter, dtype=master.dtype) for parameter, master in pairs]
            torch._foreach_copy_(full, short)
            for (parameter, master), grad in zip(pairs, full, strict=True):
                master.grad, parameter.grad = grad, None
        if self._scale.active:
            torch._foreach_div_([m.grad for m in self._masters if m.grad is not None], self._scale.factor)
        return nn.utils.clip_grad_norm_(self._masters, self._max_norm)

    def step(self) -> None:
        """Apply the clipped gradient and forget it."""
        self._adam.step()
        self._scale.stepped()
        with torch.no_grad():
            for pairs in self._copied():
                torch._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs])
        self.zero_grad()

    def _copied(self, *, with_grad: bool = False) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Parameters with their masters, as many at a time as one launch may copy: few launches, and little held twice."""
        pairs: list[tuple[Tensor, Tensor]] = []
        size = 0
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is parameter or (with_grad and parameter.grad is None):
                continue
            if pairs and size + parameter.numel() > MAX_COPIED:
                yield pairs
                pairs, size = [], 0
            pairs.append((parameter, master))
            size += parameter.numel()
        if pairs:
            yield pairs

    def zero_grad(self) -> None:
        for tensor in (*self._parameters, *self._masters):
            tensor.grad = None

    def state_dict(self) -> dict[str, Any]:
        masters = [m.detach() for p, m in zip(self._parameters, self._masters, strict=True) if m is not p]
        scale = {"loss_scale": self._scale.state_dict()} if self._scale.active else {}
        return {"adam": self._adam.state_dict(), "masters": masters, **scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # The settings of this run win over those of the saved one: only what Adam has averaged is taken over.
        kept = [{k: v for k, v in group.items() if k != "params"} for group in self._adam.param_groups]
        self._adam.load_state_dict(state["adam"])
        for group, options in zip(self._adam.param_groups, kept, strict=True):
            group.update(options)
        if "loss_scale" in state:  # not from a run of another number format
            self._scale.load_state_dict(state["loss_scale"])
        own = [m for p, m in zip(self._parameters, self._masters, strict=True) if m is not p]
        with torch.no_grad():
            for master, saved in zip(own, state["masters"], strict=True):
                master.copy_(saved)
