"""The folder of a run: its layout, and the SQLite store of everything that is recorded of it, with the queries of the views."""

from __future__ import annotations

from .bodies.opaque import Opaque
from .catalog import RunSummary, find_runs
from .codec import decode, encode
from .directory import RunDirectory
from .filters import ChainFilter
from .query import RunReader
from .recorder import Recorder
from .rows import ChainRow
from .store import MetricRow, RunStore, TrajectoryRow, import_jsonl
from .writer import StoreWriter

__all__ = [
    "ChainFilter", "ChainRow", "MetricRow", "Opaque", "Recorder", "RunDirectory", "RunReader", "RunStore", "RunSummary",
    "StoreWriter", "TrajectoryRow", "decode", "encode", "find_runs", "import_jsonl",
]  # fmt: skip
