"""Placements `sandbox`, `container` and `http`: an environment behaves as in this process, fails alone, and leaves nothing."""

from __future__ import annotations

import asyncio
import json
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

from agentfly.errors import DeadlineError, ToolError, WorldError
from agentfly.faults import FaultSchedule, faulty
from agentfly.resources import Lease, ResourceManager, spec_of
from agentfly.resources.rpc.frames import RemoteError
from agentfly.types import ToolResult

from .far import CONTAINERS, PLACES, Far, ServerThread, far_place, processes
from .worlds import TASK, THREADS_OF_THE_PROCESS, NeverUp, Worker, exists, soon_gone, task

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
WAIT_S = 120


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process, descriptor, thread or directory outlives a test."""
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = processes(), len(os.listdir("/proc/self/fd"))
    yield

    def left() -> dict[str, Any]:
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith(("agentfly-", "env-", "fake-"))]
        return {
            "processes": {pid for pid in processes() - before[0] if exists(pid)},
            "threads": [name for name in names if name not in THREADS_OF_THE_PROCESS],
            "descriptors": max(0, len(os.listdir("/proc/self/fd")) - before[1]),
            "folders": os.listdir(folder),
        }

    until = time.monotonic() + 60
    while any(left().values()) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(left().values()), left()


@pytest.fixture(params=PLACES)
def far(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Far]:
    with far_place(request.param, tmp_path) as place:
        yield place


def test_tools_work_the_same_and_values_travel_unchanged_and_errors_by_name(far: Far) -> None:
    def tool(board: Worker) -> tuple[int, list[str]]:
        return board.write("note"), board.notes  # a method and an attribute

    async def main() -> None:
        async with ResourceManager(None, far.spec(Worker, max=1)) as manager:
            async with manager.lease([Worker], task(3), "c", WAIT_S) as lease:
                worker = lease[Worker]
                assert lease.observation(Worker) == "board of task-3"
                assert await asyncio.to_thread(tool, worker) == (1, ["note"])
                assert await worker.linger(0) == "done"
                assert await worker.picture() == ToolResult(observation="a picture", image=b"\x89PNG", reward=0.5, done=True)
                long = "\ud800 half a pair" + "x" * 2_000_000
                assert await worker.write(long) == 2
                assert await worker.read() == ["note", long]
                with pytest.raises(TypeError, match="a set has no encoded form; return text"):
                    await worker.odd()
                with pytest.raises(TypeError, match=r"argument of Worker\.write cannot travel.*a object has no encoded form"):
                    await worker.write(object())
                with pytest.raises(ToolError, match="for the model to read"):
                    await worker.fail("tool")
                with pytest.raises(RemoteError, match="Strange: very odd"):
                    await worker.fail("strange")
                first = await worker.pid()
            async with manager.lease([Worker], task(4), "d", WAIT_S) as lease:
                assert await lease.call(Worker, "read") == []  # reset, and
                assert await lease.call(Worker, "pid") == first  # the same instance

    run(main)


def test_a_blocking_call_does_not_block_the_loop_and_ends_at_its_limit(far: Far) -> None:
    async def main() -> None:
        async with ResourceManager(None, far.spec(Worker, max=1, limit_s=1.0)) as manager:
            lease = await manager.acquire([Worker], TASK, "c", WAIT_S)
            turns = 0
            call = asyncio.ensure_future(lease[Worker].block(600))
            while not call.done():
                await asyncio.sleep(0.005)
                turns += 1
            with pytest.raises(DeadlineError, match=r"Worker\.block took longer than 1 s"):
                await call
            assert turns > 1, "a loop that is blocked turns once, after the call"
            async with manager.lease([Worker], TASK, "next", WAIT_S) as other:  # served before the first one released
                assert other.observation(Worker) == "board of t"
            await lease.release()

    run(main)


def test_a_crash_ends_one_instance_says_how_and_another_one_replaces_it(far: Far) -> None:
    async def main() -> None:
        async with ResourceManager(None, far.spec(Worker, max=2)) as manager:
            one, two = [await manager.acquire([Worker], TASK, name, WAIT_S) for name in ("one", "two")]
            waiting = asyncio.create_task(manager.acquire([Worker], TASK, "three", WAIT_S))
            with pytest.raises(WorldError, match=r"Worker: its .*(exit code 3|exited with code 3)"):
                await one.call(Worker, "leave", 3)
            three = await waiting
            assert await two.call(Worker, "write", "still here") == 1
            assert await three.call(Worker, "read") == []
            for lease in (one, two, three):
                await lease.release()
            assert manager.metrics()["resources/Worker/failed"] == 1

    run(main)


def test_an_environment_that_does_not_start_is_one_sentence(far: Far) -> None:
    async def main() -> None:
        async with ResourceManager(None, far.spec(NeverUp)) as manager:
            with pytest.raises(WorldError, match="NeverUp did not start: RuntimeError: the display is missing"):
                await manager.acquire([NeverUp], TASK, "a", WAIT_S)

    run(main)


@pytest.mark.parametrize("name", ["sandbox", *CONTAINERS])
def test_a_worker_sees_no_secret_of_the_trainer_but_the_variables_that_are_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "canary")
    monkeypatch.setenv("ALLOWED", "yes")

    async def main(far: Far) -> None:
        manager = ResourceManager(None, far.spec(Worker, pass_env=("ALLOWED",)))
        async with manager, manager.lease([Worker], TASK, "c", WAIT_S) as lease:
            environment = await lease.call(Worker, "environment")
        assert "canary" not in str(environment)
        assert environment["ALLOWED"] == "yes"

    with far_place(name, tmp_path) as far:
        asyncio.run(main(far))


@pytest.mark.parametrize("name", ["sandbox", *CONTAINERS])
def test_several_instances_share_one_worker(name: str, tmp_path: Path) -> None:
    async def main(far: Far) -> None:
        async with ResourceManager(None, far.spec(Worker, max=2, per_process=2)) as manager:
            leases = [await manager.acquire([Worker], TASK, holder, WAIT_S) for holder in ("one", "two")]
            assert len({await lease.call(Worker, "pid") for lease in leases}) == 1
            assert await leases[0].call(Worker, "write", "mine") == 1
            assert await leases[1].call(Worker, "read") == []
            for lease in leases:
                await lease.release()
        assert far.docker is None or len(far.docker.configs) == 1

    with far_place(name, tmp_path) as far:
        asyncio.run(main(far))


@pytest.mark.parametrize("kind", ["kill", "corrupt", "hang"])
def test_faults_happen_in_a_sandbox_too_and_the_next_chain_is_served(kind: str) -> None:
    world = faulty(Worker, FaultSchedule(0, {kind: 1.0}, spare=("close", "reset")))

    async def main() -> None:
        spec = spec_of(world, placement="sandbox", max=1, limit_s=1.0)
        async with ResourceManager(None, spec) as manager:
            async with manager.lease([world], TASK, "one", WAIT_S) as lease:
                with pytest.raises(DeadlineError if kind == "hang" else WorldError):
                    await lease.call(world, "write", "x")
            async with manager.lease([world], TASK, "two", WAIT_S) as lease:
                assert lease.observation(world) == "board of t"

    run(main)


def test_closing_while_instances_start_leaves_none_of_them(far: Far) -> None:
    async def main(pause_s: float) -> None:
        async with ResourceManager(None, spec_of(Worker, max=2, **settings)) as manager:
            manager.expect(2)
            waiting = asyncio.create_task(manager.acquire([Worker], TASK, "c", WAIT_S))
            await asyncio.sleep(pause_s)
        (found,) = await asyncio.gather(waiting, return_exceptions=True)
        assert isinstance(found, Lease) or (isinstance(found, WorldError) and "closed" in str(found)), found

    settings = far.settings(Worker)
    for pause_s in (0, 0.02, 0.15):
        asyncio.run(main(pause_s))


PROGRAM = """
import asyncio, json, sys
from agentfly.resources import ResourceManager, spec_of
from tests.resources.worlds import TASK, Worker

async def main():
    manager = ResourceManager(None, spec_of(Worker, max=2, **json.loads(sys.argv[1])))
    one, two = [await manager.acquire([Worker], TASK, name, 120) for name in ("one", "two")]
    await one.call(Worker, "spawn_child")
    print("ready", flush=True)
    await asyncio.gather(two[Worker].block(600), asyncio.sleep(600))  # one of them is busy

asyncio.run(main())
"""


def test_sigkill_of_the_trainer_leaves_nothing(far: Far, tmp_path: Path) -> None:
    settings = far.settings(Worker)
    root = Path(__file__).parents[2]
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'src'}", "TMPDIR": str(temporary)}
    before = processes()
    trainer = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(settings)], stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
    )
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "ready\n"
    started = processes() - before - {trainer.pid}
    assert len(started) >= 3  # two workers and the child of one
    trainer.send_signal(signal.SIGKILL)
    trainer.wait(60)
    trainer.stdout.close()
    assert soon_gone(started)
    if far.docker is not None:
        until = time.monotonic() + 60
        while far.docker.containers and time.monotonic() < until:
            time.sleep(0.02)
        assert not far.docker.containers


def test_a_server_that_is_killed_is_a_world_failure_and_the_next_one_is_found(tmp_path: Path) -> None:
    """The server is another process; a second one takes its address."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'src'}"}

    def start(port: int) -> tuple[subprocess.Popen[str], int]:
        words = [sys.executable, "-m", "agentfly", "envs", "serve", "tests.resources.worlds:Worker", "--port", str(port)]
        server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path)
        assert server.stdout is not None
        line = server.stdout.readline()
        assert "serving Worker at ws://127.0.0.1:" in line
        return server, int(line.split("ws://127.0.0.1:")[1].split(":")[0])

    async def main() -> None:
        server, port = start(0)
        try:
            spec = spec_of(Worker, placement="http", url=f"ws://127.0.0.1:{port}", max=1)
            async with ResourceManager(None, spec) as manager:
                lease = await manager.acquire([Worker], TASK, "a", WAIT_S)
                pid = await lease.call(Worker, "pid")
                call = asyncio.ensure_future(lease[Worker].linger(600))
                await asyncio.sleep(0)
                server.kill()
                with pytest.raises(WorldError, match="its server ended the connection"):
                    await call
                await lease.release()
                assert await asyncio.to_thread(soon_gone, [pid])
                await asyncio.to_thread(server.wait, 60)
                assert server.stdout is not None
                server.stdout.close()
                server, _ = await asyncio.to_thread(start, port)
                async with manager.lease([Worker], TASK, "b", WAIT_S) as other:
                    assert other.observation(Worker) == "board of t"
        finally:
            server.terminate()
            server.wait(60)
            assert server.stdout is not None
            server.stdout.close()

    run(main)


def test_an_instance_is_closed_when_its_client_disconnects() -> None:
    async def main() -> None:
        with ServerThread(Worker, most=1) as server:
            pids = []
            for _ in range(2):
                manager = ResourceManager(None, spec_of(Worker, placement="http", url=server.url, max=1))
                async with manager, manager.lease([Worker], TASK, "a", WAIT_S) as lease:
                    pids.append(await lease.call(Worker, "pid"))
                    assert server.server.lent == 1
                assert await asyncio.to_thread(soon_gone, pids)
            assert len(set(pids)) == 2

    run(main)
