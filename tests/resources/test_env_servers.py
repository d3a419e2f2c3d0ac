"""Environment servers without a cluster: pools that span servers, a server that is lost, and the server's program."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import agentfly
from agentfly.errors import ConfigError, DeadlineError, ToolError, WorldError
from agentfly.fleet.launcher import SCRIPT
from agentfly.resources import Budget, ResourceManager, Spec, spec_of
from agentfly.resources.backends.http import on_servers
from agentfly.resources.directory import ServerAddress, ServerDirectory
from agentfly.resources.rpc.env_server import EnvServer
from agentfly.resources.rpc.frames import FrameReader, pack_message
from agentfly.resources.rpc.served_kind import kind_from, kind_value

from .worlds import TASK, Board, Chalk, Library, Once, Sickly, Worker, limit_calls, task

WAIT_S = 120
TOKEN = "a-long-token"


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await main()

    asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


@asynccontextmanager
async def hosts_of(*specs: Spec, count: int = 2) -> AsyncIterator[tuple[ServerDirectory, list[EnvServer]]]:
    """Hosts in this event loop, and a directory that names them."""
    kinds = [kind_from(kind_value(spec)) for spec in specs]
    servers = [EnvServer(kinds, most=None, token=TOKEN) for _ in range(count)]
    try:
        for server in servers:
            await server.__aenter__()
        addresses = [ServerAddress(f"server {number}", server.url) for number, server in enumerate(servers)]
        yield ServerDirectory(TOKEN, addresses), servers
    finally:
        for server in servers:
            await server.__aexit__(None, None, None)
        assert [server.lent for server in servers] == [0] * count


@asynccontextmanager
async def pools_of(
    *specs: Spec, count: int, budget: Budget | None = None
) -> AsyncIterator[tuple[ResourceManager, list[EnvServer]]]:
    """A resource manager whose pools span servers of this event loop."""
    async with AsyncExitStack() as stack:
        directory, servers = await stack.enter_async_context(hosts_of(*specs, count=count))
        manager = ResourceManager(budget, *(on_servers(spec, directory) for spec in specs))
        yield await stack.enter_async_context(manager), servers


def without(directory: ServerDirectory, name: str) -> list[ServerAddress]:
    return [server for server in directory.counts if server.name != name]


@pytest.mark.parametrize("placement", ["loop", "thread", "process"])
def test_an_environment_on_a_host_is_used_like_any_other(placement: str) -> None:
    spec = spec_of(Worker, placement=placement, max=3)

    async def main() -> None:
        async with hosts_of(spec) as (directory, _), ResourceManager(None, on_servers(spec, directory)) as manager:
            async with manager.lease([Worker], task(1)) as lease:
                assert lease.observation(Worker) == "board of task-1"
                assert await lease[Worker].write("a") == 1
                assert await lease.get(Worker, "notes") == ["a"]
                assert (await lease[Worker].picture()).image == b"\x89PNG"
                with pytest.raises(ToolError, match="for the model"):
                    await lease[Worker].fail("tool")
                with pytest.raises(TypeError, match="cannot leave"):
                    await lease[Worker].odd()
                with pytest.raises(AttributeError):
                    await lease.call(Worker, "nothing_like_it")
                assert (await lease[Worker].pid() == os.getpid()) is (placement != "process")
                assert isinstance(lease[Worker], Worker)
            async with manager.lease([Worker], task(2)) as lease:
                assert await lease[Worker].read() == []  # reset
            assert manager.metrics()["resources/Worker/failed"] == 0

    run(main)


def test_new_instances_go_to_the_host_with_the_fewest_and_kinds_share_the_hosts() -> None:
    boards, chalks = spec_of(Board, max=30), spec_of(Chalk, max=30)

    async def main() -> None:
        async with hosts_of(boards, chalks, count=3) as (directory, servers):
            async with ResourceManager(None, on_servers(boards, directory), on_servers(chalks, directory)) as manager:
                await manager.warm(Board, 30)
                await manager.warm(Chalk, 15)
                assert [server.lent for server in servers] == [15, 15, 15] == list(directory.counts.values())
                assert all(len(server._server.connections) == 2 for server in servers)  # one per pool, not per instance
            assert list(directory.counts.values()) == [0, 0, 0]
            await until(lambda: not any(server.lent for server in servers))

    run(main)


def test_the_environments_of_a_lost_host_fail_their_chains_and_are_replaced_elsewhere() -> None:
    spec = spec_of(Board, max=8)

    async def main() -> None:
        async with hosts_of(spec) as (directory, servers), ResourceManager(None, on_servers(spec, directory)) as manager:
            await manager.warm(Board, 8)
            leases = [await manager.acquire([Board], task(number), f"chain {number}") for number in range(8)]
            calls = [asyncio.ensure_future(lease[Board].linger(60)) for lease in leases]
            await until(lambda: all(lease.handles["Board"].busy for lease in leases))
            directory.update(without(directory, "server 0"), {"server 0": "was silent for 6.2 s"})
            await until(lambda: sum(call.done() for call in calls) >= 4)
            await asyncio.sleep(0.1)
            failed = [call for call in calls if call.done()]
            assert len(failed) == 4
            assert all("server 0 was silent for 6.2 s" in str(call.exception()) for call in failed)
            assert all(isinstance(call.exception(), WorldError) for call in failed)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            for lease in leases:
                await lease.release()
            again = [await manager.acquire([Board], task(number), f"again {number}") for number in range(8)]
            assert [server.lent for server in servers] == [0, 8]
            for lease in again:
                await lease.release()
            figures = manager.metrics()
            assert figures["resources/Board/allocated"] == 0
            assert figures["resources/Board/failed"] >= 4
            assert manager.holders() == {}

    run(main)


def test_a_host_that_joins_takes_over_its_share_as_environments_become_free() -> None:
    spec = spec_of(Board, max=24)

    async def main() -> None:
        async with hosts_of(spec, count=3) as (directory, servers):
            first, second, third = directory.counts
            directory.update([first, second])
            async with ResourceManager(None, on_servers(spec, directory), sweep_s=0.05) as manager:
                await manager.warm(Board, 24)
                held = [await manager.acquire([Board], task(number), f"chain {number}") for number in range(24)]
                assert list(directory.counts.values()) == [12, 12]
                directory.update([first, second, third])
                await asyncio.sleep(0.3)
                assert [await lease[Board].write("x") for lease in held] == [1] * 24  # nothing is taken from a chain
                for lease in held:
                    await lease.release()
                manager.expect(24)
                await until(lambda: [server.lent for server in servers] == [8, 8, 8])
                assert manager.metrics()["resources/Board/failed"] == 0
                assert manager.metrics()["resources/Board/recycled"] == 8

    run(main)


def test_a_chain_waits_for_a_host_while_there_is_none() -> None:
    spec = spec_of(Board, max=2)

    async def main() -> None:
        async with hosts_of(spec, count=1) as (directory, servers):
            (server,) = directory.counts
            async with ResourceManager(None, on_servers(spec, directory)) as manager:
                directory.update([])
                asked = asyncio.ensure_future(manager.acquire([Board], TASK, "a", WAIT_S))
                await asyncio.sleep(0.3)
                assert not asked.done()
                directory.update(
                    [ServerAddress("gone", "ws://127.0.0.1:1"), server]
                )  # one that cannot be reached is passed over
                lease = await asked
                await lease.release()
                assert servers[0].lent == 1

    run(main)


def test_a_connection_that_ends_by_itself_is_opened_again() -> None:
    spec = spec_of(Board, max=4)

    async def main() -> None:
        async with pools_of(spec, count=1) as (manager, servers):
            lease = await manager.acquire([Board], TASK, "a")
            for connection in list(servers[0]._server.connections):
                connection.transport.abort()
            with pytest.raises(WorldError, match="server 0 ended the connection"):
                await lease[Board].linger(30)
            await lease.release()
            async with manager.lease([Board], TASK, "b") as lease:
                assert await lease[Board].write("x") == 1

    run(main)


def test_an_environment_that_dies_on_its_host_takes_no_other_with_it() -> None:
    spec = spec_of(Worker, max=2)

    async def main() -> None:
        async with pools_of(spec, count=1) as (manager, _):
            first = await manager.acquire([Worker], TASK, "a")
            second = await manager.acquire([Worker], TASK, "b")
            with pytest.raises(WorldError, match="killed by SIGKILL"):
                await first[Worker].die()
            assert await second[Worker].write("x") == 1
            await first.release()
            async with manager.lease([Worker], TASK, "c") as third:
                assert await third[Worker].write("y") == 1
            await second.release()

    run(main)


def test_an_idle_environment_that_dies_is_not_lent() -> None:
    spec = spec_of(Worker, max=1)

    async def main() -> None:
        async with pools_of(spec, count=1) as (manager, _):
            async with manager.lease([Worker], TASK, "a") as lease:
                pid = await lease[Worker].pid()
            os.kill(pid, signal.SIGKILL)
            await until(lambda: manager.metrics()["resources/Worker/failed"] == 1)
            async with manager.lease([Worker], TASK, "b") as lease:
                assert await lease[Worker].pid() != pid

    run(main)


@pytest.mark.parametrize("placement", ["loop", "thread", "process"])
def test_a_call_that_is_too_late_costs_its_environment_and_no_other(placement: str) -> None:
    spec = spec_of(Board, placement=placement, max=2)

    async def main() -> None:
        async with pools_of(spec, count=1) as (manager, servers):
            first, second = await manager.acquire([Board], TASK, "a"), await manager.acquire([Board], TASK, "b")
            limit_calls(first, Board, 0.3)
            with pytest.raises(DeadlineError):
                await first[Board].linger(60)
            assert await second[Board].write("x") == 1
            await first.release()
            await second.release()
            async with manager.lease([Board], TASK, "c") as third, manager.lease([Board], TASK, "d") as fourth:
                assert [await each[Board].write("y") for each in (third, fourth)] == [1, 1]
            assert servers[0].lent == 2

    run(main)


def test_single_use_shared_and_sick_environments_behave_as_elsewhere() -> None:
    kinds = [spec_of(Once, max=2), spec_of(Library, max=1), spec_of(Sickly, max=1)]

    async def main() -> None:
        async with pools_of(*kinds, count=2, budget=Budget(cpu=10)) as (manager, _):
            for number in range(3):
                async with manager.lease([Once, Sickly], task(number)) as lease:
                    assert await lease[Once].write("x") == 1
            shared = [await manager.acquire([Library], TASK, f"chain {number}") for number in range(3)]
            assert [await lease[Library].write("x") for lease in shared] == [1, 2, 3]
            for lease in shared:
                await lease.release()
            assert manager.metrics()["resources/Once/recycled"] == 3

    run(main)


def test_a_reset_that_fails_and_a_start_that_fails_are_told() -> None:
    spec = spec_of(Board, max=1)

    async def main() -> None:
        async with hosts_of(spec, count=1) as (directory, _):
            async with ResourceManager(None, on_servers(spec, directory)) as manager:
                with pytest.raises(WorldError, match="no such board"):
                    await manager.acquire([Board], agentfly.Task("t", (), {"refuse": True}), "a")
            unknown = spec_of(Chalk, max=1)
            async with ResourceManager(None, on_servers(unknown, directory)) as manager:
                with pytest.raises(WorldError, match="cannot be created here"):
                    await manager.acquire([Chalk], TASK, "a", 30)

    run(main)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (lambda: spec_of(Board, placement="process", max_growth_mb=5), "growth is not measured there"),
        (lambda: spec_of(lambda: Board(), name="made"), "defined inside a function"),
        (lambda: spec_of(Board, options={}, placement="servers"), "set by cluster.env_hosts"),
    ],
)
def test_what_cannot_live_on_a_host_is_refused(spec: Callable[[], Spec], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        on_servers(spec(), ServerDirectory(TOKEN))


def test_environments_of_a_server_stay_there() -> None:
    spec = spec_of(Board, placement="http", url="ws://127.0.0.1:1")
    assert on_servers(spec, ServerDirectory(TOKEN)) is spec


def test_a_wrong_token_is_refused() -> None:
    spec = spec_of(Board, max=1)

    async def main() -> None:
        async with hosts_of(spec, count=1) as (directory, _):
            directory.token = "another-token"
            async with ResourceManager(None, on_servers(spec, directory)) as manager:
                with pytest.raises(ConfigError, match="the token is missing or wrong"):
                    await manager.acquire([Board], TASK, "a", 30)

    run(main)


# ---- the program


class Trainer:
    """The trainer's end of a server's connection, without a fleet."""

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.settimeout(60)
        self.reader = FrameReader()
        root = Path(__file__).parents[2]
        self.ticket = {
            "path": [str(root), *sys.path], "here": "127.0.0.1", "token": "trainer-token", "name": "environment server 0",
            "index": 0, "attempt": 0, "health_s": 6.0, "address": ["127.0.0.1", self.server.getsockname()[1]],
            "program": "agentfly.training.cluster.env_server_process:serve",
        }  # fmt: skip

    def open(self, *kinds: dict[str, Any]) -> None:
        """Let the process connect, and tell it what to lend."""
        self.connection, _ = self.server.accept()
        self.connection.settimeout(60)
        assert self.next("hello")["token"] == "trainer-token"
        self.send("open", 7, {"kinds": list(kinds), "token": TOKEN})

    def next(self, kind: str) -> Any:
        """The value of the next message of this kind."""
        while True:
            for found, _, value in self.reader.values(self.connection.recv(1 << 16)):
                if found == kind:
                    return value

    def send(self, kind: str, number: int = 0, value: Any = None) -> None:
        self.connection.sendall(pack_message([kind, number, value]))


def start(trainer: Trainer) -> subprocess.Popen[bytes]:
    life = os.pipe()[0]
    words = [sys.executable, "-I", str(SCRIPT), str(life), str(os.getpid()), "environment-server-0"]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True, pass_fds=(life,))
    assert process.stdin is not None
    with process.stdin as stdin:
        stdin.write(json.dumps(trainer.ticket).encode())
    return process


def test_the_program_says_where_it_lends_reports_and_stops() -> None:
    trainer, spec = Trainer(), spec_of(Worker, max=2)
    process = start(trainer)
    try:
        trainer.open(kind_value(spec))
        url = trainer.next("reply")
        assert trainer.next("status") == {"instances": 0}

        async def main() -> None:
            directory = ServerDirectory(TOKEN, [ServerAddress("server", url)])
            async with ResourceManager(None, on_servers(spec, directory)) as manager, manager.lease([Worker], TASK) as lease:
                assert await lease[Worker].pid() not in (os.getpid(), process.pid)
                while (await asyncio.to_thread(trainer.next, "status"))["instances"] != 1:
                    continue

        run(main)
        trainer.send("stop")
        assert process.wait(30) == 0
    finally:
        process.kill()


def test_the_program_ends_with_its_trainer() -> None:
    trainer = Trainer()
    process = start(trainer)
    try:
        trainer.open(kind_value(spec_of(Board)))
        trainer.next("reply")
        trainer.connection.close()
        assert process.wait(30) == -signal.SIGKILL  # with its group
    finally:
        process.kill()


def test_the_program_names_what_this_machine_lacks() -> None:
    trainer = Trainer()
    process = start(trainer)
    try:
        trainer.open({**kind_value(spec_of(Board)), "target": "no_such_package_here.env:Board"})
        name, text, _ = trainer.next("error")
        assert name in ("ConfigError", "UnknownName", "MissingExtra")
        assert "no_such_package_here" in text
    finally:
        process.kill()
        process.wait(30)


def test_a_host_whose_event_loop_is_blocked_still_beats_and_sends_no_status() -> None:
    trainer, spec = Trainer(), spec_of(Board, placement="loop", max=1)
    process = start(trainer)
    try:
        trainer.open(kind_value(spec))
        url = trainer.next("reply")

        async def main() -> None:
            directory = ServerDirectory(TOKEN, [ServerAddress("server", url)])
            async with ResourceManager(None, on_servers(spec, directory)) as manager, manager.lease([Board], TASK) as lease:
                blocked = asyncio.ensure_future(lease[Board].block(5.0))
                while await asyncio.to_thread(kinds_in_a_second, trainer) != {"beat"}:
                    assert not blocked.done()
                assert await blocked == "done"
                assert await asyncio.to_thread(trainer.next, "status") is not None

        run(main)
    finally:
        process.kill()
        process.wait(30)


def kinds_in_a_second(trainer: Trainer) -> set[str]:
    """What a process that beats once a second sends until its second beat."""
    kinds: list[str] = []
    while kinds.count("beat") < 2:
        kinds += [kind for kind, _, _ in trainer.reader.values(trainer.connection.recv(1 << 16))]
    return set(kinds)
