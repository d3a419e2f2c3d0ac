"""The store keeps whole steps, also with concurrent readers and if the process is killed."""

from __future__ import annotations

import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agentfly.errors import ConfigError, StorageError
from agentfly.runs import MetricRow, RunStore, decode, import_jsonl
from agentfly.types import Completion, Message, Outcome, Task, TokenRecord, Trajectory, Turn


def chain(id: str, *, task: str = "t1", outcome: Outcome = Outcome.FINISHED, reward: float | None = 1.0) -> Trajectory:
    reply = Completion(text="84", token_ids=[8, 4], logprobs=[-0.25, -0.5], versions=[3, 3])
    return Trajectory(
        id, Task(task, (Message("user", "?"),), {"answer": "84"}), 2, [Message("user", "?"), Message("assistant", "84")],
        [Turn([1, 2], True, reply, reward=0.5)], outcome, None, "84", reward, {"exact": 1.0}, 0.25,
    )  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(tmp_path / "run.db")


def test_metrics_come_back_by_step_and_by_name(store: RunStore) -> None:
    store.add_metrics(2, {"b": 4, "a": 3.0})
    store.add_metrics(1, {"a": 1.0})
    store.add_metrics(1, {"a": 1.5, "inf": math.inf})
    assert store.metrics() == [
        MetricRow(1, "a", 1.5), MetricRow(1, "inf", math.inf), MetricRow(2, "a", 3.0), MetricRow(2, "b", 4.0),
    ]  # fmt: skip
    assert [row.value for row in store.metrics("a")] == [1.5, 3.0]


def test_a_metric_that_is_not_a_number_comes_back_as_one(store: RunStore) -> None:
    store.add_metrics(1, {"a": math.nan})
    assert math.isnan(store.metrics("a")[0].value)


def test_trajectories_are_found_by_step_split_outcome_and_task(store: RunStore) -> None:
    store.add_trajectories(1, "train", [chain("a"), chain("b", outcome=Outcome.MAX_TURNS, task="t2")])
    store.add_trajectories(2, "train", [chain("c", outcome=Outcome.WORLD_FAILURE, reward=None)])
    store.add_trajectories(2, "validation", [chain("d")])

    def ids(**conditions: object) -> list[str]:
        found = [row.id for row in store.rows(**conditions)]  # type: ignore[arg-type]
        assert found == [trajectory.id for trajectory in store.trajectories(**conditions)]  # type: ignore[arg-type]
        return found

    assert ids() == ["c", "d", "a", "b"]
    assert ids(step=1) == ["a", "b"]
    assert ids(split="validation") == ["d"]
    assert ids(outcome="world_failure") == ["c"]
    assert ids(task_id="t2") == ["b"]
    assert ids(limit=1, offset=1) == ["d"]
    assert store.count() == 4
    assert store.count(split="train", outcome="finished") == 1


def test_a_row_shows_what_a_list_needs(store: RunStore) -> None:
    store.add_trajectories(7, "validation", [chain("a")])
    (row,) = store.rows()
    assert (row.id, row.step, row.split, row.task_id, row.chain, row.outcome) == ("a", 7, "validation", "t1", 2, "finished")
    assert (row.reward, row.total_reward, row.components, row.prediction) == (1.0, 1.5, {"exact": 1.0}, "84")
    assert (row.num_turns, row.num_tokens, row.seconds) == (1, 2, 0.25)


def test_a_trajectory_comes_back_whole_and_the_newest_of_an_id_wins(store: RunStore) -> None:
    store.add_trajectories(1, "train", [chain("a", reward=0.0)])
    store.add_trajectories(2, "train", [chain("a", reward=1.0)])
    assert store.trajectory("a") == chain("a", reward=1.0)
    with pytest.raises(ConfigError, match="no trajectory 'zz'"):
        store.trajectory("zz")


def test_texts_that_sqlite_cannot_hold_are_kept_in_the_body(store: RunStore) -> None:
    odd = chain("a\ud800")
    odd.prediction = "\udcff\0x"
    store.add_trajectories(1, "train", [odd])
    assert store.trajectory("a\ud800") == odd
    assert store.rows()[0].prediction == "?\0x"


def test_one_bad_trajectory_adds_none(store: RunStore) -> None:
    broken = chain("b")
    broken.turns[0].context_ids = ["not an id"]  # type: ignore[list-item]
    with pytest.raises(ValueError):
        store.add_trajectories(1, "train", [chain("a"), broken])
    with pytest.raises(ConfigError, match="a split is 'train' or 'validation'"):
        store.add_trajectories(1, "test", [chain("a")])  # type: ignore[arg-type]
    assert store.count() == 0
    store.add_trajectories(1, "train", [chain("a")])
    assert store.count() == 1


def test_resuming_forgets_what_came_after_the_checkpoint(store: RunStore) -> None:
    for step in (1, 2, 3):
        store.add_metrics(step, {"a": step})
        store.add_trajectories(step, "train", [chain(f"c{step}")])
    store.truncate_after(2)
    assert [row.step for row in store.metrics("a")] == [1, 2]
    assert [row.id for row in store.rows()] == ["c2", "c1"]


def test_an_export_is_a_line_per_trajectory_and_reads_back(store: RunStore, tmp_path: Path) -> None:
    store.add_trajectories(1, "train", [chain("a"), chain("b")])
    store.add_trajectories(2, "validation", [chain("c\ud800")])
    assert store.export_jsonl(tmp_path / "out.jsonl") == 3
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(line["step"], line["split"], line["total_reward"]) for line in lines] == [
        (1, "train", 1.5), (1, "train", 1.5), (2, "validation", 1.5),
    ]  # fmt: skip
    assert list(import_jsonl(tmp_path / "out.jsonl"))[2] == (2, "validation", chain("c\ud800"))
    assert store.export_jsonl(tmp_path / "held.jsonl", split="validation") == 1
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == ["held.jsonl", "out.jsonl"]


def test_a_scan_reads_every_body_in_order_also_those_added_meanwhile(store: RunStore) -> None:
    store.add_trajectories(1, "train", [chain(f"c{i}") for i in range(300)])
    store.add_trajectories(1, "validation", [chain("v")])
    seen = []
    for row, body in store.scan():
        seen.append(row.id)
        assert decode(body).id == row.id
        if row.id == "c0":
            store.add_trajectories(2, "train", [chain("late")])
    assert seen == [*(f"c{i}" for i in range(300)), "v", "late"]
    assert [row.id for row, _ in store.scan(split="validation")] == ["v"]


def test_it_opens_again_and_a_watcher_reads_while_it_is_written(store: RunStore, tmp_path: Path) -> None:
    store.add_metrics(1, {"a": 1.0})
    with RunStore(tmp_path / "run.db", readonly=True) as watcher:
        assert len(watcher.metrics()) == 1
        store.add_metrics(2, {"a": 2.0})
        assert len(watcher.metrics()) == 2
        with pytest.raises(StorageError, match="readonly"):
            watcher.add_metrics(3, {"a": 3.0})
    store.close()
    store.close()
    with RunStore(tmp_path / "run.db") as again:
        assert len(again.metrics()) == 2


def test_threads_of_one_process_share_it(store: RunStore) -> None:
    def write(number: int) -> None:
        for step in range(20):
            store.add_metrics(step, {f"m{number}": step})
            store.add_trajectories(step, "train", [chain(f"{number}-{step}")])

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(store.metrics()) == 80
    assert store.count() == 80


@pytest.mark.parametrize("content", [b"this is not a database, it only looks like a file", b"SQLite format 3\0" + b"x" * 200])
def test_a_file_that_is_no_store_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.db").write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be opened as a run store"):
        RunStore(tmp_path / "run.db")


@pytest.mark.parametrize("number", [2, 99])
def test_a_store_of_another_format_is_refused(tmp_path: Path, number: int) -> None:
    with sqlite3.connect(tmp_path / "run.db") as db:
        db.execute(f"PRAGMA user_version = {number}")
    for readonly in (False, True):
        with pytest.raises(ConfigError, match=f"format {number}, but this version reads format 3"):
            RunStore(tmp_path / "run.db", readonly=readonly)
    with pytest.raises(ConfigError, match="there is no run store"):
        RunStore(tmp_path / "none.db", readonly=True)


WRITER = """
import sys
sys.path[:0] = {paths!r}
from test_run_store import chain
from agentfly.runs import RunStore
store = RunStore({path!r})
for step in range(1, 10_000):
    store.add_metrics(step, {{f"m{{i}}": i for i in range(5)}})
    store.add_trajectories(step, "train", [chain(f"{{step}}-{{i}}") for i in range(8)])
    print(step, flush=True)
"""


@pytest.mark.parametrize("after", [3, 17])
def test_a_kill_in_the_middle_of_writing_leaves_whole_steps(tmp_path: Path, after: int) -> None:
    path = str(tmp_path / "run.db")
    code = WRITER.format(paths=[str(Path(__file__).parent)], path=path)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= after:
            break
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read().split()
    process.wait(timeout=300)
    process.stdout.close()
    acknowledged = int(rest[-1]) if rest else after
    with RunStore(path) as store:
        steps = {row.step for row in store.metrics()}
        assert steps >= set(range(1, acknowledged + 1))
        assert len(steps) <= acknowledged + 1
        for step in steps:
            assert len([row for row in store.metrics() if row.step == step]) == 5
            assert store.count(step=step) in ((8,) if step <= acknowledged else (0, 8))
        assert store.trajectory("1-0") == chain("1-0")
        store.add_metrics(999, {"a": 1.0})
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_many_rows_are_written_whatever_number_of_variables_a_statement_may_have(store: RunStore) -> None:
    store._db.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 70)
    store.add_trajectories(1, "train", [chain(f"c{number}") for number in range(300)])
    store.add_events((float(number), 1, "note", None, {"text": f"{number}"}) for number in range(600))
    assert [row.id for row in store.rows(limit=300)] == [f"c{number}" for number in range(300)]
    assert [t for (t,) in store._db.execute("SELECT t FROM events ORDER BY key")] == list(map(float, range(600)))


@pytest.mark.parametrize("version", [sqlite3.sqlite_version_info, (3, 32, 0)], ids=str)
def test_tokens_reach_the_newest_chain_of_their_id_also_in_a_store_that_was_closed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int]
) -> None:
    path = tmp_path / "run.db"
    with RunStore(path) as first:
        first.add_trajectories(1, "train", [chain("a"), chain("b")])
        first.add_trajectories(2, "train", [chain("a")])
    monkeypatch.setattr(sqlite3, "sqlite_version_info", version)
    with RunStore(path) as second:
        second.add_trajectories(1, "train", [chain("a")])  # a step that is played again
        second.add_tokens(1, [TokenRecord("a", 0.5, 2, {"trained": ("B", b"\1\0")}), TokenRecord("b", -0.25, 1)])
        found = second._db.execute("SELECT key, id, step, advantage, num_trained FROM trajectories ORDER BY key").fetchall()
        assert found == [(1, "a", 1, None, None), (2, "b", 1, -0.25, 1), (3, "a", 2, None, None), (4, "a", 1, 0.5, 2)]
        assert second._db.execute("SELECT key, name FROM tokens").fetchall() == [(4, "trained")]


def test_keys_of_chains_that_were_rolled_back_are_forgotten(store: RunStore) -> None:
    def add_and_fail() -> None:
        with store.transaction():
            store.add_trajectories(1, "train", [chain("a")])
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        add_and_fail()
    store.add_trajectories(1, "train", [chain("b")])
    store.add_tokens(1, [TokenRecord("a", 0.5, 2), TokenRecord("b", 0.25, 1)])
    assert store._db.execute("SELECT id, advantage FROM trajectories").fetchall() == [("b", 0.25)]
