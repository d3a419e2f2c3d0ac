"""The writer keeps the order, bounds its queue, and tells of every write that failed."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_run_store import chain

from agentfly.errors import ConfigError, StorageError
from agentfly.runs import RunStore, StoreWriter
from agentfly.runs import writer as writer_module
from agentfly.types import Trajectory

WAIT_S = 60.0


class SlowStore(RunStore):
    """A store whose writes wait for `gate`, are noted in `calls`, and raise `error` if it is set."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.gate, self.entered = threading.Event(), threading.Event()
        self.calls: list[Any] = []
        self.errors: list[BaseException] = []

    def add_trajectories(self, step: int, split: Any, trajectories: Sequence[Trajectory], *, replace: bool = False) -> None:
        self._pass([each.id for each in trajectories])
        super().add_trajectories(step, split, trajectories, replace=replace)

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._pass(step)
        super().add_metrics(step, metrics)

    def _pass(self, what: Any) -> None:
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        self.calls.append(what)
        if self.errors:
            raise self.errors.pop(0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SlowStore]:
    store = SlowStore(tmp_path / "run.db")
    yield store
    store.gate.set()
    store.close()


def chains(*ids: str) -> list[Trajectory]:
    return [chain(each) for each in ids]


def test_calls_are_written_in_their_order_and_return_before(store: SlowStore) -> None:
    async def work() -> None:
        writer = StoreWriter(store)
        await writer.add_trajectories(1, "train", chains("a", "b"))
        writer.add_metrics(1, {"m": 1})
        await writer.add_trajectories(2, "train", chains("c"))
        await writer.add_trajectories(2, "validation", chains("d"))
        writer.add_metrics(2, {"m": 2})
        assert (writer.pending, store.count(), store.metrics()) == (4, 0, [])
        store.gate.set()
        await writer.drained()
        assert writer.pending == 0
        assert writer.busy_s > 0
        writer.close()

    asyncio.run(work())
    assert store.calls == [["a", "b"], 1, ["c"], ["d"], 2]
    assert store.trajectory("c") == chain("c")
    assert [row.value for row in store.metrics("m")] == [1, 2]


def test_the_metrics_are_those_at_the_time_of_the_call(store: SlowStore) -> None:
    writer = StoreWriter(store)
    metrics = {"m": 1.0}
    writer.add_metrics(1, metrics)
    metrics["m"] = 2.0
    store.gate.set()
    writer.close()
    assert store.metrics("m")[0].value == 1.0


@pytest.mark.parametrize("limits", [{"max_pending": 3}, {"max_bytes": 8000}])
def test_a_full_queue_holds_its_caller_back_until_there_is_room(store: SlowStore, limits: Any) -> None:
    said: list[str] = []

    async def work() -> None:
        writer = StoreWriter(store, warn=said.append, **limits)
        await writer.add_trajectories(1, "train", chains("a", "b"))
        await writer.add_trajectories(2, "train", chains("c"))
        assert (writer.waited_s, said) == (0.0, [])
        late = [asyncio.create_task(writer.add_trajectories(step, "train", chains(f"d{step}"))) for step in (3, 4)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in late)  # and the event loop runs
        store.gate.set()
        await asyncio.gather(*late)
        assert writer.pending <= 3
        assert writer.waited_s > 0.0
        await writer.drained()
        writer.close()

    asyncio.run(work())
    assert len(said) == 1
    assert "trajectories are not yet written" in said[0]
    assert [row.id for row in store.rows()] == ["d4", "d3", "c", "a", "b"]


def test_a_caller_cancelled_while_it_waits_has_handed_its_trajectories_over(store: SlowStore) -> None:
    async def work() -> None:
        writer = StoreWriter(store, max_pending=1)
        waiting = asyncio.create_task(writer.add_trajectories(1, "train", chains("a", "b")))
        await asyncio.sleep(0.02)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        store.gate.set()
        await writer.drained()
        writer.close()

    asyncio.run(work())
    assert store.count() == 2


def test_chains_added_one_by_one_share_a_transaction_and_a_replacement_does_not(store: SlowStore) -> None:
    async def work() -> None:
        writer = StoreWriter(store)
        await writer.add_trajectories(1, "train", chains("old"))
        await asyncio.to_thread(store.entered.wait, WAIT_S)  # the thread is inside the first write: the rest queues up
        for number in range(100):
            await writer.add_trajectories(1, "train", chains(f"c{number}"))
        await writer.add_trajectories(1, "validation", chains("v"))
        await writer.add_trajectories(1, "train", chains("new"), replace=True)
        writer.add_metrics(1, {"m": 1})
        store.gate.set()
        await writer.drained()
        writer.close()

    asyncio.run(work())
    joined = [f"c{number}" for number in range(100)]
    assert store.calls == [["old"], joined[:64], joined[64:], ["v"], ["new"], 1]
    assert sorted(row.id for row in store.rows()) == ["new", "v"]


def test_a_deferred_write_waits_for_the_end_of_the_context(store: SlowStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "DEFER_S", 600.0)
    store.gate.set()
    with StoreWriter(store) as writer:
        with writer.deferring():
            writer.put_trajectories(1, "train", chains("a"))
            writer.put_trajectories(1, "train", chains("b"))
            assert not store.entered.wait(0.2)
        assert store.entered.wait(WAIT_S)
        writer.flush()
        assert store.calls == [["a", "b"]]


def test_a_deferred_write_does_not_wait_longer_than_it_may(store: SlowStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "DEFER_S", 0.05)
    store.gate.set()
    with StoreWriter(store) as writer, writer.deferring():
        writer.put_trajectories(1, "train", chains("a"))
        assert store.entered.wait(WAIT_S)


@pytest.mark.parametrize("why", ["flush", "drained", "half full", "close"])
def test_a_deferred_write_does_not_hold_up_who_waits_for_it(
    store: SlowStore, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(writer_module, "DEFER_S", 600.0)
    store.gate.set()
    writer = StoreWriter(store, max_pending=3)
    with writer.deferring():
        writer.put_trajectories(1, "train", chains("a"))
        if why == "flush":
            writer.flush()
        elif why == "drained":
            asyncio.run(asyncio.wait_for(writer.drained(), WAIT_S))
        elif why == "half full":
            writer.put_trajectories(1, "train", chains("b"))
        else:
            writer.close()
        assert store.entered.wait(WAIT_S)
    writer.close()
    assert [each.id for each in store.trajectories()] == (["a", "b"] if why == "half full" else ["a"])


def test_flush_waits_for_what_was_added_before_it(store: SlowStore) -> None:
    async def work() -> None:
        writer = StoreWriter(store)
        await writer.add_trajectories(1, "train", chains("a"))
        writer.add_metrics(1, {"m": 1})
        flushed = asyncio.create_task(asyncio.to_thread(writer.flush))
        await asyncio.sleep(0.02)
        assert not flushed.done()
        store.gate.set()
        await flushed
        assert (store.count(), len(store.metrics())) == (1, 1)
        writer.close()

    asyncio.run(work())


@pytest.mark.parametrize("error", [StorageError("the disk is full"), ValueError("no number"), sqlite3.IntegrityError("odd")])
def test_a_failed_write_is_raised_by_every_later_call_and_nothing_is_stored_after_it(
    store: SlowStore, error: Exception
) -> None:
    async def work() -> None:
        writer = StoreWriter(store, max_pending=2)
        store.errors.append(error)
        await writer.add_trajectories(1, "train", chains("a"))
        writer.add_metrics(1, {"m": 1})
        waiting = asyncio.create_task(writer.add_trajectories(2, "train", chains("b", "c")))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        store.gate.set()
        with pytest.raises(StorageError, match=str(error)):
            await waiting
        with pytest.raises(StorageError, match=str(error)):
            await writer.add_trajectories(3, "train", chains("d"))
        with pytest.raises(StorageError, match=str(error)):
            writer.add_metrics(3, {"m": 3})
        with pytest.raises(StorageError, match=str(error)):
            await asyncio.to_thread(writer.flush)
        with pytest.raises(StorageError, match=str(error)):
            await writer.drained()
        with pytest.raises(StorageError, match=str(error)):
            writer.close()
        writer.close()  # told

    asyncio.run(work())
    assert (store.count(), store.metrics()) == (0, [])


def test_a_trajectory_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    broken = chain("b7")
    broken.turns[0].context_ids = [0.5]  # type: ignore[list-item]
    with RunStore(tmp_path / "run.db") as store:
        writer = StoreWriter(store)
        asyncio.run(writer.add_trajectories(1, "train", [chain("a"), broken]))
        with pytest.raises(StorageError, match=r"'b7'.*not an integer"):
            writer.close()
        assert store.count() == 0


def test_a_write_that_fails_at_the_end_does_not_hide_the_error_of_the_run(store: SlowStore) -> None:
    store.errors.append(StorageError("the disk is full"))
    store.gate.set()

    def run() -> None:
        with StoreWriter(store) as writer:
            writer.add_metrics(1, {"m": 1})
            raise KeyError("the run's own")

    with pytest.raises(KeyError):
        run()
    store.errors.append(StorageError("the disk is full"))
    with pytest.raises(StorageError, match="full"), StoreWriter(store) as writer:
        writer.add_metrics(1, {"m": 1})


def test_closing_writes_the_queue_and_refuses_more(store: SlowStore) -> None:
    writer = StoreWriter(store)
    asyncio.run(writer.add_trajectories(1, "train", chains("a")))
    store.gate.set()
    writer.close()
    writer.close()
    assert store.count() == 1
    with pytest.raises(ConfigError, match="closed"):
        writer.add_metrics(1, {})
    with pytest.raises(ConfigError, match="a split is"):
        asyncio.run(writer.add_trajectories(1, "test", []))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least 1"):
        StoreWriter(store, max_pending=0)


def test_a_disk_that_hangs_is_told_not_waited_for(store: SlowStore) -> None:
    async def work() -> None:
        writer = StoreWriter(store, max_pending=1, timeout_s=0.05)
        with pytest.raises(StorageError, match="the disk hangs"):
            await writer.add_trajectories(1, "train", chains("a", "b"))
        with pytest.raises(StorageError, match="the disk hangs"):
            await asyncio.to_thread(writer.flush)
        with pytest.raises(StorageError, match="the disk hangs"):
            await asyncio.to_thread(writer.close)

    asyncio.run(work())


def test_a_task_that_a_sibling_changes_meanwhile_is_encoded_again(store: SlowStore) -> None:
    store.gate.set()
    store.errors += [RuntimeError("dictionary changed size during iteration")] * 2
    writer = StoreWriter(store)
    asyncio.run(writer.add_trajectories(1, "train", chains("a")))
    writer.close()
    assert store.count() == 1


PROGRAM = """
import asyncio, sys
sys.path[:0] = {paths!r}
from test_run_store import chain
from agentfly.runs import RunStore, StoreWriter

async def work():
    writer = StoreWriter(RunStore({path!r}))
    for step in range(1, 10_000):
        await writer.add_trajectories(step, "train", [chain(f"{{step}}-{{i}}") for i in range(8)])
        writer.add_metrics(step, {{f"m{{i}}": i for i in range(5)}})
        if step % 3 == 0:
            await asyncio.to_thread(writer.flush)
            print(step, flush=True)

asyncio.run(work())
"""


@pytest.mark.parametrize("after", [3, 18])
def test_a_kill_loses_only_what_was_added_after_the_last_flush(tmp_path: Path, after: int) -> None:
    path = str(tmp_path / "run.db")
    code = PROGRAM.format(paths=[str(Path(__file__).parent)], path=path)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= after:
            break
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read().split()
    process.wait(timeout=WAIT_S)
    process.stdout.close()
    flushed = int(rest[-1]) if rest else after
    with RunStore(path) as store:
        steps = sorted({row.step for row in store.metrics()})
        assert steps == list(range(1, len(steps) + 1))  # without a hole
        assert steps[-1] >= flushed
        for step in steps:  # metrics come after the trajectories of their step, and each call is written as a whole
            assert store.count(step=step) == 8
            assert len([row for row in store.metrics() if row.step == step]) == 5
        assert store.count() - 8 * len(steps) in (0, 8)
        assert store.trajectory("1-0") == chain("1-0")


def test_calls_that_follow_one_another_share_a_transaction(store: SlowStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "LINGER_S", WAIT_S)
    monkeypatch.setattr(writer_module, "BATCH", 3)
    store.gate.set()

    async def work() -> None:
        with StoreWriter(store) as writer:
            for name in "ab":
                await writer.add_trajectories(1, "train", chains(name))
            await asyncio.sleep(0.05)
            assert store.calls == []
            await writer.add_trajectories(1, "train", chains("c"))
            while writer.pending:
                await asyncio.sleep(0.01)
            assert store.calls == [["a", "b", "c"]]
            await writer.add_trajectories(1, "train", chains("d"))

    asyncio.run(asyncio.wait_for(work(), WAIT_S / 2))
    assert store.calls == [["a", "b", "c"], ["d"]]
