"""Observing a run: the meaning of its metrics, the trackers that receive them, and the display in a terminal."""

from __future__ import annotations

from .metrics import METRICS, Metric, describe, is_success, rollout_metrics, unknown
from .trackers import Trackers, open_trackers

__all__ = ["METRICS", "Metric", "Trackers", "describe", "is_success", "open_trackers", "rollout_metrics", "unknown"]
