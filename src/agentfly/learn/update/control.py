"""What changes over a run: the coefficients of the KL and of the entropy bonus, which follow targets, and the reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..settings import LossSettings
from .modules import LearnerModules

GAIN, MOST = 0.1, 0.2
"""Of the proportional controller of the KL: arXiv:1909.08593, section 2.2."""
ENTROPY_STEP, MOST_ENTROPY = 0.02, 1.0
"""Largest change of the entropy's coefficient in a step, and the largest coefficient. arXiv:2505.22312 has steps of 0.005, over
thousands of them; a policy that is sure of itself within a hundred steps needs larger ones, and near the target all are small.
"""


class Control:
    """Adapts the coefficients after each update, and renews the reference."""

    def __init__(self, modules: LearnerModules, loss: LossSettings) -> None:
        self._modules, self._loss = modules, loss
        self._coef, self._entropy_coef = loss.kl_coef, loss.entropy_coef
        self._below = True  # whether the entropy was below its target in the last step
        if loss.reference_every and loss.kl_coef > 0:
            modules.check_renewal(loss.reference_mix)

    @property
    def settings(self) -> LossSettings:
        """The settings of the next update."""
        return replace(self._loss, kl_coef=self._coef, entropy_coef=self._entropy_coef if self._below else 0.0)

    def follow(self, metrics: dict[str, float], updates: int) -> None:
        """Adapt to what an update measured. Adds the coefficients that it used."""
        used, target, measured = self.settings, self._loss.kl_target, metrics.get("train/reference_kl")
        if target is not None and self._loss.kl_coef > 0:
            metrics["train/kl_coef"] = self._coef
            if measured is not None:
                self._coef *= 1.0 + GAIN * max(-MOST, min(MOST, measured / target - 1.0))
        if (floor := self._loss.entropy_target) is not None:
            metrics["train/entropy_coef"] = used.entropy_coef
            if (entropy := metrics.get("train/entropy")) is not None:
                missing = max(-1.0, min(1.0, (1.0 - entropy / floor) / MOST))
                self._entropy_coef = max(0.0, min(MOST_ENTROPY, self._entropy_coef + ENTROPY_STEP * missing))
                self._below = entropy < floor
        if self._loss.reference_every and self._loss.kl_coef > 0 and updates % self._loss.reference_every == 0:
            self._modules.renew_reference(self._loss.reference_mix)

    def state_dict(self) -> dict[str, float]:
        return {"coef": self._coef, "entropy_coef": self._entropy_coef, "below": float(self._below)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._loss.kl_target is not None:
            self._coef = float(state.get("coef", self._coef))
        if self._loss.entropy_target is not None:
            self._entropy_coef = float(state.get("entropy_coef", self._entropy_coef))
            self._below = bool(state.get("below", self._below))
