"""The supervisor's decisions, and the parent of a rank on another node, with scripts in the place of ranks."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentfly.errors import EngineError, RankError
from agentfly.fleet.fleet import Fleet
from agentfly.fleet.launcher import LocalLauncher
from agentfly.fleet.link import LinkMessage
from agentfly.training.ranks import process, supervisor
from agentfly.training.ranks.cluster_ranks import RankMember, RankRole
from agentfly.training.ranks.process import LocalRank, cpu_seconds, free_port, interface_of, start_rank
from agentfly.training.ranks.supervisor import LocalRanks, supervise
from tests.scale.forked import wait_until_gone

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Returns a function: the exit status of a run whose ranks are these shell commands, and how often rank 0 was started."""

    def start(rank_0: str, rank_1: str, restarts: int = 2) -> tuple[int, int]:
        script = tmp_path / "rank"
        # Rank 1 begins when rank 0 has: what it does may end both.
        script.write_text(
            f'#!/bin/sh\ncd {tmp_path}\nif [ "$RANK" = 0 ]; then echo x >> starts; touch up; {rank_0}\n'
            f"else until [ -e up ]; do sleep 0.05; done; rm up; {rank_1}\nfi\n",
            encoding="utf-8",
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(supervisor.sys, "executable", str(script))
        status = supervise(["train", "run.toml"], 2, restarts)
        return status, len((tmp_path / "starts").read_text().split())

    return start


def test_a_run_that_ends_well_is_not_restarted(run) -> None:
    assert run("exit 0", "sleep 0.3; exit 0") == (0, 1)
    assert run("exit 0", "exit 1")[0] == 0


def test_an_error_of_rank_0_ends_the_run(run) -> None:
    assert run("exit 2", "sleep 30") == (2, 1)


def test_an_error_of_rank_0_is_reported_by_its_own_status(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "END_S", 60.0)
    assert run("sleep 0.5; exit 1", "exit 1") == (1, 1)
    assert run("exit 130", "sleep 30")[0] == 130


def test_a_mistake_that_only_another_rank_can_see_ends_the_run(run) -> None:
    assert run("sleep 30", "exit 2") == (2, 1)


def test_a_lost_rank_restarts_all_at_most_so_many_times(run, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("sleep 30", "kill -9 $$") == (1, 3)
    told = capfd.readouterr().err
    assert "rank 1 was killed by SIGKILL: all ranks are started again from the last checkpoint (restart 2 of 2)" in told
    assert "rank 1 was killed by SIGKILL; the run was restarted 2 times (fault.restarts) and is given up" in told


def test_the_killed_rank_is_named_and_not_the_one_that_lost_it(
    run, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "CAUSE_S", 60.0)  # a busy machine may need longer to start a shell
    assert run(f"exit {process.RANK_LOST}", "sleep 0.4; kill -9 $$", 0) == (1, 1)
    assert "supervisor: rank 1 was killed by SIGKILL; the run was restarted 0 times" in capfd.readouterr().err
    assert run("exit 1", "sleep 0.4; kill -9 $$", 0) == (1, 2)
    assert "supervisor: rank 1 was killed by SIGKILL" in capfd.readouterr().err


def test_a_restarted_run_may_end_well(run) -> None:
    assert run("if [ -e again ]; then exit 0; fi; touch again; kill -9 $$", "sleep 0.2; exit 0") == (0, 2)


def test_without_restarts_a_lost_rank_ends_the_run(run) -> None:
    assert run("kill -9 $$", "sleep 30", 0) == (1, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stopped_rank_is_frozen(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SILENT_S", 1.0)
    assert run("sleep 30", "kill -STOP $$", 0) == (1, 1)
    assert cpu_seconds(os.getpid()) is not None


def test_a_silent_rank_is_frozen_only_if_it_uses_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, used = [100.0], [1.0]
    monkeypatch.setattr(process.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(process, "cpu_seconds", lambda _: used[0])
    rank = LocalRank(1, SimpleNamespace(pid=1, poll=lambda: None), None)  # type: ignore[arg-type]
    assert rank.why_lost() is None
    for _ in range(5):  # busy, but its threads cannot run
        clock[0], used[0] = clock[0] + 7.0, used[0] + 0.01
        assert rank.why_lost() is None
    clock[0] += 8.5
    assert rank.why_lost() == "is frozen"
    monkeypatch.setattr(process, "cpu_seconds", lambda _: None)  # another system
    rank.heard = clock[0] - 59.0
    assert rank.why_lost() is None
    rank.heard = clock[0] - 61.0
    assert rank.why_lost() == "is frozen"


# ---- starting again --------------------------------------------------------------------------------------------------------


class Placing:
    """Starts ranks here, as a cluster would: some attempts fail before a rank runs."""

    def __init__(self, *errors: Exception | None) -> None:
        self.errors, self.released = list(errors), 0

    def start(self, arguments: Any) -> Any:
        if (error := self.errors.pop(0)) is not None:
            raise error
        return LocalRanks(2, None).start(arguments)

    def release(self) -> None:
        self.released += 1


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Returns a function that makes a shell command the program of every rank."""

    def write(command: str) -> None:
        path = tmp_path / "rank"
        path.write_text(f"#!/bin/sh\n{command}\n", encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(supervisor.sys, "executable", str(path))

    return write


def test_a_node_that_is_lost_while_ranks_are_started_counts_as_a_restart(script, capfd: pytest.CaptureFixture[str]) -> None:
    script("exit 0")
    placing = Placing(RankError("rank 1 was lost with its node b"), None)
    assert supervise(["train", "run.toml"], 2, 1, starter=placing) == 0
    assert placing.released == 2
    told = capfd.readouterr().err
    assert "rank 1 was lost with its node b: all ranks are started again from the last checkpoint (restart 1 of 1)" in told


def test_ranks_that_find_no_room_at_the_start_are_an_error_and_later_a_sentence(script, capfd) -> None:
    script("exit 0")
    with pytest.raises(EngineError, match="no room"):
        supervise(["train", "run.toml"], 2, 3, starter=Placing(EngineError("no room")))
    script("kill -9 $$")
    placing = Placing(None, EngineError("no node had 1 CPU free for rank 1 within 180 s"))
    assert supervise(["train", "run.toml"], 2, 3, starter=placing) == 1
    assert placing.released == 2
    assert "the ranks cannot be started again: no node had 1 CPU free for rank 1 within 180 s" in capfd.readouterr().err


def test_a_signal_while_ranks_are_started_ends_the_program() -> None:
    class Interrupted:
        released = 0

        def start(self, arguments: Any) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)

        def release(self) -> None:
            self.released += 1

    starter = Interrupted()
    with pytest.raises(SystemExit) as ended:
        supervise(["train", "run.toml"], 2, 3, starter=starter)
    assert (ended.value.code, starter.released) == (128 + signal.SIGTERM, 1)


# ---- the parent ------------------------------------------------------------------------------------------------------------


class Kept:
    """A parent with its rank, whose module `agentfly` is a program of the test. The fleet waits for no more than it says."""

    def __init__(self, folder: Path, program: str) -> None:
        (folder / "agentfly.py").write_text(program, encoding="utf-8")
        self.messages: list[tuple[str, Any]] = []
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        kept = self

        class Watched(RankRole):
            def hear(self, member: RankMember, message: LinkMessage) -> None:
                kept.messages.append((message.kind, message.value))
                super().hear(member, message)

        environ = {"PYTHONPATH": str(folder), "RANK": "1"}
        order = {"rank": 1, "arguments": ["train", "run.toml"], "folder": str(folder), "environ": environ}
        self.role = Watched([order])
        self.fleet: Any = None

    def open(self, folder: Path) -> Kept:
        async def work() -> None:
            self.fleet = Fleet(LocalLauncher(folder), self.role, 1)
            await self.fleet.__aenter__()

        self.do(work())
        return self

    def do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(120)

    @property
    def member(self) -> RankMember:
        member: RankMember = self.fleet.members[0]
        return member

    @property
    def said(self) -> str:
        return "".join(value for kind, value in self.messages if kind == "said")

    def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline, self.messages
            time.sleep(0.02)

    def close(self) -> None:
        if self.fleet is not None:
            self.do(self.fleet.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(30)


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Callable[[str], Kept]]:
    made: list[Kept] = []

    def start(program: str) -> Kept:
        made.append(Kept(tmp_path, program))
        return made[-1].open(tmp_path / "logs")

    yield start
    for each in made:
        each.close()


def test_a_parent_runs_its_rank_with_the_drivers_arguments_and_says_what_it_printed_and_how_it_ended(keep) -> None:
    kept = keep("import os, sys\nprint(sys.argv[1:], os.getcwd(), os.environ['GLOO_SOCKET_IFNAME'])\nsys.exit(3)\n")
    kept.until(lambda: kept.member.status is not None)
    assert kept.member.status == 3
    assert kept.said == f"['train', 'run.toml'] {kept.role._orders[0]['folder']} lo\n"


@pytest.mark.parametrize("how", ["its connection is closed", "the fleet stops it"])
def test_a_parent_kills_its_rank_when_the_supervisor_is_gone(keep, how: str) -> None:
    kept = keep("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    kept.until(lambda: kept.said.endswith("\n") and ("status", {"frozen": False}) in kept.messages)
    if how == "the fleet stops it":
        kept.do(kept.fleet.close())
    else:
        kept.loop.call_soon_threadsafe(kept.member.link.close)
    assert wait_until_gone(int(kept.said))
    assert wait_until_gone(kept.member.about["pid"])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_parent_says_that_its_rank_is_frozen(keep) -> None:
    frozen = "import os, signal\nprint(os.getpid(), flush=True)\nos.kill(os.getpid(), signal.SIGSTOP)\n"
    kept = keep(frozen)
    kept.until(lambda: kept.member.frozen)
    kept.do(kept.fleet.close())
    assert wait_until_gone(int(kept.said))


def test_a_rank_that_cannot_be_started_is_an_error(tmp_path: Path) -> None:
    kept = Kept(tmp_path, "")
    kept.role._orders[0]["folder"] = str(tmp_path / "no such folder")  # type: ignore[index]
    try:
        with pytest.raises(EngineError, match="rank 1 did not start: .*the rank could not be started: .*no such folder"):
            kept.open(tmp_path / "logs")
    finally:
        kept.close()


def test_a_rank_in_the_parents_process_group_is_killed_alone() -> None:
    rank = start_rank(1, ["sleep", "60"], dict(os.environ))
    rank.kill()
    assert rank.status == -signal.SIGKILL


def test_a_free_port_is_below_those_that_a_system_hands_out() -> None:
    assert all(free_port() < 32_000 for _ in range(20))
    with pytest.raises(OSError, match="assign requested address"):
        free_port("203.0.113.1")


@pytest.mark.skipif(sys.platform != "linux", reason="reads the interfaces of Linux")
def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None  # an address for documentation, which no machine has
