"""The supervisor's decisions, with shell scripts in the place of ranks."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentfly.training.ranks import supervisor
from agentfly.training.ranks.supervisor import cpu_seconds, supervise

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Returns a function: the exit status of a run whose ranks are these shell commands, and how often rank 0 was started."""

    def start(rank_0: str, rank_1: str, restarts: int = 2) -> tuple[int, int]:
        script = tmp_path / "rank"
        script.write_text(
            f'#!/bin/sh\ncd {tmp_path}\nif [ "$RANK" = 0 ]; then echo x >> starts; {rank_0}\nelse {rank_1}\nfi\n',
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


def test_an_error_of_rank_0_is_reported_by_its_own_status(run) -> None:
    assert run("sleep 0.5; exit 1", "exit 1") == (1, 1)
    assert run("exit 130", "sleep 30")[0] == 130


def test_a_mistake_that_only_another_rank_can_see_ends_the_run(run) -> None:
    assert run("sleep 30", "exit 2") == (2, 1)


def test_a_lost_rank_restarts_all_at_most_so_many_times(run, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("sleep 30", "kill -9 $$") == (1, 3)
    told = capfd.readouterr().err
    assert "rank 1 was killed by SIGKILL: all ranks are started again from the last checkpoint (restart 2 of 2)" in told
    assert "rank 1 was killed by SIGKILL; the run was restarted 2 times (fault.restarts) and is given up" in told


def test_the_killed_rank_is_named_and_not_the_one_that_lost_it(run, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(f"exit {supervisor.RANK_LOST}", "kill -9 $$", 0) == (1, 1)
    assert "rank" in capfd.readouterr().err


def test_a_restarted_run_may_end_well(run) -> None:
    assert run("if [ -e again ]; then exit 0; fi; touch again; kill -9 $$", "sleep 0.2; exit 0") == (0, 2)


def test_without_restarts_a_lost_rank_ends_the_run(run) -> None:
    assert run("kill -9 $$", "sleep 30", 0) == (1, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stopped_rank_is_frozen(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "SILENT_S", 1.0)
    assert run("sleep 30", "kill -STOP $$", 0) == (1, 1)
    assert cpu_seconds(os.getpid()) is not None


def test_a_silent_rank_is_frozen_only_if_it_uses_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, used = [100.0], [1.0]
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(supervisor, "cpu_seconds", lambda _: used[0])
    rank = supervisor.Rank(1, SimpleNamespace(pid=1, poll=lambda: None), None)  # type: ignore[arg-type]
    assert rank.why_lost() is None
    for _ in range(5):  # busy, but its threads cannot run
        clock[0], used[0] = clock[0] + 9.0, used[0] + 0.01
        assert rank.why_lost() is None
    clock[0] += 10.5
    assert rank.why_lost() == "is frozen"
    monkeypatch.setattr(supervisor, "cpu_seconds", lambda _: None)  # another system
    rank.heard = clock[0] - 59.0
    assert rank.why_lost() is None
    rank.heard = clock[0] - 61.0
    assert rank.why_lost() == "is frozen"
