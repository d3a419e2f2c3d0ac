"""Worker threads: order, awaitables, abandoned calls, and reuse by the pool."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import random
import threading
import time
from typing import Any

import pytest

from agentfly.aio import threads
from agentfly.aio.threads import Abandoned, ThreadPool, WorkerThread, run_in_thread
from agentfly.errors import WorldError


def test_jobs_run_in_one_thread_in_order_and_awaitables_are_awaited_there() -> None:
    async def main() -> None:
        thread = WorkerThread("test")

        async def where() -> int:
            await asyncio.sleep(0.001)
            return threading.get_ident()

        idents = await asyncio.gather(thread.run(threading.get_ident), thread.run(where), thread.run(where))
        assert len(set(idents)) == 1
        assert idents[0] != threading.get_ident()
        with pytest.raises(KeyError, match="no such"):
            await thread.run(lambda: {}["no such"])
        thread.stop()
        assert await thread.join(60)

    asyncio.run(main())


@pytest.mark.parametrize("is_async", [False, True])
def test_abandoning_stops_the_running_job_refuses_the_queued_ones_and_runs_the_final_one(is_async: bool) -> None:
    async def main() -> None:
        thread, begun, seen = WorkerThread("test"), threading.Event(), []

        def loops() -> None:
            begun.set()
            try:
                while True:
                    time.sleep(0.001)
            except Abandoned:
                seen.append("stopped")
                raise

        async def sleeps() -> None:
            begun.set()
            try:
                await asyncio.sleep(3600)
            finally:
                seen.append("stopped")

        running = asyncio.create_task(thread.run(sleeps if is_async else loops))
        queued = asyncio.create_task(thread.run(lambda: seen.append("never")))
        await asyncio.to_thread(begun.wait, 60)
        thread.abandon(lambda: seen.append("final"))
        thread.abandon(lambda: seen.append("twice"))
        with pytest.raises(WorldError, match="abandoned before"):
            await queued
        assert await thread.join(60)
        assert sorted(seen) == ["final", "stopped"]
        with pytest.raises((Abandoned, asyncio.CancelledError)):
            await asyncio.wait_for(running, 60)

    asyncio.run(main())


class Spins:
    """Its finalizer runs until an exception ends it, which Python then ignores."""

    def __init__(self, begun: threading.Event) -> None:
        self.begun = begun

    def __del__(self) -> None:
        self.begun.set()
        while True:
            time.sleep(0.001)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("taken_by", ["a finalizer", "a bare except", "an async call"])
def test_an_abandoned_call_is_interrupted_again_when_something_took_the_first_exception(
    taken_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "AGAIN_S", 0.01)

    async def main() -> None:
        thread, begun, taken = WorkerThread("test"), threading.Event(), []

        def goes_on() -> None:
            if taken_by == "a finalizer":
                Spins(begun)
            while True:
                begun.set()
                try:
                    time.sleep(0.001)
                except:  # noqa: E722  what a user's tool may do
                    if taken_by == "a finalizer" or len(taken) == 2:
                        raise
                    taken.append("once")

        async def retries() -> None:
            goes_on()

        running = asyncio.create_task(thread.run(retries if taken_by == "an async call" else goes_on))
        await asyncio.to_thread(begun.wait, 60)
        thread.abandon()
        assert await thread.join(60)
        with pytest.raises((Abandoned, asyncio.CancelledError)):
            await asyncio.wait_for(running, 60)
        assert taken == [] if taken_by == "a finalizer" else ["once"] * 2

    asyncio.run(main())


def test_a_pooled_call_sees_the_context_of_its_caller_and_returns_awaitables_as_they_are() -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name")

    async def value() -> int:
        return 5

    async def main() -> None:
        name.set("chain 7")
        assert await run_in_thread(name.get) == "chain 7"
        assert await (await run_in_thread(value)) == 5

    asyncio.run(main())


def test_cancelling_a_finished_call_does_not_stop_the_next_call_of_its_thread() -> None:
    async def main() -> None:
        pool = ThreadPool()
        for _ in range(200):
            quick = asyncio.create_task(pool.run(int))
            await asyncio.sleep(0.0005)
            quick.cancel()
            values: list[Any] = await asyncio.gather(*(pool.run(sum, range(100)) for _ in range(3)))
            assert values == [4950] * 3
            await asyncio.gather(quick, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no list of descriptors")
@pytest.mark.filterwarnings(
    "ignore:coroutine .*linger.* was never awaited"
)  # it was abandoned between its making and its start
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_calls_abandoned_at_their_very_start_leave_no_descriptor_open() -> None:
    async def linger() -> None:
        await asyncio.sleep(60)

    async def main() -> list[WorkerThread]:
        rng = random.Random(0)
        threads = [WorkerThread("test") for _ in range(200)]
        for thread in threads:
            call = asyncio.ensure_future(thread.run(linger))
            await asyncio.sleep(0)
            time.sleep(rng.uniform(0.0, 0.0008))  # noqa: ASYNC251  the thread is anywhere between its first line and the wait
            thread.abandon()
            call.cancel()
        for thread in threads:
            assert await thread.join(60)
        return threads

    before = len(os.listdir("/proc/self/fd"))
    threads = asyncio.run(main())
    gc.collect()  # what was never awaited says so here
    assert len(os.listdir("/proc/self/fd")) == before
    assert not any(thread.usable for thread in threads)
