"""The thread around vLLM, with an engine that counts in its place."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from agentfly.engines.vllm_thread import VllmRequest, VllmThread
from agentfly.errors import DeadlineError, EngineError


class Counting:
    """Gives each request the ids 0, 1, 2, ... up to `params` of them, one per step. Speaks as much of vLLM as is needed."""

    def __init__(self) -> None:
        self.running: dict[str, list[int]] = {}
        self.aborted: list[str] = []
        self.closed = threading.Event()
        self.engine_core = SimpleNamespace(shutdown=self.closed.set)
        self.step_threads: set[str] = set()
        self.pause_at = -1
        self.paused, self.hold = threading.Event(), threading.Event()
        self.broken: Exception | None = None
        self.ahead = False  # return the tokens of the step before, as vLLM does when it schedules ahead
        self.asleep = False
        self.launched: list[Any] = []
        self.salts: dict[str, str | None] = {}

    def add_request(self, request_id, prompt, params):
        if not isinstance(params, int):
            raise ValueError("these are no params")
        self.running[request_id] = [0, params]
        self.salts[request_id] = prompt.get("cache_salt")

    def sleep(self, level, mode):
        assert (level, mode) == (0, "keep")
        self.asleep = True

    def wake_up(self, tags):
        assert tags == ["scheduling"]
        self.asleep = False

    def abort_request(self, ids):
        self.aborted += ids
        for name in ids:
            del self.running[name]

    def step(self):
        if any(state[0] == self.pause_at for state in self.running.values()):
            self.paused.set()
            assert self.hold.wait(60)
        self.step_threads.add(threading.current_thread().name)
        if self.broken is not None:
            raise self.broken
        outputs = [] if self.asleep else self.compute()
        if self.ahead:
            outputs, self.launched = self.launched, outputs
        return outputs

    def compute(self):
        outputs = []
        for name, state in list(self.running.items()):
            token = state[0]
            state[0] += 1
            over = state[0] == state[1]
            entry = {token: SimpleNamespace(logprob=-float(token))}
            part = SimpleNamespace(token_ids=[token], logprobs=[entry], finish_reason="length" if over else None)
            outputs.append(SimpleNamespace(request_id=name, prompt_logprobs=None, outputs=[part], finished=over))
            if over:
                del self.running[name]
        return outputs


@pytest.fixture
def engine():
    return Counting()


@pytest.fixture
def thread(engine):
    made = VllmThread(lambda: engine, start_s=60)
    yield made
    engine.hold.set()
    made.shut()


def row_of(name: str, params, on_token=None) -> VllmRequest:
    loop = asyncio.get_running_loop()
    return VllmRequest(name, [1, 2], params, loop, loop.create_future(), on_token)


async def play(thread, name, params, on_token=None) -> VllmRequest:
    row = row_of(name, params, on_token)
    thread.add(row)
    async with asyncio.timeout(60):
        await row.future
    return row


async def until(happened) -> None:
    async with asyncio.timeout(60):
        while not happened():
            await asyncio.sleep(0.002)


def test_many_requests_run_in_one_thread_and_each_gets_its_own(thread, engine):
    async def main():
        return await asyncio.gather(*(play(thread, f"r{n}", n) for n in range(1, 9)))

    for count, row in enumerate(asyncio.run(main()), 1):
        assert row.ids == list(range(count))
        assert row.logprobs == [-float(token) for token in row.ids]
        assert row.finished == "length"
    assert engine.step_threads == {"agentfly-vllm"}


def test_every_token_says_which_weights_drew_it(thread, engine):
    async def main():
        row = row_of("r", 6)
        thread.add(row)
        await until(engine.paused.is_set)

        def publish(inside):
            assert inside is engine
            thread.version = 7
            return len(row.ids)

        asked = asyncio.create_task(asyncio.to_thread(thread.call, publish, 60, "publish"))
        await until(lambda: thread._inbox)
        engine.hold.set()
        changed = await asked
        async with asyncio.timeout(60):
            await row.future
        return row, changed

    engine.pause_at = 2
    row, changed = asyncio.run(main())
    assert changed == 3, "the step under way ends first"
    assert row.versions == [0, 0, 0, 7, 7, 7]


def test_a_step_that_was_launched_ahead_belongs_to_the_weights_that_sampled_it(thread, engine):
    engine.ahead, engine.pause_at = True, 2

    async def main():
        row = row_of("r", 8)
        thread.add(row)
        await until(engine.paused.is_set)

        def publish(inside):
            sampled = inside.running["r"][0]  # so many tokens come from the old weights
            thread.pause(inside)
            thread.version, thread.salt = 7, "1"
            thread.resume(inside)
            return sampled

        asked = asyncio.create_task(asyncio.to_thread(thread.call, publish, 60, "publish"))
        await until(lambda: thread._inbox)
        engine.hold.set()
        sampled = await asked
        async with asyncio.timeout(60):
            await row.future
        await play(thread, "later", 2)
        return row, sampled

    row, sampled = asyncio.run(main())
    assert row.ids == list(range(8))
    assert row.versions == [0] * sampled + [7] * (8 - sampled)
    assert engine.salts == {"r": None, "later": "1"}
    assert thread.sampled_tokens == 10


def test_a_last_call_waits_for_the_replies_in_progress_and_later_requests_wait_for_it(thread, engine):
    engine.pause_at = 2

    async def main():
        first = asyncio.create_task(play(thread, "first", 6))
        await until(engine.paused.is_set)

        def publish(inside):
            assert not inside.running
            thread.version = 7

        asked = asyncio.create_task(asyncio.to_thread(thread.call, publish, 60, "publish", last=True))
        await until(lambda: thread._inbox)
        later = asyncio.create_task(play(thread, "later", 3))
        gone = row_of("gone", 3)
        thread.add(gone)
        await until(lambda: len(thread._inbox) == 3)
        thread.remove(gone)
        engine.hold.set()
        await asked
        return await first, await later

    first, later = asyncio.run(main())
    assert first.versions == [0] * 6
    assert later.versions == [7] * 3
    assert "gone" not in engine.salts


def test_a_last_call_that_takes_too_long_is_given_up_and_requests_go_on(thread, engine):
    async def main():
        long = row_of("long", 10**9)
        thread.add(long)
        await until(lambda: long.ids)
        with pytest.raises(DeadlineError, match="vLLM did not publish within 0.05 s"):
            await asyncio.to_thread(thread.call, lambda engine: 1 / 0, 0.05, "publish", last=True)
        thread.remove(long)
        return await play(thread, "later", 3)

    assert asyncio.run(main()).ids == [0, 1, 2]


def test_tokens_are_heard_as_they_come(thread):
    heard = []
    asyncio.run(play(thread, "r", 4, heard.extend))
    assert heard == [0, 1, 2, 3]


def test_a_listener_that_raises_is_heard(thread):
    def listener(new):
        raise ValueError("no ears")

    with pytest.raises(ValueError, match="no ears"):
        asyncio.run(play(thread, "r", 400, listener))


def test_a_request_that_is_removed_is_aborted(thread, engine):
    async def main():
        row = row_of("r", 10**9)
        thread.add(row)
        await until(lambda: row.ids)
        thread.remove(row)
        await until(lambda: engine.aborted)

    asyncio.run(main())
    assert engine.aborted == ["r"]
    assert engine.running == {}


def test_replies_that_are_given_up_end_with_the_sentence(thread, engine):
    engine.pause_at = 3

    async def main():
        asked = [asyncio.create_task(play(thread, name, 10)) for name in "ab"]
        await until(engine.paused.is_set)
        done = asyncio.create_task(asyncio.to_thread(thread.call, lambda e: thread.abort_all(e, "it sleeps"), 60, "sleep"))
        await until(lambda: thread._inbox)
        engine.pause_at = -1
        engine.hold.set()
        await done
        with pytest.raises(EngineError, match="it sleeps"):
            await play(thread, "early", 2)
        await asyncio.to_thread(thread.call, lambda e: thread.accept_requests(), 60, "wake up")
        return await asyncio.gather(*asked, return_exceptions=True), await play(thread, "c", 2)

    ended, after = asyncio.run(main())
    assert [str(error) for error in ended] == ["it sleeps", "it sleeps"]
    assert sorted(engine.aborted) == ["a", "b"]
    assert after.ids == [0, 1]


def test_replies_whose_loop_is_gone_are_given_up_with_the_others(thread, engine):
    engine.pause_at = 3

    async def leave():
        thread.add(row_of("gone", 10))

    asyncio.run(leave())

    async def main():
        asked = asyncio.create_task(play(thread, "here", 10))
        await until(engine.paused.is_set)
        done = asyncio.create_task(asyncio.to_thread(thread.call, lambda e: thread.abort_all(e, "it sleeps"), 60, "sleep"))
        await until(lambda: thread._inbox)
        engine.pause_at = -1
        engine.hold.set()
        await done
        with pytest.raises(EngineError, match="it sleeps"):
            await asked

    asyncio.run(main())
    assert engine.running == {}


def test_a_request_that_vllm_refuses_hurts_no_other(thread):
    async def main():
        with pytest.raises(EngineError, match="vLLM refused the request: these are no params"):
            await play(thread, "bad", "nonsense")
        return await play(thread, "good", 3)

    assert asyncio.run(main()).ids == [0, 1, 2]


def test_an_exception_of_the_work_is_raised_in_its_caller(thread):
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda engine: 1 / 0, 60, "divide")
    assert thread.call(lambda engine: 5, 60, "count") == 5


def test_work_that_takes_too_long_is_given_up(thread, engine):
    held = threading.Event()
    try:
        with pytest.raises(DeadlineError, match="vLLM did not dawdle within 0.05 s"):
            thread.call(lambda engine: held.wait(60), 0.05, "dawdle")
    finally:
        held.set()


def test_a_failure_reaches_all_who_wait_and_all_who_come_later(thread, engine):
    async def main():
        row = row_of("r", 10**9)
        thread.add(row)
        await until(lambda: row.ids)
        engine.broken = RuntimeError("out of memory")
        with pytest.raises(EngineError, match="the vLLM engine stopped: RuntimeError: out of memory"):
            async with asyncio.timeout(60):
                await row.future
        await until(engine.closed.is_set)
        with pytest.raises(EngineError, match="out of memory"):
            thread.add(row_of("later", 1))
        with pytest.raises(EngineError, match="out of memory"):
            thread.call(lambda engine: None, 60, "help")

    asyncio.run(main())


def test_closing_ends_the_thread_and_frees_the_engine(thread, engine):
    async def main():
        row = row_of("r", 10**9)
        thread.add(row)
        await until(lambda: row.ids)
        await asyncio.to_thread(thread.shut)
        with pytest.raises(EngineError, match="the engine was closed"):
            async with asyncio.timeout(60):
                await row.future

    asyncio.run(main())
    assert engine.closed.is_set()
    assert not thread._thread.is_alive()


def test_an_engine_that_cannot_start_says_why():
    def make():
        raise ValueError("no such device")

    with pytest.raises(ValueError, match="no such device"):
        VllmThread(make, start_s=60)


def test_an_engine_that_starts_too_slowly_is_given_up():
    started = threading.Event()
    engine = Counting()

    def make():
        started.wait(60)
        return engine

    with pytest.raises(DeadlineError, match="did not start within 0.05 s"):
        VllmThread(make, start_s=0.05)
    started.set()
    assert engine.closed.wait(60), "what came up too late is closed again"
