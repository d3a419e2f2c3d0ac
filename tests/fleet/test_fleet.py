"""A fleet starts, watches and restarts its processes, whatever runs in them: here a program that does what a test says."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agentfly.errors import ConfigError, DataError, EngineError, InvariantError
from agentfly.fleet import fleet as fleet_module
from agentfly.fleet.fleet import Fleet, Role
from agentfly.fleet.launcher import LocalLauncher
from agentfly.fleet.link import LinkMessage, pack
from agentfly.fleet.member import Member, MemberLost
from tests.fleet.member_program import ORDER
from tests.scale.forked import wait_until_gone

PATIENCE_S = 120.0


class Scripted(Role[Member]):
    """Calls each process once before it is live, and writes down what it is told."""

    kind, noun, consequence = "helper", "helper process", "its work is done elsewhere"
    target = "tests.fleet.member_program:serve"
    stuck_s = 600.0

    def __init__(self) -> None:
        self.losses: list[str] = []
        self.reports: list[int] = []
        self.fault: Exception | None = None
        """Raised when a process is made ready."""

    def member(self, index: int, attempt: int) -> Member:
        return Member(self.kind, index, attempt)

    async def prepare(self, member: Member) -> None:
        assert await member.call("double", 21) == 42
        if self.fault is not None:
            raise self.fault

    def hear(self, member: Member, message: LinkMessage) -> None:
        assert message.kind == "status"
        self.reports.append(message.value["pid"])

    def lost(self, member: Member, why: str) -> None:
        self.losses.append(f"{member.name} {why}")


class Run:
    """A fleet of scripted processes, and what it noted."""

    def __init__(self, folder: Path, count: int = 1, order: str = "", **settings: Any) -> None:
        self.role, self.notes = Scripted(), list[str]()
        launcher = LocalLauncher(folder, [{ORDER: order}] * count)
        self.fleet = Fleet(launcher, self.role, count, note=self.notes.append, **settings)

    async def __aenter__(self) -> Run:
        await self.fleet.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        pids = [member.about["pid"] for member in self.fleet.members if "pid" in member.about]
        await self.fleet.close()
        assert all(wait_until_gone(pid) for pid in pids)

    def pid(self, index: int = 0) -> int:
        return int(self.fleet.members[index].about["pid"])


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await work()

    asyncio.run(limited())


def is_closed(stranger: socket.socket) -> bool:
    """Whether the other end of a connection closes it within a minute."""
    stranger.settimeout(60)
    try:
        return stranger.recv(1) == b""
    except ConnectionResetError:
        return True


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_a_call_is_answered_raises_as_there_or_is_lost_with_its_process(tmp_path: Path) -> None:
    async def work() -> None:
        async with Run(tmp_path, 2) as one:
            first, second = one.fleet.members
            assert [await member.call("double", 4) for member in one.fleet.members] == [8, 8]
            with pytest.raises(DataError, match="a bad row") as raised:
                await first.call("raise", ["DataError", "a bad row"])
            assert raised.value.__notes__ == ["In helper 0: where it was raised"]
            waiting = asyncio.ensure_future(second.call("nothing answers"))
            await asyncio.sleep(0)
            os.kill(one.pid(1), signal.SIGKILL)
            with pytest.raises(MemberLost, match=r"helper 1 ended \(killed by SIGKILL\)"):
                await waiting
            with pytest.raises(MemberLost, match="helper 1 ended"):
                await second.call("double", 1)
            assert await first.call("twice") == 1
            await until(lambda: one.fleet.dropped_replies == 1)
            await until(lambda: one.pid(0) in one.role.reports)

    run(work)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_killed_or_frozen_is_started_again(how: signal.Signals, tmp_path: Path) -> None:
    async def work() -> None:
        async with Run(tmp_path, 2, health_s=5.0) as one:
            victim, other = one.pid(0), one.pid(1)
            os.kill(victim, how)
            await until(lambda: one.fleet.restarts >= 1 and len(one.fleet.live) == 2)
            assert one.fleet.members[0].attempt == 1
            assert one.pid(0) != victim
            assert one.pid(1) == other
            word = "was silent for" if how == signal.SIGSTOP else r"ended (killed by SIGKILL)"
            assert word in one.role.losses[0]
            assert word in one.notes[0]
            assert one.notes[0].endswith("; its work is done elsewhere, and it is started again")
            assert await asyncio.to_thread(wait_until_gone, victim)

    run(work)


def test_a_process_whose_main_thread_is_blocked_is_lost_though_it_beats(tmp_path: Path) -> None:
    async def work() -> None:
        async with Run(tmp_path, health_s=60.0) as one:
            one.role.stuck_s = 1.5
            one.fleet.members[0].send("block", 0, 3600)
            await until(lambda: one.fleet.restarts >= 1 and one.fleet.live)
            assert "did not report for" in one.role.losses[0]
            assert "its main thread is blocked" in one.role.losses[0]

    run(work)


def test_a_process_that_cannot_start_says_why_after_three_attempts(tmp_path: Path) -> None:
    async def work() -> None:
        with pytest.raises(EngineError, match=r"helper 0 did not start: it ended \(exit code 3\); it said: no licence"):
            await Run(tmp_path, order="no licence").__aenter__()

    run(work)
    assert (tmp_path / "helper-0.log").read_text().count("no licence") == fleet_module.START_ATTEMPTS


def test_a_process_that_dies_before_all_are_live_is_started_again(tmp_path: Path) -> None:
    async def work() -> None:
        async with Run(tmp_path, order="dies at first") as one:
            assert one.notes == ["helper 0 ended (killed by SIGKILL); it is started again"]
            assert one.fleet.restarts == 1

    run(work)


def test_a_process_that_does_not_connect_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "HELLO_S", 0.2)

    async def work() -> None:
        with pytest.raises(EngineError, match="helper 0 did not start: it did not connect within 0.2 s"):
            await Run(tmp_path, order="says nothing").__aenter__()

    run(work)


def test_another_version_of_the_software_is_refused_by_name(tmp_path: Path) -> None:
    async def work() -> None:
        with pytest.raises(ConfigError, match=r"helper 0 on .* has agentfly 0\.0\.1, but the trainer has"):
            await Run(tmp_path, order="is older").__aenter__()

    run(work)


@pytest.mark.parametrize("fault", [ConfigError("no such tool"), InvariantError("other weights")])
def test_a_mistake_ends_the_start_at_once(fault: Exception, tmp_path: Path) -> None:
    async def work() -> None:
        one = Run(tmp_path)
        one.role.fault = fault
        with pytest.raises(type(fault), match=str(fault)):
            await one.__aenter__()
        assert one.fleet.restarts == 0

    run(work)


def test_a_bug_of_the_role_stops_the_fleet(tmp_path: Path) -> None:
    async def work() -> None:
        one = Run(tmp_path)
        one.role.fault = ZeroDivisionError("a bug")
        with pytest.raises(EngineError, match="helper 0 could not be started: ZeroDivisionError: a bug"):
            await one.__aenter__()

    run(work)


def test_a_mistake_that_only_a_later_start_meets_costs_no_run(tmp_path: Path) -> None:
    async def work() -> None:
        async with Run(tmp_path, 2) as one:
            one.role.fault = ConfigError("this node lacks a package")
            os.kill(one.pid(0), signal.SIGKILL)
            await until(lambda: any("this node lacks a package" in loss for loss in one.role.losses))
            assert one.fleet.failure is None
            one.role.fault = None
            await until(lambda: len(one.fleet.live) == 2)

    run(work)


def test_a_fleet_without_any_live_process_fails_with_what_happened_and_lives_on(tmp_path: Path) -> None:
    async def work() -> None:
        async with Run(tmp_path) as one:
            one.role.fault = EngineError("no machine is left")
            os.kill(one.pid(0), signal.SIGKILL)
            await until(lambda: "helper 0 no machine is left" in one.role.losses)
            one.fleet.start_took_s = -10 * one.fleet.health_s  # not a second longer
            await until(lambda: one.fleet.failure)
            with pytest.raises(EngineError, match=r"no helper process has lived for .*no machine is left.*: the run stops"):
                await one.fleet.news()
            one.role.fault = None
            await until(lambda: one.fleet.live)

    run(work)


def test_a_process_that_ends_again_and_again_is_started_after_longer_pauses(tmp_path: Path) -> None:
    starts: list[float] = []

    async def work() -> None:
        async with Run(tmp_path, 2) as one:
            one.role.fault = EngineError("no room")
            launch = one.fleet.launcher.start

            def start(index: int, ticket: Any) -> Any:
                starts.append(time.monotonic())
                return launch(index, ticket)

            one.fleet.launcher.start = start  # type: ignore[method-assign]
            os.kill(one.pid(0), signal.SIGKILL)
            await until(lambda: len(starts) == 4)

    run(work)
    pauses = [after - before for before, after in itertools.pairwise(starts)]
    assert all(pause >= 0.2 * 2 ** (number + 1) for number, pause in enumerate(pauses)), pauses


@pytest.mark.parametrize(
    "words",
    [
        pack("hello", 0, {"token": "x" * 64, "index": 0, "attempt": 0}),
        pack("hello", 0, {"token": "\u00e9" * 64, "index": 0, "attempt": 0}),
        pack("hello", 0, [1]),
        b"\xff" * 100,
    ],
    ids=["another token", "a token that is not ASCII", "no dict", "no message"],
)
@pytest.mark.parametrize("address", [None, "127.0.0.1"], ids=["Unix socket", "TCP"])
def test_a_stranger_without_the_token_is_not_heard(words: bytes, address: str | None, tmp_path: Path) -> None:
    def say(address: Any) -> bytes:
        kind, target = (socket.AF_UNIX, address) if isinstance(address, str) else (socket.AF_INET, tuple(address))
        with socket.socket(kind) as stranger:
            stranger.settimeout(60)
            stranger.connect(target)
            stranger.sendall(words)
            return stranger.recv(1)

    async def work() -> None:
        async with Run(tmp_path, address=address) as one:
            assert await asyncio.to_thread(say, one.fleet.address) == b""
            assert one.fleet.live == one.fleet.members

    run(work)


def test_connections_that_say_nothing_hold_no_process_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "MAX_STRANGERS", 8)

    async def work() -> None:
        async with Run(tmp_path, address="127.0.0.1") as one:
            host, port = one.fleet.address
            opened = [socket.create_connection((host, port)) for _ in range(20)]
            try:
                await until(lambda: len(one.fleet._strangers) == 8)
                os.kill(one.pid(), signal.SIGKILL)
                await until(lambda: one.fleet.restarts >= 1 and one.fleet.live)
                assert await asyncio.to_thread(is_closed, opened[0])
            finally:
                for each in opened:
                    each.close()

    run(work)


def test_without_restarts_a_process_that_is_lost_stays_lost(tmp_path: Path) -> None:
    class Once(Scripted):
        restarts = False

    async def work() -> None:
        one = Run(tmp_path)
        one.fleet.role = Once()
        async with one:
            os.kill(one.pid(), signal.SIGKILL)
            await until(lambda: not one.fleet.members[0].alive)
            assert "ended (killed by SIGKILL)" in one.fleet.members[0].ended.result()
            await until(lambda: one.fleet._tasks[1].done())
            assert one.fleet.restarts == 0
            assert one.notes == []

    run(work)


def test_a_launcher_that_takes_long_is_awaited_and_its_processes_end_with_the_fleet(tmp_path: Path) -> None:
    class Slow(LocalLauncher):
        takes_long = True
        pids: list[int] = []  # noqa: RUF012

        def start(self, index: int, ticket: Any) -> Any:
            time.sleep(0.5)
            made = super().start(index, ticket)
            self.pids.append(made.pid)
            return made

    async def work() -> None:
        fleet = Fleet(Slow(tmp_path), Scripted(), 1)
        opening = asyncio.ensure_future(fleet.__aenter__())
        await asyncio.sleep(0.1)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert len(Slow.pids) == 1
        assert await asyncio.to_thread(wait_until_gone, Slow.pids[0])

    run(work)
