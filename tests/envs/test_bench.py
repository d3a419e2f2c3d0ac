"""The bench measures what it says, in a separate process, and refuses what it cannot measure."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentfly.envs.bench import Figures, bench_world, measure, memory_of_tree
from agentfly.errors import ConfigError


def test_every_instance_acts_and_is_counted() -> None:
    figures = asyncio.run(measure("guess", 7, 0.05))
    assert figures.instances == 7
    assert figures.steps >= 7
    assert figures.seconds >= 0.05
    assert figures.steps_per_s == pytest.approx(figures.steps / figures.seconds)


def test_each_number_of_instances_has_a_process_of_its_own() -> None:
    rows = list(bench_world("guess", (1, 3), seconds=0.05))
    assert [(row.world, row.instances, row.error) for row in rows] == [("guess", 1, ""), ("guess", 3, "")]
    assert all(row.steps >= row.instances for row in rows)


def test_a_world_that_fails_gives_its_error_as_the_figure(tmp_path: Path) -> None:
    path = tmp_path / "poor.py"
    path.write_text(
        "from agentfly.errors import WorldError\n"
        "class Poor:\n"
        "    def __init__(self):\n"
        "        raise WorldError('there is no room')\n"
        "    def reset(self, task): ...\n"
        "    def close(self): ...\n"
        "    @staticmethod\n"
        "    def conformance():\n"
        "        return {'tasks': [{'a': 1}], 'actions': ['x']}\n"
    )
    (row,) = bench_world(f"{path}:Poor", (2,), seconds=0.05)
    assert "there is no room" in row.error
    assert row.steps_per_s == 0


def test_a_world_that_does_not_say_how_to_act_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mute.py"
    path.write_text("class Mute:\n    def reset(self, task): ...\n    def close(self): ...\n")
    with pytest.raises(ConfigError, match="does not say how to act"):
        list(bench_world(f"{path}:Mute"))
    for numbers in ((), (0,), (1.5,)):
        with pytest.raises(ConfigError, match="whole numbers"):
            list(bench_world("guess", numbers))  # type: ignore[arg-type]


def test_memory_of_a_child_is_counted() -> None:
    code = "import sys; held = bytearray(50_000_000); print('ready', flush=True); sys.stdin.read()"
    before = memory_of_tree(os.getpid())
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        grown = memory_of_tree(os.getpid()) - before
        child.communicate()
    assert grown > 40


def test_memory_is_shared_out_among_instances() -> None:
    assert Figures("x", 4, memory_mb=2.0).memory_kb_each == 512
