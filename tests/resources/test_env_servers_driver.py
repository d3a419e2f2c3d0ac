"""The driver of environment servers, with processes of this machine in place of a cluster's nodes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import agentfly
from agentfly.errors import ConfigError, EngineError, WorldError
from agentfly.fleet.bare import software
from agentfly.fleet.node_launcher import NodeLauncher
from agentfly.resources import ResourceManager, spec_of
from agentfly.resources.backends.http import on_servers
from agentfly.resources.directory import ServerDirectory
from agentfly.training.cluster.env_servers import EnvServers

from .test_env_servers import run, until
from .worlds import Board, Worker, task

WAIT_S = 120
LIFE = os.pipe()


@dataclass(frozen=True)
class LocalNode:
    id: str
    name: str
    address: str = "127.0.0.1"


class LocalProcess:
    def __init__(self, reservation: LocalReservation, popen: subprocess.Popen[bytes]) -> None:
        self.reservation, self.popen, self.node = reservation, popen, reservation.node.name

    def ended(self) -> str | None:
        if self.reservation.lost is not None:
            return f"with its node {self.node} ({self.reservation.lost})"
        code = self.popen.poll()
        return None if code is None else f"(exit code {code})"

    def kill(self) -> None:
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait(10)


class LocalReservation:
    """A reservation whose node is this machine."""

    def __init__(self, name: str, node: LocalNode, about: Mapping[str, Any]) -> None:
        self.name, self.node, self.about = name, node, dict(about)
        self.processes: list[LocalProcess] = []
        self.lost: str | None = None

    def ask(self, what: str, *values: Any, timeout_s: float = 10.0) -> str:
        if self.lost is not None:
            raise EngineError(f"{self.name} is lost: {self.lost}")
        return ""  # no reason why it could not reach this process

    def run(
        self, words: Sequence[str], *, environ: Mapping[str, str | None] | None = None, stdin: bytes = b"", log: str = ""
    ) -> LocalProcess:
        life, parent = words.index("{life}"), str(os.getpid())
        popen = subprocess.Popen(
            [*words[:life], str(LIFE[0]), parent, *words[life + 2 :]], stdin=subprocess.PIPE, start_new_session=True,
            cwd=self.about["folder"], pass_fds=(LIFE[0],),
        )  # fmt: skip
        assert popen.stdin is not None
        with popen.stdin as pipe:
            pipe.write(stdin)
        self.processes.append(LocalProcess(self, popen))
        return self.processes[-1]

    def close(self) -> None:
        for process in self.processes:
            process.kill()


@dataclass
class LocalCluster:
    """As many nodes as are asked for. `room` False: no node is free now."""

    own: LocalNode = field(default_factory=lambda: LocalNode("own", "own"))
    reservations: list[LocalReservation] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)
    room: bool = True
    lock: Any = field(default_factory=threading.Lock)

    def reserve(self, name: str, share: Any, *, avoid: Collection[str] = (), timeout_s: float = 60.0) -> LocalReservation:
        with self.lock:
            if not self.room:
                raise EngineError(f"no node is free for {name}")
            number = len(self.reservations)
            about = {
                "python": sys.executable,
                "path": [str(Path(__file__).parents[2]), *sys.path],
                "address": "127.0.0.1",
                "agentfly": str(Path(agentfly.__file__).parent),
                "software": software(),
                "folder": os.getcwd(),
                **self.about,
            }
            self.reservations.append(LocalReservation(name, LocalNode(f"id-{number}", f"n{number}"), about))
            return self.reservations[-1]

    def note(self, sentence: str) -> None: ...
    def doubt(self, node: LocalNode) -> None: ...
    def suspect(self, node: LocalNode) -> None: ...

    def pids(self) -> list[int]:
        return [
            process.popen.pid
            for reservation in self.reservations
            for process in reservation.processes
            if process.popen.poll() is None
        ]


def env_servers(cluster: LocalCluster, spec: Any, count: int, **settings: Any) -> EnvServers:
    share: Any = None
    launcher = NodeLauncher(cluster, share)  # type: ignore[arg-type]
    return EnvServers(launcher, [spec], count, "127.0.0.1", **settings)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_host_that_dies_is_placed_again_and_every_process_hears_of_it(how: signal.Signals) -> None:
    spec, cluster = spec_of(Board, max=6), LocalCluster()
    notes: list[str] = []
    other = ServerDirectory()  # of another process that runs chains

    async def main() -> None:
        servers = env_servers(cluster, spec, 2, health_s=2.0, note=notes.append, on_change=other.take)
        async with servers, ResourceManager(None, on_servers(spec, servers.directory)) as manager:
            assert list(other.counts) == list(servers.directory.counts)
            leases = [await manager.acquire([Board], task(number), f"chain {number}") for number in range(6)]
            calls = [asyncio.ensure_future(lease[Board].linger(60)) for lease in leases]
            await until(lambda: all(lease.handles["Board"].busy for lease in leases))
            victim = cluster.pids()[0]
            os.kill(victim, how)
            await until(lambda: sum(call.done() for call in calls) == 3)
            told = {str(call.exception()) for call in calls if call.done()}
            assert all(isinstance(call.exception(), WorldError) for call in calls if call.done())
            assert all("environment server" in text for text in told)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            for lease in leases:
                await lease.release()
            await until(lambda: servers.fleet.restarts == 1 and len(servers.fleet.live) == 2)
            assert list(other.counts) == list(servers.directory.counts)
            assert victim not in cluster.pids()
            again = [await manager.acquire([Board], task(number), f"again {number}") for number in range(6)]
            assert min(servers.directory.counts.values()) >= 1
            for lease in again:
                await lease.release()
            assert servers.fleet.restarts == 1
            assert manager.holders() == {}
        assert cluster.pids() == []
        assert list(other.counts) == []
        assert any("it is started again" in note for note in notes)

    run(main)


def test_a_kind_that_a_node_cannot_import_is_refused_before_the_first_chain(tmp_path: Path) -> None:
    path = [path for path in sys.path if path and path != str(Path(__file__).parents[2])]
    cluster = LocalCluster(about={"path": path, "folder": str(tmp_path)})

    async def main() -> None:
        with pytest.raises(ConfigError, match=r"node n\d: .*tests"):
            async with env_servers(cluster, spec_of(Board), 2):
                pass
        assert cluster.pids() == []

    run(main)


def test_a_node_without_agentfly_is_named() -> None:
    cluster = LocalCluster(about={"agentfly": None})

    async def main() -> None:
        with pytest.raises(ConfigError, match=r"node n0 has no AgentFly"):
            async with env_servers(cluster, spec_of(Board), 1):
                pass

    run(main)


def test_without_any_host_the_run_stops_with_a_sentence_and_not_with_lost_chains() -> None:
    spec, cluster = spec_of(Board, max=2), LocalCluster()

    async def main() -> None:
        async with (
            env_servers(cluster, spec, 1, health_s=0.5) as servers,
            ResourceManager(None, on_servers(spec, servers.directory)) as manager,
        ):
            servers.fleet.start_took_s = 0.0
            cluster.room, cluster.reservations[0].lost = False, "the node died"
            os.kill(cluster.pids()[0], signal.SIGKILL)
            await until(lambda: not servers.fleet.live)
            with pytest.raises(ConfigError, match="no environment server has lived"):
                await manager.acquire([Board], task(1), "a", WAIT_S)
            cluster.room = True
            await until(lambda: bool(servers.fleet.live))
            async with manager.lease([Board], task(1), "b", WAIT_S) as lease:
                assert await lease[Board].write("x") == 1

    run(main)


def test_the_loss_of_a_node_counts_as_the_loss_of_its_host_though_the_connection_stands() -> None:
    spec, cluster = spec_of(Worker, max=2), LocalCluster()

    async def main() -> None:
        async with env_servers(cluster, spec, 1) as servers:
            (before,) = servers.directory.counts
            cluster.reservations[0].lost = "was silent for 6.1 s"
            await until(lambda: len(servers.fleet.live) == 1 and servers.fleet.restarts == 1)
            assert list(servers.directory.counts) != [before]

    run(main)
