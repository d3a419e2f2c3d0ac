"""The tracker that every run has: one line of JSON per step in `metrics.jsonl`, flushed at once.

NaN and infinities are written as null, because JSON has no form for them. An incomplete last line, left by a killed process, is
removed when the file is opened again.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class JsonlTracker:
    """Appends to `<directory>/metrics.jsonl`. `config` and `name` are part of the tracker interface and not written."""

    def __init__(self, directory: str | Path, config: Mapping[str, Any] | None = None, name: str = "") -> None:
        self.path = Path(directory) / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _remove_incomplete_line(self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        line: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        line |= {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def truncate_after(self, step: int) -> None:
        """Removes the lines after a step. The file is replaced in one operation, so it is never half written."""
        self._file.close()
        temporary = self.path.with_name(".metrics.jsonl.writing")
        with self.path.open(encoding="utf-8") as old, temporary.open("w", encoding="utf-8") as new:
            new.writelines(line for line in old if json.loads(line)["step"] <= step)
            new.flush()
            os.fsync(new.fileno())
        os.replace(temporary, self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        self._file.close()


def _remove_incomplete_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        data = file.read()
        file.truncate(data.rfind(b"\n") + 1)
