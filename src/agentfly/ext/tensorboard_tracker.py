"""The TensorBoard tracker: event files in `<directory>/tensorboard`, and the config beside them as JSON.

It uses the writer of the tensorboard package, which needs neither torch nor TensorFlow. View the files with
`tensorboard --logdir runs`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorboard.summary


class TensorBoardTracker:
    def __init__(self, directory: str | Path, config: Mapping[str, Any] | None = None, name: str = "") -> None:
        self.path = Path(directory) / "tensorboard"
        self._writer = tensorboard.summary.Writer(str(self.path))
        self._config = {"name": name, **(config or {})}
        (self.path / "config.json").write_text(json.dumps(self._config, indent=1, default=str), encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
