"""Examines a finished or running training run from its folder alone: `agentfly doctor RUN`.

    records    reads the folder: every chain is decoded and checked once, and what the checks of steps need is kept
    checks     the checks of steps: a table of promises, each with a function that tells problems and evidence
    report     `diagnose` runs them all

A step counts if its metrics are stored. The chains of later steps belong to a step that is running or was interrupted: only the
chains themselves are checked.
"""

from __future__ import annotations

from .checks import CHECKS
from .records import MAX_TOLD, Check
from .report import Diagnosis, diagnose

__all__ = ["CHECKS", "MAX_TOLD", "Check", "Diagnosis", "diagnose"]
