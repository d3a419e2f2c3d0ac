"""Placements `loop`, `thread` and `process`: calls, crashes, and that no process, file or thread is left behind."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentfly.aio.threads import run_in_thread
from agentfly.errors import ConfigError, DeadlineError, ToolError, WorldError
from agentfly.faults import kill_worker
from agentfly.resources import Lease, ResourceManager, spec_of
from agentfly.resources.backends.spawn import SPAWNER, WorkerProcess
from agentfly.resources.rpc.frames import RemoteError
from agentfly.testing import GuessEnv
from agentfly.types import Message, Task, ToolCall, ToolResult

from .worlds import TASK, THREADS_OF_THE_PROCESS, Board, NeverUp, SlowUp, Worker, exists, limit_calls, soon_gone, task

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
WAIT_S = 120


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


def children() -> set[int]:
    mine = os.getpid()
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == mine:
                found.add(int(entry.name))
        except (OSError, ValueError):
            continue
    return found


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """No process, descriptor, thread or directory outlives a test."""
    before = children(), len(os.listdir("/proc/self/fd")), set(threading.enumerate())

    def left() -> list[str]:
        # Threads of the tools' own pool stay a while to be used again; they hold no environment.
        new = set(threading.enumerate()) - before[2]
        return [
            thread.name for thread in new if thread.name.startswith("agentfly-") and thread.name not in THREADS_OF_THE_PROCESS
        ]

    yield
    until = time.monotonic() + 60
    while time.monotonic() < until and left():
        time.sleep(0.01)
    assert left() == []
    assert children() == before[0]
    assert len(os.listdir("/proc/self/fd")) <= before[1]
    assert SPAWNER._home is None or not SPAWNER._home.exists()


@pytest.mark.parametrize("placement", ["loop", "thread", "process"])
def test_sync_tools_work_the_same_in_every_placement(placement: str) -> None:
    def tool(board: Board) -> tuple[int, list[str]]:
        return board.write("note"), board.notes  # a method and an attribute

    async def main() -> None:
        async with ResourceManager(None, spec_of(Board, placement=placement)) as manager:
            async with manager.lease([Board], task(3)) as lease:
                assert lease.observation(Board) == "board of task-3"
                assert await asyncio.to_thread(tool, lease[Board]) == (1, ["note"])
                assert await lease.call(Board, "write", note="more") == 2
                assert await lease.get(Board, "notes") == ["note", "more"]
                assert await lease[Board].linger(0) == "done"
            async with manager.lease([Board], task(4)) as lease:
                assert await lease.call(Board, "read") == []

    run(main)


@pytest.mark.parametrize("placement", ["thread", "process"])
def test_a_blocking_call_does_not_block_the_loop_and_ends_at_its_deadline(placement: str) -> None:
    async def main() -> None:
        async with ResourceManager(None, spec_of(Board, placement=placement, max=1)) as manager:
            lease = await manager.acquire([Board], TASK, "c")
            limit_calls(lease, Board, 1.0)
            turns = 0
            call = asyncio.ensure_future(lease[Board].block(60))
            while not call.done():
                await asyncio.sleep(0.005)
                turns += 1
            with pytest.raises(DeadlineError):
                await call
            assert turns > 1, "a loop that is blocked turns once, after the call"
            with pytest.raises(WorldError):
                await lease.call(Board, "read")
            async with manager.lease([Board], TASK, "next", WAIT_S) as other:  # served before the first one released
                assert await other.call(Board, "read") == []
            await lease.release()

    run(main)


@pytest.mark.parametrize("placement", ["loop", "thread", "process"])
def test_a_sync_tool_that_is_cancelled_inside_a_call_costs_the_instance_and_not_the_pool(placement: str) -> None:
    async def main() -> None:
        async with ResourceManager(None, spec_of(Board, placement=placement, max=1)) as manager:
            lease = await manager.acquire([Board], TASK, "c")
            board = lease[Board]
            tool = asyncio.create_task(run_in_thread(lambda: board.block(60)))
            async with asyncio.timeout(60):
                while not lease.handles["Board"].busy:
                    await asyncio.sleep(0.001)
            tool.cancel()
            await asyncio.wait([tool], timeout=WAIT_S)
            await lease.release()
            async with manager.lease([Board], TASK, "next", WAIT_S) as other:
                assert await other.call(Board, "read") == []
            assert manager.metrics()["resources/Board/failed"] == 1

    run(main)


def test_directories_of_dead_trainers_are_removed_and_those_of_living_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, living = tmp_path / "agentfly-workers-dead", tmp_path / "agentfly-workers-living"
    for home in (dead, living):
        home.mkdir()
        (home / "lock").touch()
    with (living / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        async def main() -> None:
            async with ResourceManager(None, Worker) as manager, manager.lease([Worker], TASK, "c", WAIT_S):
                assert len(os.listdir(tmp_path)) == 2  # the living one's and ours

        run(main)
        assert os.listdir(tmp_path) == [living.name]


def test_reading_an_attribute_from_the_loop_is_refused_and_the_error_names_the_cure() -> None:
    async def main() -> None:
        async with ResourceManager(None, spec_of(Board, placement="thread")) as manager, manager.lease([Board], TASK) as lease:
            with pytest.raises(AttributeError, match=r"await lease\.get\('Board', 'notes'\)"):
                _ = lease[Board].notes
            with pytest.raises(AttributeError, match="through a method"):
                lease[Board].notes = []

    run(main)


def test_a_crash_ends_one_worker_and_the_error_says_how() -> None:
    async def main() -> None:
        async with ResourceManager(None, spec_of(Worker, max=2)) as manager:
            one, two = [await manager.acquire([Worker], TASK, name, 30) for name in ("one", "two")]
            waiting = asyncio.create_task(manager.acquire([Worker], TASK, "three", WAIT_S))
            with pytest.raises(WorldError, match=r"Worker: its worker process ended \(killed by SIGKILL\)"):
                await one.call(Worker, "die")
            three = await waiting  # its place was taken at once
            assert await two.call(Worker, "write", "still here") == 1
            with pytest.raises(WorldError, match="ended"):
                await one.call(Worker, "read")
            with pytest.raises(WorldError, match="exit code 3"):
                await three.call(Worker, "leave", 3)
            for lease in (one, two, three):
                await lease.release()
            assert kill_worker(manager, Worker) is not None
            async with manager.lease([Worker], TASK, "four", WAIT_S) as lease:
                assert await lease.call(Worker, "read") == []

    run(main)


def test_values_travel_unchanged_and_errors_by_name() -> None:
    rich = Task(
        "ü", (Message("user", "hi"), Message("assistant", "", (ToolCall("f", {"a": 1}, "1"),))), {"x": [1, {"y": None}]}
    )

    async def main() -> None:
        async with (
            ResourceManager(None, spec_of(Worker, max=1)) as manager,
            manager.lease([Worker], rich, "c", WAIT_S) as lease,
        ):
            worker = lease[Worker]
            assert (await worker.picture()) == ToolResult(observation="a picture", image=b"\x89PNG", reward=0.5, done=True)
            assert await worker.write("\ud800 half a pair") == 1
            assert await worker.read() == ["\ud800 half a pair"]
            with pytest.raises(TypeError, match="a set has no encoded form; return text"):
                await worker.odd()
            with pytest.raises(TypeError, match="the key 1 of a dict is not a string"):
                await worker.numbered()
            with pytest.raises(TypeError, match=r"an argument of Worker\.write cannot travel.*a object has no encoded form"):
                await worker.write(object())
            with pytest.raises(ToolError, match="for the model to read"):
                await worker.fail("tool")
            with pytest.raises(ValueError, match="not that"):
                await worker.fail("value")
            with pytest.raises(RemoteError, match="Strange: very odd"):
                await worker.fail("strange")
            assert await worker.read() == ["\ud800 half a pair"]  # none of this has hurt it

    run(main)


def test_a_worker_sees_no_secret_and_its_files_are_removed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "canary")
    monkeypatch.setenv("ALLOWED", "yes")

    async def main() -> None:
        async with ResourceManager(None, spec_of(Worker, pass_env=("ALLOWED",))) as manager:
            async with manager.lease([Worker], TASK, "c", WAIT_S) as lease:
                environment = await lease.call(Worker, "environment")
                littered = await lease.call(Worker, "litter")
                child = await lease.call(Worker, "spawn_child")
                assert exists(child)
            assert "canary" not in str(environment)
            assert environment["ALLOWED"] == "yes"
            assert os.access(littered, os.F_OK)
        assert not os.access(littered, os.F_OK)
        assert soon_gone([child])

    run(main)


def test_several_instances_share_a_process_and_one_that_hangs_does_not_hold_up_the_others() -> None:
    async def main() -> None:
        async with ResourceManager(None, spec_of(Worker, max=4, per_process=4)) as manager:
            leases = [await manager.acquire([Worker], TASK, f"c{n}", WAIT_S) for n in range(3)]
            pids = {await lease.call(Worker, "pid") for lease in leases}
            assert len(pids) == 1
            limit_calls(leases[0], Worker, 1.0)
            hanging = asyncio.ensure_future(leases[0][Worker].block(600))
            assert await leases[1].call(Worker, "write", "on") == 1
            with pytest.raises(DeadlineError):
                await hanging
            assert await leases[2].call(Worker, "write", "and on") == 1
            fresh = await manager.acquire([Worker], TASK, "new", WAIT_S)
            assert await fresh.call(Worker, "pid") not in pids  # the process of the one that hung takes no new ones
            for lease in (*leases, fresh):
                await lease.release()

    run(main)


def test_a_worker_that_grows_is_replaced() -> None:
    async def main() -> None:
        async with ResourceManager(None, spec_of(Worker, max=1, max_growth_mb=20)) as manager:
            pids = []
            for megabytes in (0, 1, 40, 0):
                async with manager.lease([Worker], TASK, "c", WAIT_S) as lease:
                    pids.append(await lease.call(Worker, "pid"))
                    await lease.call(Worker, "hoard", megabytes)
            assert pids[0] == pids[1] == pids[2] != pids[3]
            assert manager.metrics()["resources/Worker/recycled"] == 1

    run(main)


@pytest.mark.parametrize("placement", ["thread", "process"])
def test_a_worker_that_does_not_start_is_terminated(placement: str) -> None:
    async def main() -> None:
        specs = (spec_of(NeverUp, placement=placement), spec_of(SlowUp, placement=placement, start_timeout_s=1.0))
        async with ResourceManager(None, *specs) as manager:
            with pytest.raises(WorldError, match="NeverUp did not start: RuntimeError: the display is missing"):
                await manager.acquire([NeverUp], TASK, "a", WAIT_S)
            if placement == "process":  # a thread that sleeps for half a minute cannot be ended, as its documentation says
                with pytest.raises(WorldError, match="SlowUp did not come up within 1 s"):
                    await manager.acquire([SlowUp], TASK, "b", WAIT_S)

    run(main)


@pytest.mark.parametrize("pause_s", [0, 0.01, 0.1])
def test_closing_while_workers_start_leaves_none_of_them(pause_s: float) -> None:
    async def main() -> None:
        async with ResourceManager(
            None, spec_of(Worker, max=3), spec_of(Worker, name="shared", per_process=3, max=3)
        ) as manager:
            manager.expect(3)
            waiting = asyncio.create_task(manager.acquire([Worker], TASK, "c", WAIT_S))
            await asyncio.sleep(pause_s)
        (found,) = await asyncio.gather(waiting, return_exceptions=True)
        assert isinstance(found, Lease) or (isinstance(found, WorldError) and "closed" in str(found)), found

    run(main)


def test_an_environment_that_no_worker_can_import_is_refused_before_the_run() -> None:
    class Local(Board):
        pass

    with pytest.raises(ConfigError, match="is defined inside a function"):
        ResourceManager(None, spec_of(Local, placement="process"))
    with pytest.raises(ConfigError, match="options for a worker process must have a JSON form"):
        ResourceManager(None, spec_of(GuessEnv, placement="process", options={"n": object()}))


def test_a_worker_whose_socket_is_closed_ends_its_children_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the trainer dies and the kernel closes the socket first."""
    monkeypatch.setattr(WorkerProcess, "kill", lambda self: None)

    async def main() -> int:
        async with ResourceManager(None, spec_of(Worker, max=1)) as manager:
            lease = await manager.acquire([Worker], TASK, "c", 60)
            return int(await lease.call(Worker, "spawn_child"))

    assert soon_gone({asyncio.run(main())})


def test_sigkill_of_the_trainer_leaves_no_process(tmp_path: Path) -> None:
    program = """
import asyncio, os, sys
from agentfly.resources import ResourceManager, spec_of
from tests.resources.worlds import TASK, Worker

async def main():
    manager = ResourceManager(None, spec_of(Worker, max=3), spec_of(Worker, name="shared", per_process=2, max=2))
    leases = [await manager.acquire([kind], TASK, f"c{n}", 60) for n, kind in enumerate([Worker, Worker, "shared", "shared"])]
    pids = [await lease.call(kind, "pid") for lease, kind in zip(leases, [Worker, Worker, "shared", "shared"])]
    pids.append(await leases[0].call(Worker, "spawn_child"))
    print(*pids, flush=True)
    await asyncio.gather(leases[1][Worker].block(600), asyncio.sleep(600))  # one of them is busy

asyncio.run(main())
"""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'src'}", "TMPDIR": str(tmp_path)}
    trainer = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
    )
    assert trainer.stdout is not None
    pids = {int(pid) for pid in trainer.stdout.readline().split()}
    assert len(pids) == 4
    assert all(exists(pid) for pid in pids)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait(WAIT_S)
    trainer.stdout.close()
    assert soon_gone(pids)
