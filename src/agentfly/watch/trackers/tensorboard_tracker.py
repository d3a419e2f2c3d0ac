"""The TensorBoard tracker: event files in `<directory>/tensorboard`, and the config beside them as JSON.

Metrics are written as scalars, which every reader of event files lists. It uses the writer of the tensorboard package, which
needs neither torch nor TensorFlow. View the files with `tensorboard --logdir runs`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoardTracker:
    def __init__(self, directory: str | Path, config: Mapping[str, Any] | None = None, name: str = "") -> None:
        self.path = Path(directory) / "tensorboard"
        self.path.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(self.path))
        self._config = {"name": name, **(config or {})}
        (self.path / "config.json").write_text(json.dumps(self._config, indent=1, default=str), encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
