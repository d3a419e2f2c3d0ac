"""How far the loss of a float16 model is scaled up before the backward pass.

float16 holds nothing smaller than 6e-8 and nothing larger than 65,504: most gradients of a policy are smaller, and would be 0
without a word. They are computed of the loss times `factor`, and divided by it where they become float32. A factor that was
too large shows as a gradient that is not finite: it is lowered, and whoever asked computes the gradient again. After many steps
without that it is raised. For other number formats the factor is 1 and stays 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

FIRST = 2.0**16
LARGEST = 2.0**24
PATIENCE = 100
"""Steps without an overflow before the factor is doubled."""


class LossScale:
    """The factor, and what was learned about it."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        """`parameters` are all that gradients pass, frozen ones as well."""
        self.active = any(parameter.dtype == torch.float16 for parameter in parameters)
        self.factor = FIRST if self.active else 1.0
        self._steps = 0

    def lower(self) -> bool:
        """After a gradient that was not finite. False: the factor is not to blame."""
        self._steps = 0
        if not self.active or self.factor <= 1.0:
            return False
        self.factor = max(1.0, self.factor / 4.0)
        return True

    def stepped(self) -> None:
        """After a step with a finite gradient."""
        self._steps += 1
        if self.active and self._steps % PATIENCE == 0:
            self.factor = min(LARGEST, 2.0 * self.factor)

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.active:
            self.factor, self._steps = float(state["factor"]), int(state["steps"])
