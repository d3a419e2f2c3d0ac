"""/api/compare: what the configs of runs differ in, their results, and paired tests on the held-out tasks that they share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import AgentFlyError
from ..runs.catalog import read_config
from ..runs.compare import flatten
from ..runs.filters import ChainFilter
from ..runs.query import RunReader
from ..watch.comparison import RESULTS, compare_runs
from .library import Library

MAX_TASKS = 1000
HIDDEN = ("run.dir", "run.name")
"""Keys that differ between any two runs and say nothing."""


def compare_json(library: Library, names: list[str]) -> dict[str, Any]:
    """Every run against the first."""
    folders = [library.find(name) for name in names]
    summaries = {each.name: each for each in library.summaries()}
    sides = [_Side(folder) for folder in folders]
    from .api import summary_json

    return {
        "runs": [summary_json(summaries[name]) for name in names],
        "config": _config([read_config(folder) for folder in folders]),
        "results": [
            {"metric": metric, "values": [side.last.get(metric) for side in sides]}
            for metric in RESULTS
            if any(metric in side.last for side in sides)
        ],
        "pairs": [_pair(names[0], folders[0], name, folder) for name, folder in zip(names[1:], folders[1:], strict=True)],
        "tasks": _tasks(sides),
    }
