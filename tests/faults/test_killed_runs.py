"""A run that is killed twenty times, in every phase of a step, ends where an undisturbed one ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentfly.health import diagnose
from agentfly.runs import RunStore
from tests.faults.killed_runs import STEPS

# Durations, and roundings: of the sampler's log-probs, as chains are batched as they come, and of the check of the optimizer's
# steps, whose own averages begin with Adam's after a resume. The test of the sampler collects its evidence anew then.
VARYING = (
    "time/",
    "cost/",
    "device/",
    "rollout/tokens_per_s",
    "resources/",
    "train/logprob_gap",
    "train/step_error",
    "ledger/sampler_",
)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each attempt is a fork")
def test_no_task_is_lost_or_repeated_and_the_weights_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    found = kill_runs(tmp_path, seed=7)
    assert (found["whole"], found["end"]) == (0, 0)
    assert len(found["kills"]) == 20
    for phase, number, _, _, status, log, broken in found["kills"]:
        assert status == (143 if number == signal.SIGTERM else -number), f"{phase}: {log}"
        assert "Traceback" not in log
        assert ("stopped by SIGTERM" in log) == (number == signal.SIGTERM)
        assert broken == [], f"a kill in the phase {phase} left a broken checkpoint"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert books(killed) == books(whole)
    assert set(Counter(step for step, split, _, _, _ in books(killed)["chains"] if split == "train").values()) == {4}
    last = f"checkpoints/step-{STEPS:06d}/model.safetensors"
    assert (killed / last).read_bytes() == (whole / last).read_bytes()
    assert sorted(path.name for path in (killed / "checkpoints").iterdir()) == [f"step-{STEPS - 2:06d}", f"step-{STEPS:06d}"]
    assert not (killed / "run.lock").exists()
    assert [problem for check in diagnose(killed).checks for problem in check.problems] == []


def kill_runs(folder: Path, seed: int) -> Any:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.killed_runs", str(folder), str(seed)],
        cwd=root,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def books(run: Path) -> dict[str, Any]:
    """All that a run recorded, without what varies between two undisturbed runs."""
    with RunStore(run / "run.db", readonly=True) as store:
        rows = store.rows(limit=10_000)
        metrics = store.metrics()
    return {
        "chains": sorted((row.step, row.split, row.task_id, row.chain, row.total_reward) for row in rows),
        "metrics": [(row.step, row.name, row.value) for row in metrics if not row.name.startswith(VARYING)],
        "lines": [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()],
    }
