"""Simulators share a JVM and are not aware of it: every episode is what it is alone. JVMs die, and are replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from agentfly.envs.scienceworld import jvms as module
from agentfly.envs.scienceworld.jvms import Jvms
from agentfly.envs.scienceworld.simulator import Simulator, describe, run_apart
from agentfly.errors import ConfigError, WorldError

# Animals wander and bees fly at random; things are made while one mixes; "easy" changes what each tick does.
EPISODES = [
    (
        "find-animal",
        7,
        "teleportAction,openDoors",
        ["teleport to outside", "wait", "look around", "wait1", "wait", "look around"],
    ),
    ("grow-plant", 3, "easy", ["teleport to greenhouse", "wait", "wait", "look around", "wait1", "look around"]),
    ("chemistry-mix", 1, "", ["open cupboard", "look around", "wait", "inventory", "wait1", "look around"]),
    ("mendelian-genetics-known-plant", 2, "", ["open door to hallway", "wait", "wait", "look around", "wait", "look around"]),
]


@pytest.fixture(scope="module")
def pool(java: None) -> Iterator[Jvms]:
    made = Jvms(num_jvms=1)
    yield made
    made.close()


async def whole(pool: Jvms, episode: int) -> list[object]:
    """One episode, from beginning to end."""
    task, variation, simplifications, actions = EPISODES[episode]
    simulator = Simulator(pool)
    try:
        seen: list[object] = [await simulator.load(task, variation, simplifications)]
        seen += [await simulator.step(action) for action in actions]
        return [*seen, await simulator.objects()]
    finally:
        await simulator.close()


async def interleaved(pool: Jvms) -> list[list[object]]:
    """All of them, action by action in turn, in the same JVM; one is loaded again and played on in between."""
    simulators = [Simulator(pool) for _ in EPISODES]
    seen: list[list[object]] = [[] for _ in EPISODES]
    for number, (task, variation, simplifications, _) in enumerate(EPISODES):
        seen[number].append(await simulators[number].load(task, variation, simplifications))
    for step in range(len(EPISODES[0][3])):
        for number in (2, 0, 3, 1):
            seen[number].append(await simulators[number].step(EPISODES[number][3][step]))
        if step == 2:
            await describe(pool, [("boil", 3), ("find-plant", 8)])
            other = Simulator(pool)
            await other.load("find-living-thing", 5, "easy")
            await other.step("wait")
            await other.close()
    for number, simulator in enumerate(simulators):
        seen[number].append(await simulator.objects())
        await simulator.close()
    return seen


def test_interleaved_episodes_equal_those_played_alone(pool: Jvms) -> None:
    async def alone() -> list[list[object]]:
        return [await whole(pool, number) for number in range(len(EPISODES))]

    wanted = asyncio.run(alone())
    assert asyncio.run(interleaved(pool)) == wanted
    assert len(pool.pids()) == 1
    assert wanted[0][1:] != [wanted[0][1]] * len(wanted[0][1:])


def test_without_its_part_of_what_is_shared_an_episode_would_differ(pool: Jvms, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: with the exchange switched off it does."""
    wanted = asyncio.run(whole(pool, 0))

    def forget(jvm: object, shared: object) -> None:
        return None

    monkeypatch.setattr("agentfly.envs.scienceworld.jvm.Jvm._change_to", forget)
    assert asyncio.run(interleaved(pool))[0] != wanted


def test_a_cancelled_call_leaves_the_simulator_usable(pool: Jvms) -> None:
    async def play() -> list[object]:
        simulator = Simulator(pool)
        await simulator.load("find-animal", 7, "easy")
        task = asyncio.create_task(simulator.step("wait"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=60)
        task_name, variation, simplifications, actions = EPISODES[2]
        seen: list[object] = [await simulator.load(task_name, variation, simplifications)]
        seen += [await simulator.step(action) for action in actions]
        await simulator.close()
        return seen

    assert asyncio.run(play()) == asyncio.run(whole(pool, 2))[:-1]


def test_a_dead_jvm_is_a_world_failure_and_another_plays_the_same_episode(pool: Jvms) -> None:
    wanted = asyncio.run(whole(pool, 0))
    (pid,) = pool.pids()

    async def play() -> None:
        simulator = Simulator(pool)
        await simulator.load("boil", 0, "")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorldError, match="JVM"):
            await simulator.step("look around")
        with pytest.raises(WorldError):
            await simulator.step("look around")
        assert not simulator.alive
        await simulator.close()

    asyncio.run(play())
    assert asyncio.run(whole(pool, 0)) == wanted
    (other,) = pool.pids()
    assert other != pid
    pool.close()
    assert not running(other)


def test_unused_jvms_end_by_themselves(java: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.05)
    pool = Jvms(num_jvms=1)
    for _ in range(2):
        jvm = pool.enter()
        assert jvm.submit(lambda jvm=jvm: jvm.gateway.jvm.java.lang.Math.abs(-3)).result(60) == 3
        (pid,) = pool.pids()
        pool.leave(jvm)
        until = time.monotonic() + 60
        while running(pid) and time.monotonic() < until:
            time.sleep(0.02)
        assert not running(pid)
        assert pool.pids() == []


def test_simulators_are_spread_over_the_jvms(java: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PER_JVM", 2)
    pool = Jvms(num_jvms=2)
    places = [pool.enter() for _ in range(5)]
    assert [places.count(place) for place in dict.fromkeys(places)] == [2, 2, 1]
    for place in places:
        pool.leave(place)
    pool.close()


def test_a_full_heap_ends_the_jvm_and_says_so(java: None) -> None:
    pool = Jvms(num_jvms=1, heap_mb=128)
    jvm = pool.enter()
    try:
        future = jvm.submit(lambda: jvm.gateway.jvm.java.util.ArrayList(1 << 30))
        with pytest.raises(WorldError, match="OutOfMemoryError"):
            future.result(60)
        assert pool.enter() is not jvm
        assert jvm.process is not None
        assert not running(jvm.process.pid)
    finally:
        pool.close()


def test_bad_sizes_are_refused() -> None:
    for bad in ({"num_jvms": 0}, {"heap_mb": 10}, {"num_jvms": True}, {"heap_mb": 1.5}):
        with pytest.raises(ConfigError, match="whole number"):
            Jvms(**bad)  # type: ignore[arg-type]


def test_a_coroutine_can_be_run_where_a_loop_runs_already() -> None:
    async def name() -> str:
        return threading.current_thread().name

    async def outer() -> str:
        return run_apart(name)

    assert asyncio.run(outer()) == "scienceworld-apart"

    async def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run_apart(fail)


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
