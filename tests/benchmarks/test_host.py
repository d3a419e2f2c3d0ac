"""The host's share of a training step: real chains on a timetable instead of a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from .conftest import BENCHMARKS


def test_every_chain_plays_three_turns_and_the_device_is_accounted_for(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["--chains", "16", "32", "--steps", "2", "--learn-ms", "0", "--json", str(out)]
    command = [sys.executable, str(BENCHMARKS / "host.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    for chains, row in zip((16, 32), rows, strict=True):
        assert chains * 2 * 30 < row["tokens"] < chains * (2 * 45 + 15)  # two calls and an answer each
        assert 0 < row["rollout_s"] < row["step_s"]
        assert 0 < row["share"] < 1.25 and 0 < row["row_share"] < 1  # the last launch may end after the rollout
        assert min(row["main_ms"], row["engine_ms"], row["store_ms"]) > 0
