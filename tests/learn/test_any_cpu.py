"""The numeric tests hold whichever vector instructions and however many threads torch uses: some run again, set otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOME = [
    "tests/learn/model/test_logprobs.py::test_values_and_gradients_equal_the_naive_computation",
    "tests/learn/test_learner.py::test_the_gradient_is_that_of_the_formula",
    "tests/learn/test_supervised.py::test_the_step_is_that_of_plain_adamw",
    "tests/engines/test_local_replica.py::test_gradients_through_a_merged_twin_are_those_of_the_model",
]
RUN = """
import sys, pytest, torch
torch.set_num_threads(2)
print("set:", torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), flush=True)
sys.exit(pytest.main(["-q", "-p", "no:xdist", *sys.argv[1:]]))
"""


def test_the_numeric_tests_hold_without_vector_instructions_and_with_two_threads() -> None:
    """The suite itself runs with what this machine has and, unless it was told otherwise, with one thread."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, *SOME],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "ATEN_CPU_CAPABILITY": "default"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "set: DEFAULT 2\n" in done.stdout
