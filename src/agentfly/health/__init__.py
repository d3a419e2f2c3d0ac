"""Examines a finished or running training run from its folder alone: `agentfly doctor RUN`.

    records    reads the folder: every chain is decoded and checked once, and what the checks of steps need is kept
    checks     the checks of steps: a table of promises, each with a function that tells problems and evidence
    replay     computes every step again from its chains, and compares: `agentfly replay RUN`
    report     `diagnose` runs them all

A step counts if its metrics are stored; the chains of later steps are only checked by themselves.
"""

from __future__ import annotations

from .checks import CHECKS
from .records import MAX_TOLD, Check
from .replay import PROMISES
from .report import Diagnosis, diagnose, replay

__all__ = ["CHECKS", "MAX_TOLD", "PROMISES", "Check", "Diagnosis", "diagnose", "replay"]
