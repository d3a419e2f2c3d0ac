"""The folder of a run: its layout, and the SQLite store of its metrics and trajectories."""

from __future__ import annotations

from .codec import decode, encode
from .directory import RunDirectory
from .opaque import Opaque
from .store import MetricRow, RunStore, TrajectoryRow, import_jsonl
from .writer import StoreWriter

__all__ = [
    "MetricRow", "Opaque", "RunDirectory", "RunStore", "StoreWriter", "TrajectoryRow", "decode", "encode", "import_jsonl",
]  # fmt: skip
