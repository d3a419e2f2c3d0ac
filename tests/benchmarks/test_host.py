"""The host's share of a training step: real chains on a timetable instead of a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import BENCHMARKS


@pytest.mark.parametrize("max_lag", [0, 1])
def test_every_chain_plays_three_turns_and_the_device_is_accounted_for(max_lag: int, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["--chains", "8", "16", "--steps", "2", "--learn-ms", "0", "--max-lag", str(max_lag), "--json", str(out)]
    command = [sys.executable, str(BENCHMARKS / "host.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    for chains, row in zip((8, 16), rows, strict=True):
        assert chains * 2 * 30 < row["tokens"] < chains * (2 * 45 + 15)  # two calls and an answer each
        assert 0 < row["rollout_s"] < row["step_s"]
        # The last launch may end after the rollout, and sampling that runs ahead may do the work of other steps.
        assert 0 < row["share"] < (3 if max_lag else 1.25) and 0 < row["row_share"] < (3 if max_lag else 1)
        assert min(row["main_ms"], row["engine_ms"], row["store_ms"]) > 0
