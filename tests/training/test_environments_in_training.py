"""A run whose chains use environments: they are in its books and on its display, and one controller admits all its chains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import agentfly
from agentfly import Task, tool
from agentfly.rollout import stream
from agentfly.training import loop
from agentfly.watch.metrics import unknown
from agentfly.watch.progress import Progress
from tests.tiny import ROWS, save_tiny_model, tiny_agent


class Cave:
    """Counts what is open."""

    live = 0

    def __init__(self) -> None:
        Cave.live += 1

    def reset(self, task: Task) -> None:
        self.looks = 0

    def look(self) -> str:
        self.looks += 1
        return "dark"

    def close(self) -> None:
        Cave.live -= 1


@tool(name="look", register=False)
async def look(cave: Cave) -> str:
    """Look around."""
    return cave.look()


class Watching(Progress):
    """Records the calls of the display."""

    def __init__(self, total_steps: int) -> None:
        super().__init__(total_steps)
        self.told: list[dict[str, float]] = []

    def look(self, metrics: Mapping[str, float], *others: object) -> None:
        super().look(metrics, *others)
        self.told.append(dict(metrics))


def test_environments_are_counted_in_the_metrics_and_shown_and_all_chains_pass_one_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LOOK_S", 0.005)
    seen: set[tuple[str, int]] = set()
    real = stream.start_chain

    async def spy(plan: Any, opening: Any, chain: int, name: str, **options: Any) -> Any:
        assert plan.admission is not None
        assert 1 <= plan.admission.running <= 2
        seen.add((name.partition("-")[0], plan.admission.done))
        return await real(plan, opening, chain, name, **options)

    monkeypatch.setattr(stream, "start_chain", spy)
    progress = Watching(2)
    agent = tiny_agent(save_tiny_model(tmp_path / "model"), tools=[look], resources={"pools": {"Cave": {"max": 2}}})
    result = agentfly.train(
        agent,
        ROWS,
        run={"dir": str(tmp_path), "name": "run"},
        train={"steps": 2},
        num_tasks=2,
        num_chains=3,
        threads=1,
        validation_count=2,
        progress=progress,
    )
    assert Cave.live == 0
    assert seen == {("t1", 0), ("t2", 1)}  # chains of a step start when all steps before it are trained
    for metrics in result.history:
        assert not unknown(metrics)
        assert metrics["resources/Cave/most_allocated"] == metrics["resources/total/most_allocated"] == 2
        assert 0 < metrics["resources/Cave/allocated"] <= 2
        assert metrics["resources/total/allocated"] == pytest.approx(metrics["resources/Cave/allocated"], rel=0.01)
        assert metrics["resources/Cave/lease_s"] > 0
        assert metrics["rollout/envs"] == 2
    assert progress.told
    assert set(progress.told[-1]) >= {
        f"resources/Cave/{name}" for name in ("allocated", "idle", "warming", "waiting", "failed")
    }
