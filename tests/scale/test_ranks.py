"""2 and 4 ranks over gloo give the losses, metrics and weights of one process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scale.rank_cases import CASES, SIZES, run_case

ROOT = Path(__file__).parent.parent.parent
DIVISION = {"train/padding_waste"}
"""Metrics of the division into micro batches, which is another one on several ranks."""


def free_ports(count: int) -> int:
    """Returns the first of some adjacent free ports."""
    for _ in range(50):
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
        try:
            for number in range(count):
                with socket.socket() as other:
                    other.bind(("127.0.0.1", port + number))
        except OSError:
            continue
        return int(port)
    raise AssertionError("no adjacent free ports")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of all cases: four processes run them once."""
    folder = tmp_path_factory.mktemp("ranks")
    port = free_ports(len(SIZES))
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.scale.rank_cases", str(folder)]
    pool = [subprocess.Popen([*command, f"{rank}", f"{port}"], cwd=ROOT, env=environ) for rank in range(max(SIZES))]
    try:
        deadline = time.monotonic() + 500.0
        while any(process.poll() is None for process in pool) and time.monotonic() < deadline:
            if any(process.poll() for process in pool):  # the others would wait for it
                break
            time.sleep(0.1)
        assert [process.poll() for process in pool] == [0] * max(SIZES)
    finally:
        for process in pool:
            process.kill()
            process.wait()
    return folder


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_what_one_process_computes(name: str, size: int, found: Path) -> None:
    got: dict[str, Any] = torch.load(found / f"{size}-{name}.pt", weights_only=True)
    want = run_case(CASES[name])
    limit = 1e-5 if "dtype" not in CASES[name] else 2e-2
    assert got["version"] == want["version"]
    for told, expected in zip(got["metrics"] + got["measured"], want["metrics"] + want["measured"], strict=True):
        assert told.keys() == expected.keys()
        for key in expected.keys() - DIVISION:
            assert told[key] == pytest.approx(expected[key], rel=limit, abs=limit), key
    assert got["logprobs"] == pytest.approx(want["logprobs"], abs=10 * limit)
    assert got["weights"].keys() == want["weights"].keys()
    for key, tensor in want["weights"].items():
        assert (got["weights"][key] - tensor).abs().max() <= limit, key
