"""What changes about the KL term over a run: its coefficient (`loss.kl_target`) and the reference (`loss.reference_every`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..settings import LossSettings
from .modules import LearnerModules

GAIN, MOST = 0.1, 0.2
"""Of the proportional controller: arXiv:1909.08593, section 2.2."""


class KlControl:
    """Adapts the coefficient after each update, and renews the reference."""

    def __init__(self, modules: LearnerModules, loss: LossSettings) -> None:
        self._modules, self._loss = modules, loss
        self._coef = loss.kl_coef
        if loss.reference_every and loss.kl_coef > 0:
            modules.check_renewal(loss.reference_mix)

    @property
    def settings(self) -> LossSettings:
        """The settings of the next update."""
        return replace(self._loss, kl_coef=self._coef)

    def follow(self, metrics: dict[str, float], updates: int) -> None:
        """Adapt to what an update measured. Adds the coefficient that it used."""
        target, measured = self._loss.kl_target, metrics.get("train/reference_kl")
        if target is not None and self._loss.kl_coef > 0:
            metrics["train/kl_coef"] = self._coef
            if measured is not None:
                self._coef *= 1.0 + GAIN * max(-MOST, min(MOST, measured / target - 1.0))
        if self._loss.reference_every and self._loss.kl_coef > 0 and updates % self._loss.reference_every == 0:
            self._modules.renew_reference(self._loss.reference_mix)

    def state_dict(self) -> dict[str, float]:
        return {"coef": self._coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._loss.kl_target is not None:
            self._coef = float(state.get("coef", self._coef))
