"""The folder of a run: its layout, and the SQLite store of its metrics and trajectories."""

from __future__ import annotations

from .codec import Opaque, decode, encode
from .directory import RunDirectory
from .store import MetricRow, RunStore, TrajectoryRow, import_jsonl

__all__ = ["MetricRow", "Opaque", "RunDirectory", "RunStore", "TrajectoryRow", "decode", "encode", "import_jsonl"]
