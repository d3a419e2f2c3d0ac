"""Injected faults: the seed decides when they strike, and each kind has its documented effect."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentfly.errors import ConfigError, DeadlineError, WorldError
from agentfly.faults import GARBAGE, KINDS, Faults, FaultSchedule, faulty, kill_worker
from agentfly.resources import ResourceManager, spec_of

from .worlds import TASK, Board


def test_the_same_seed_gives_the_same_faults_and_another_gives_others() -> None:
    def drawn(seed: int, number: int) -> list[str | None]:
        faults = Faults(FaultSchedule(seed, {"crash": 0.2, "slow": 0.2}, after=3), number)
        return [faults.draw() for _ in range(200)]

    assert drawn(1, 0) == drawn(1, 0)
    assert drawn(1, 0) != drawn(2, 0)
    assert drawn(1, 0) != drawn(1, 1)
    assert drawn(1, 0)[:3] == [None] * 3
    assert 20 < drawn(1, 0).count("crash") < 70


def test_an_invalid_schedule_is_refused() -> None:
    with pytest.raises(ConfigError, match="no fault 'explode'; known: kill, crash"):
        FaultSchedule(0, {"explode": 0.1})
    with pytest.raises(ConfigError, match="add up to at most 1"):
        FaultSchedule(0, {"kill": 0.7, "hang": 0.7})


EXPECTED: dict[str, Any] = {
    "kill": (WorldError, WorldError),
    "crash": (RuntimeError, RuntimeError),
    "hang": (DeadlineError, DeadlineError),
    "slow": (1, 1),
    "corrupt": (GARBAGE, WorldError),  # in a worker the stream itself is broken
}


@pytest.mark.parametrize("placement", ["thread", "process"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_fault_strikes_in_threads_and_processes_and_the_next_chain_is_served(kind: str, placement: str) -> None:
    schedule = FaultSchedule(0, {kind: 1.0}, spare=("close", "reset"), slow_s=0.01)
    world = faulty(Board, schedule)
    expected = EXPECTED[kind][placement == "process"]

    async def main() -> None:
        spec = spec_of(world, placement=placement, max=1, call_timeout_s=0.5 if kind == "hang" else 60)
        async with ResourceManager(None, spec) as manager:
            async with manager.lease([world], TASK, "one", 60) as lease:
                if isinstance(expected, type):
                    with pytest.raises(expected):
                        await lease.call(world, "write", "x")
                else:
                    assert await lease.call(world, "write", "x") == expected
            async with manager.lease([world], TASK, "two", 60) as lease:
                assert lease.observation(world) == "board of t"

    asyncio.run(main())


def test_kill_worker_returns_none_if_the_environment_has_no_worker() -> None:
    async def main() -> None:
        async with ResourceManager(None, Board) as manager, manager.lease([Board], TASK):
            assert kill_worker(manager, Board) is None

    asyncio.run(main())
