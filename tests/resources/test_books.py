"""Thousands of random kills, cancellations, timeouts and releases leave every counter balanced and nothing behind."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentfly.errors import RolloutError
from agentfly.faults import FaultSchedule, faulty, kill_worker
from agentfly.resources import Budget, ResourceManager, spec_of
from tests.virtual_time import virtual_time

from .test_placements import children
from .worlds import THREADS_OF_THE_PROCESS, Board, Chalk, Library, Once, Worker, task

__all__ = ["virtual_time"]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
RATES = {"kill": 0.02, "crash": 0.03, "hang": 0.01, "slow": 0.05, "corrupt": 0.02}


@pytest.fixture(autouse=True)
def _own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def our_threads() -> list[str]:
    """The threads of environments. Idle threads of `run_in_thread` live a while longer and hold nothing."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("agentfly-") and name not in THREADS_OF_THE_PROCESS]


def left_behind() -> tuple[set[int], int, list[str], list[str]]:
    until = time.monotonic() + 60
    while time.monotonic() < until and our_threads():
        time.sleep(0.01)
    threads = our_threads()
    files = sorted(path.name for path in Path(tempfile.gettempdir()).iterdir())
    return children(), len(os.listdir("/proc/self/fd")), threads, files


async def storm(
    manager: ResourceManager, kinds: list[type], events: int, seed: int, chains: int, pause_s: float
) -> Counter[str]:
    """Chains that lease, call, are cancelled and time out at random, until `events` events have happened."""
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    served: Counter[type] = Counter()

    async def chain(number: int) -> None:
        wanted = rng.sample(kinds, rng.randint(1, min(2, len(kinds))))
        try:
            may = wanted if rng.random() < 0.5 else ()  # half of them announce what else they may need
            lease = await manager.acquire(wanted[:1], task(number), f"chain {number}", rng.choice([0.002, 0.05, 5.0]), may)
            try:
                if wanted[1:]:
                    await lease.need(wanted[1:], rng.choice([0.01, 5.0]))
                for _ in range(rng.randint(0, 3)):
                    kind = rng.choice(wanted)
                    assert await lease.call(kind, "write", f"{number}") != "someone else's"
                    await lease.call(kind, "linger", rng.choice([0, 0, 0.001]))
                    notes = await lease.call(kind, "read")
                    if not issubclass(kind, Library) and isinstance(notes, list):
                        assert set(notes) <= {f"{number}"}, "another chain's state is visible"
                    served[kind] += 1
                if rng.random() < 0.05:
                    lease.spoil("the chain says so")
                    seen["spoiled"] += 1
            finally:
                await lease.release()
                seen["released"] += 1
        except RolloutError:
            seen["failed"] += 1
        except RuntimeError as error:
            if "fault" not in str(error):
                raise
            seen["crashed"] += 1

    running: set[asyncio.Task[None]] = set()
    number = 0
    async with asyncio.timeout(220):
        while sum(seen.values()) < events:
            while len(running) < chains:
                number += 1
                running.add(asyncio.create_task(chain(number)))
            await asyncio.sleep(rng.choice([0, 0, pause_s]))
            if rng.random() < 0.5:
                rng.choice(sorted(running, key=id)).cancel()
                seen["cancelled"] += 1
            if rng.random() < 0.01 and kill_worker(manager, rng.choice(kinds), seed=number) is not None:
                seen["killed"] += 1
            for done in [each for each in running if each.done()]:
                running.discard(done)
                if not done.cancelled():
                    done.result()  # anything that is not a typed outcome stops the test here
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    assert set(served) == set(kinds), "every kind was served all the same"
    return seen


def balanced(manager: ResourceManager) -> None:
    figures = manager.metrics()
    assert manager.holders() == {}
    assert manager.claims.taken == manager.claims.waiting == 0
    assert figures["resources/total/allocated"] == figures["resources/total/waiting"] == 0
    for pool in manager._pools.values():
        assert pool.line.waiting == len(list(pool.line)) == 0
        assert not pool.joinable
        assert pool.leased.value == 0
        assert set(pool.idle) == set(pool.slots)
        assert pool.count <= pool.size
    assert manager._out_of_order == 0


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize("seed", [1, 2])
def test_five_thousand_random_events_in_the_loop_leave_nothing_behind(seed: int, caplog: Any) -> None:
    caplog.set_level(logging.ERROR)
    Board.open.clear()
    before = left_behind()

    async def main() -> Counter[str]:
        # A sync method that hangs in the loop blocks it, so `hang_s` is short here.
        schedules = FaultSchedule(seed=seed, rates=RATES, slow_s=0.001, hang_s=0.06)
        worlds = [faulty(cls, schedules) for cls in (Board, Chalk, Once, Library)]
        specs = [
            spec_of(cls, max=size, call_timeout_s=0.05, reset_timeout_s=0.05, max_uses=uses)
            for cls, size, uses in zip(worlds, (4, 2, 3, 2), (None, 7, None, None), strict=True)
        ]
        async with ResourceManager(Budget(memory_mb=90), *specs, sweep_s=0.01) as manager:
            seen = await storm(manager, worlds, 5_000, seed, chains=40, pause_s=0.001)
            async with asyncio.timeout(60):
                while manager.metrics()["resources/total/closing"] + manager.metrics()["resources/total/warming"]:
                    await asyncio.sleep(0.005)
            balanced(manager)
        return seen

    seen = asyncio.run(main())
    assert min(seen[name] for name in ("released", "cancelled", "failed", "crashed", "spoiled")) > 20, seen
    assert not +Board.open
    assert left_behind() == before


@pytest.mark.parametrize("placement", ["thread", "process"])
def test_random_events_in_threads_and_processes_leave_no_thread_process_descriptor_or_file(placement: str, caplog: Any) -> None:
    caplog.set_level(logging.ERROR)
    Board.open.clear()
    before = left_behind()

    async def main() -> Counter[str]:
        schedule = FaultSchedule(seed=3, rates=RATES, slow_s=0.001, hang_s=3600)
        worlds = [faulty(cls, schedule) for cls in (Board, Worker)]
        sizes = [
            spec_of(worlds[0], placement=placement, max=2, call_timeout_s=0.3, reset_timeout_s=2),
            spec_of(worlds[1], placement=placement, max=2, per_process=2, call_timeout_s=0.3, reset_timeout_s=2),
        ]
        async with ResourceManager(None, *sizes, sweep_s=0.05) as manager:
            for world in worlds:
                await manager.warm(world, 2)
            seen = await storm(manager, worlds, 800 if placement == "thread" else 400, 3, chains=8, pause_s=0.05)
            async with asyncio.timeout(60):
                while manager.metrics()["resources/total/closing"] + manager.metrics()["resources/total/warming"]:
                    await asyncio.sleep(0.01)
            balanced(manager)
        return seen

    seen = asyncio.run(main())
    assert min(seen[name] for name in ("released", "cancelled", "failed")) > 5, seen
    assert left_behind() == before
