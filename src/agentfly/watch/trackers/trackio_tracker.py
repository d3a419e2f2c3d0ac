"""The Trackio tracker: a run of the project `agentfly`, or of the one that TRACKIO_PROJECT names, in Trackio's own folder.

`trackio show --project agentfly` opens it; TRACKIO_DIR, TRACKIO_SPACE_ID and TRACKIO_SERVER_URL mean what they mean to Trackio.
A resumed run goes on under its name. Sample chains are a table.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import trackio

from ...types import Trajectory
from ..samples import sample_rows, wants_samples


class TrackioTracker:
    def __init__(self, directory: str | Path, config: Mapping[str, Any] | None = None, name: str = "") -> None:
        project = os.environ.get("TRACKIO_PROJECT", "agentfly")
        with contextlib.redirect_stdout(io.StringIO()):  # it prints a greeting
            self._run: Any = trackio.init(
                project=project,
                name=name or Path(directory).name,
                config=dict(config or {}),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        elsewhere = any(os.environ.get(key) for key in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"))
        self.notice = None if elsewhere else f"Trackio writes to this machine:\n  trackio show --project {project}"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({name: float(value) for name, value in metrics.items() if math.isfinite(value)}, step=step)

    def log_chains(self, chains: Sequence[Trajectory], split: str, step: int) -> None:
        if wants_samples(split, step):
            rows = sample_rows(chains, step)
            columns = list(rows[0]) if rows else []
            table = trackio.Table(columns=columns, data=[list(row.values()) for row in rows])
            self._run.log({f"chains/{split}": table}, step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()
