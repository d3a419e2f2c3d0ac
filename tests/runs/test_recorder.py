"""A run records its state, its pools and what happens, at a cost that chains do not feel."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from test_run_store import chain

from agentfly.errors import InvariantError, StorageError
from agentfly.rollout.activity import Activities
from agentfly.runs import RunReader, RunStore, StoreWriter, find_runs
from agentfly.runs import writer as writer_module
from agentfly.runs.catalog import summarize
from agentfly.runs.lock import process_mark
from agentfly.runs.recorder import Recorder
from agentfly.types import Outcome, TokenRecord


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    with RunStore(tmp_path / "run.db") as store:
        yield store


def read(store: RunStore) -> RunReader:
    return RunReader(store.path)


def test_only_changes_of_a_gauge_are_stored_and_a_growing_counter_is_an_event(store: RunStore) -> None:
    clock = Clock()
    with StoreWriter(store) as writer:
        recorder = Recorder(writer, clock)
        for allocated, failed in ((1.0, 0.0), (1.0, 0.0), (2.0, 0.0), (2.0, 3.0)):
            figures = {"resources/game/allocated": allocated, "resources/game/failed": failed, "resources/total/failed": failed}
            recorder.look(figures)
            clock.now += 0.5
    with read(store) as reader:
        assert reader.gauges() == {
            "resources/game/allocated": [(1000.0, 1.0), (1001.0, 2.0)],
            "resources/game/failed": [(1000.0, 0.0), (1001.5, 3.0)],
        }
        assert reader.gauges(["resources/game/allocated"], since=1000.5) == {
            "resources/game/allocated": [(1000.0, 1.0), (1001.0, 2.0)]  # the first is the value at that time
        }
        (event,) = reader.events(kind="environment_failed")
        assert (event.who, event.data) == ("game", {"count": 3.0})


def test_a_long_series_is_thinned_to_the_last_value_of_each_interval(store: RunStore) -> None:
    for second in range(1000):
        store.add_gauges(float(second), {"g": float(second)})
    with read(store) as reader:
        points = reader.gauges(["g"], since=100.0, max_points=10)["g"]
        assert points[0] == (99.0, 99.0)
        assert points[-1] == (999.0, 999.0)
        assert 10 <= len(points) <= 13


def test_running_chains_and_leases_are_told_and_cleared_at_the_end(store: RunStore) -> None:
    with StoreWriter(store) as writer:
        recorder = Recorder(writer)
        activities = Activities(recorder.chain)
        with recorder.running(kind="train", model="m"):
            recorder.step = 3
            activity = activities.add(chain("a"))
            activity.enter("sampling", time.perf_counter())
            recorder.look({}, activities, {"a": ["game"]})
            writer.flush()
            with read(store) as reader:
                (running,) = reader.live()["chains"][1]
                assert (running["id"], running["phase"], running["turn"]) == ("a", "sampling", 2)
                assert reader.live()["leases"][1] == [{"chain": "a", "kinds": ["game"]}]
                assert reader.state() == "running"
                assert reader.gauges(["chains/sampling"])["chains/sampling"][-1][1] == 1.0
            activity.end()
            failed = chain("b", outcome=Outcome.WORLD_FAILURE, reward=None)
            activities.add(failed).end()
    with read(store) as reader:
        assert [(event.kind, event.who, event.step) for event in reader.events()] == [
            ("chain_started", "a", 3), ("chain_ended", "a", 3), ("chain_started", "b", 3), ("chain_ended", "b", 3),
            ("chain_failed", "b", 3),
        ]  # fmt: skip
        assert reader.live()["chains"][1] == []


def test_events_that_only_say_what_runs_are_deleted_after_the_next_step(store: RunStore) -> None:
    with StoreWriter(store) as writer:
        recorder = Recorder(writer)
        for step in (1, 2, 3):
            recorder.step = step
            recorder.span("rollout")
            recorder.chain(chain(f"c{step}"), ended=False)
            recorder.note(f"note {step}")
            recorder.end_step(step)
    with read(store) as reader:
        assert [event.who for event in reader.events(kind="chain_started")] == ["c3"]
        assert [event.data["text"] for event in reader.events(kind="note")] == ["note 1", "note 2", "note 3"]
        assert [event.step for event in reader.events(kind="phase")] == [1, 2, 3]
        assert len(reader.newest_events(2)) == 2


def test_how_a_run_ended_is_recorded(store: RunStore) -> None:
    def run(error: BaseException | None, stopped: str | None = None) -> dict[str, Any]:
        with StoreWriter(store) as writer:
            recorder = Recorder(writer)
            expected = nullcontext() if error is None else pytest.raises(type(error))
            with expected, recorder.running(kind="train", total_steps=5):
                recorder.stopped = stopped
                if error is not None:
                    raise error
        return store.meta()

    first = run(None)
    assert (first["status"], first["error"], first["total_steps"]) == ("finished", None, 5)
    assert (first["pid"], first["host"]) == (os.getpid(), process_mark()["host"])
    second = run(InvariantError("the books are wrong"))
    assert (second["status"], second["error"]) == ("stopped", "the books are wrong")
    assert second["started"] == first["started"] <= second["resumed"]
    assert run(ValueError("odd"))["error"] == "ValueError: odd"
    assert run(KeyboardInterrupt())["error"] == "stopped by a signal"
    assert run(asyncio.CancelledError())["status"] == "stopped"
    assert run(None, stopped="stopped by SIGTERM")["status"] == "stopped"
    with read(store) as reader:
        assert reader.state() == "stopped"
        assert reader.events(kind="stopped")[0].data == {"text": "the books are wrong"}


def test_a_killed_run_is_dead_and_a_beating_one_elsewhere_is_running(store: RunStore, tmp_path: Path) -> None:
    code = f"""
import os, signal
from agentfly.runs import Recorder, RunStore, StoreWriter
with StoreWriter(RunStore({str(store.path)!r})) as writer:
    with Recorder(writer).running(kind="train"):
        writer.flush()
        os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], check=False, timeout=800, env=os.environ)
    with read(store) as reader:
        assert reader.meta()["status"] == "running"
        assert reader.state() == "dead"
        for host, beat, state in (("elsewhere", time.time(), "running"), ("elsewhere", time.time() - 3600, "dead")):
            store.set_meta({"host": host, "heartbeat": beat})
            assert reader.state() == state
        store.set_meta(process_mark())
        assert reader.state() == "running"
        store.set_meta({**process_mark(), "process": "another start"})  # a later process with the same pid
        assert reader.state() == ("dead" if process_mark()["process"] else "running")


def assert_set(gate: threading.Event) -> None:
    assert gate.wait(60)


def test_notes_are_dropped_and_counted_and_chains_are_not(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "MAX_NOTES", 5)
    gate = threading.Event()
    with StoreWriter(store) as writer:
        recorder = Recorder(writer)
        with recorder.running(kind="train"):
            writer.put(lambda _: assert_set(gate))
            for number in range(50):
                recorder.look({"g": float(number)})
                writer.put_trajectories(1, "train", [chain(f"c{number}")])
            writer.add_tokens(1, [TokenRecord(f"c{number}", 0.5, 2) for number in range(50)])
            gate.set()
    assert writer.dropped > 0
    with read(store) as reader:
        assert reader.meta()["dropped"] == writer.dropped
        assert reader.num_chains() == 50
        assert {row.num_trained for row in reader.page()[0]} == {2}


def test_a_store_that_cannot_be_written_stops_the_run_at_its_next_record_and_not_in_a_note(store: RunStore) -> None:
    def fail(_: RunStore) -> None:
        raise StorageError("the disk is full")

    writer = StoreWriter(store)
    recorder = Recorder(writer)
    writer.put(fail)
    with pytest.raises(StorageError, match="the disk is full"):
        writer.flush()
    recorder.look({"g": 1.0})
    recorder.note("goes on")
    recorder.flush()
    with pytest.raises(StorageError, match="the disk is full"):
        writer.add_metrics(1, {"m": 1.0})
    with pytest.raises(StorageError, match="the disk is full"):
        writer.add_tokens(1, [])
    with pytest.raises(StorageError, match="the disk is full"):
        writer.close()


def test_tools_are_counted_by_step_and_over_the_run_also_if_a_step_is_written_again(store: RunStore) -> None:
    from agentfly.types import ToolCall, ToolResult

    def calling(name: str, seconds: list[float]) -> Any:
        each = chain(name)
        turn = each.turns[0]
        turn.calls = tuple(ToolCall("search" if second < 9 else "made up", {}) for second in seconds)
        turn.results = tuple(
            ToolResult(observation="", error="unknown_tool" if second >= 9 else "timeout" if second > 1 else None)
            for second in seconds
        )
        turn.calls_s = seconds
        return each

    for _ in range(2):
        store.add_trajectories(1, "train", [calling("a", [0.1] * 18 + [0.5, 2.0]), calling("b", [9.0])], replace=True)
    store.add_trajectories(2, "train", [calling("c", [0.1] * 20)])
    with read(store) as reader:
        unknown, search = sorted(reader.tools(1), key=lambda tool: tool.name)
        assert (unknown.name, unknown.calls, unknown.errors) == ("(unknown tool)", 1, 1)
        assert (search.calls, search.errors, search.max_s) == (20, 1, 2.0)
        assert search.p50_s == pytest.approx(0.1, rel=0.1)
        assert search.p95_s == pytest.approx(0.5, rel=0.1)
        whole = {tool.name: tool for tool in reader.tools()}
        assert (whole["search"].calls, whole["search"].errors, whole["(unknown tool)"].calls) == (40, 1, 1)
        assert [row.calls for step in (1, 2) for row in reader.tools(step, "train") if row.name == "search"] == [20, 20]
        store.truncate_after(1)
        assert {tool.name: tool.calls for tool in reader.tools()} == {"search": 20, "(unknown tool)": 1}


def test_the_catalog_lists_runs_and_says_why_one_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    with RunStore(tmp_path / "good" / "run.db") as store:
        store.set_meta({"status": "finished", "model": "m", "algorithm": "grpo", "world": "w", "total_steps": 200, "seed": 4})
        for step in range(1, 201):
            lost = 8 if step == 100 else 0
            held = {"validation/success": 0.75 if lost else 0.5, "validation/scored": 32 - lost, "validation/chains": 32}
            held = held if step % 50 == 0 else {}
            store.add_metrics(step, {"reward/mean": step / 200, **held})
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "config.toml").write_text('[agent]\nmodel = "x"\n[train]\nsteps = 7\n')
    RunStore(tmp_path / "deep" / "er" / "run.db").close()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.db").write_bytes(b"this is not a database, it only looks like a file")
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    RunStore(outside / "run.db").close()
    (tmp_path / "link").symlink_to(outside)
    found = {run.name: run for run in find_runs(tmp_path)}
    assert sorted(found) == ["bad", "deep/er", "good"]
    good = found["good"]
    assert (good.state, good.model, good.algorithm, good.world, good.seed) == ("finished", "m", "grpo", "w", 4)
    assert (good.step, good.total_steps, good.reward) == (200, 200, 1.0)
    assert (good.first_validation, good.best_validation, good.last_validation) == (0.5, 0.75, 0.5)
    assert (good.unscored, found["deep/er"].unscored) == (0.25, None)
    assert len(good.spark) == 60
    assert good.age_s is not None
    assert (found["deep/er"].model, found["deep/er"].total_steps, found["deep/er"].state) == ("x", 7, "stopped")
    assert found["bad"].problem is not None
    assert "cannot be opened" in found["bad"].problem
    assert find_runs(tmp_path / "none") == []
    assert summarize(tmp_path / "good").name == "good"
