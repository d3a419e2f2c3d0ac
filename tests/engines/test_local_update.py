"""New weights while replies are in progress: what happens to them, and what new requests may reuse."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from typing import Any

import pytest
import torch

from agentfly.engines.local import paged_scheduler
from agentfly.engines.local.page_allocator import PageAllocator
from agentfly.engines.local.slot_allocator import SlotAllocator
from agentfly.engines.local.slot_scheduler import SlotScheduler
from agentfly.engines.options import COUNTERS
from agentfly.errors import ConfigError, DeadlineError, EngineError
from agentfly.protocols import TrainableEngine

from . import tiny
from .tiny import ask, check_pages, close_to, full_logprobs, is_idle, make_model, prompt_of, until

MODES = ["recompute", "keep", "finish"]
EVERY_MODE = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(params=["slots", "pages", "pages, one launch ahead"])
def cache(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param.endswith("ahead"):
        monkeypatch.setattr(paged_scheduler, "LAUNCHES_AHEAD", {"cpu": 1})
    return str(request.param).partition(",")[0]


def run(work: Any, model: Any = None, **options: Any) -> Any:
    return tiny.run(work, model, **{"kv_tokens": 8192, **options})


def change(model: Any, by: float = 0.8) -> None:
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(by)


def publish_held(engine: Any, model: Any, version: int, by: float = 0.8) -> None:
    with engine.hold():
        change(model, by)
        engine.publish(version)


def kept_logprobs(old: Any, new: Any, prompt: list[int], sampled: list[int], switch: int) -> list[float]:
    """Log-probs of the tokens from `switch` on: the new weights over keys and values that the old weights computed."""
    with torch.no_grad():
        past = old(torch.tensor([[*prompt, *sampled[: switch - 1]]]), use_cache=True).past_key_values
        logits = new(torch.tensor([sampled[switch - 1 : -1]]), past_key_values=past, use_cache=True).logits[0].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(sampled[switch:])[:, None])[:, 0].tolist()


@EVERY_MODE
def test_each_token_carries_the_version_of_the_weights_that_sampled_it(mode: str, cache: str) -> None:
    model = make_model()
    prompts = [prompt_of(20 + i, i) for i in range(3)]

    async def work(engine: Any) -> Any:
        engine.at_update = mode
        asked = [asyncio.ensure_future(ask(engine, p, f"{i}", seed=i, max_tokens=120)) for i, p in enumerate(prompts)]
        await until(lambda: engine.stats()["sampled_tokens"] >= 40)
        old = copy.deepcopy(model)
        await asyncio.to_thread(publish_held, engine, model, 1)
        return old, await asyncio.gather(*asked), engine.stats()

    old, done, stats = run(work, model, cache=cache, stop_ids=())
    assert stats["stale_hits"] == 0
    for prompt, reply in zip(prompts, done, strict=True):
        switch = reply.versions.index(1) if 1 in reply.versions else 120
        assert reply.versions == [0] * switch + [1] * (120 - switch)
        assert (switch == 120) == (mode == "finish")
        before = full_logprobs(old, prompt, reply.token_ids)
        assert close_to(reply.logprobs[:switch], before[:switch])
        if mode == "recompute":
            assert close_to(reply.logprobs[switch:], full_logprobs(model, prompt, reply.token_ids)[switch:])
        elif mode == "keep":
            assert close_to(reply.logprobs[switch:], kept_logprobs(old, model, prompt, reply.token_ids, switch))


@EVERY_MODE
def test_a_request_after_the_change_uses_nothing_that_older_weights_have_cached(mode: str, cache: str) -> None:
    model = make_model()
    prompt = prompt_of(50)

    async def work(engine: Any) -> Any:
        engine.at_update = mode
        first = await ask(engine, prompt, "chain", temperature=0, max_tokens=8)
        running = asyncio.ensure_future(ask(engine, prompt, "other", seed=1, max_tokens=60))
        await until(lambda: engine.stats()["sampled_tokens"] >= 20)
        await asyncio.to_thread(publish_held, engine, model, 1)
        longer = [*prompt, *first.token_ids, *prompt_of(9)]
        siblings = [ask(engine, prompt, f"new {i}", seed=i, max_tokens=8) for i in range(3)]
        own, *done = await asyncio.gather(ask(engine, longer, "chain", temperature=0, max_tokens=8), *siblings)
        spanning = await running
        again = [*prompt, *spanning.token_ids, 5]
        return longer, own, done, again, await ask(engine, again, "other", seed=2, max_tokens=8), engine.stats()

    longer, own, done, again, later, stats = run(work, model, cache=cache, stop_ids=())
    for text, reply in [(longer, own), *((prompt, reply) for reply in done), (again, later)]:
        assert set(reply.versions) == {1}
        assert close_to(reply.logprobs, full_logprobs(model, text, reply.token_ids))
    assert stats["stale_hits"] == 0


def slow_down(engine: Any, seconds: float = 0.03) -> None:
    """Pause before each step, so that a busy machine does not miss the moment that a test waits for."""
    step = engine._scheduler.step

    def slow(*args: Any) -> Any:
        time.sleep(seconds)
        return step(*args)

    engine._scheduler.step = slow


def test_siblings_in_progress_compute_their_common_prompt_once_with_the_new_weights(cache: str) -> None:
    model = make_model()
    prompts = [[*prompt_of(160), *prompt_of(5, i)] for i in range(6)]

    async def work(engine: Any) -> Any:
        slow_down(engine)
        asked = [asyncio.ensure_future(ask(engine, p, f"{i}", seed=i, max_tokens=60)) for i, p in enumerate(prompts)]
        await until(lambda: engine.stats()["sampled_tokens"] >= 60)
        before = engine.stats()
        await asyncio.to_thread(publish_held, engine, model, 1)
        return before, await asyncio.gather(*asked), engine.stats()

    before, done, stats = run(work, model, cache=cache, stop_ids=())
    switches = [reply.versions.index(1) for reply in done]
    for prompt, reply, switch in zip(prompts, done, switches, strict=True):
        assert close_to(reply.logprobs[switch:], full_logprobs(model, prompt, reply.token_ids)[switch:])
    assert stats["shared_tokens"] - before["shared_tokens"] == 5 * 160
    assert stats["prefilled_tokens"] - before["prefilled_tokens"] <= 160 + 6 * 5 + sum(switches)
    assert stats["stale_hits"] == 0


def test_siblings_that_wait_for_each_other_when_new_weights_arrive_do_not_wait_in_a_circle(cache: str) -> None:
    """A chain's second turn waits for a prefix that a later chain computes; with new weights it comes first again."""
    model = make_model()

    async def work(engine: Any) -> Any:
        common = prompt_of(160)
        await ask(engine, prompt_of(40, 1), "first", seed=1, max_tokens=2)
        slow_down(engine)
        later = asyncio.ensure_future(ask(engine, [*common, 3], "later", seed=2, max_tokens=20))
        again = asyncio.ensure_future(ask(engine, [*common, 4], "first", seed=3, max_tokens=20))
        await until(lambda: len(engine._scheduler.running) == 2)
        await asyncio.to_thread(publish_held, engine, model, 1)
        return await asyncio.wait_for(asyncio.gather(later, again), 60)

    done = run(work, model, cache=cache, stop_ids=(), max_step_tokens=32)
    assert [len(reply.token_ids) for reply in done] == [20, 20]


@EVERY_MODE
def test_publishing_the_same_weights_does_not_change_a_seeded_reply(mode: str, cache: str) -> None:
    async def work(engine: Any, times: int) -> Any:
        engine.at_update = mode
        asked = [asyncio.ensure_future(ask(engine, prompt_of(9, i), f"{i}", seed=i, max_tokens=80)) for i in range(4)]
        for version in range(1, 1 + times):
            await until(lambda: engine.stats()["sampled_tokens"] >= 40 * version or asked[0].done())  # noqa: B023
            await asyncio.to_thread(publish_held, engine, engine.model, version, 1.0)
        return [reply.token_ids for reply in await asyncio.gather(*asked)]

    quiet, busy = (run(lambda engine: work(engine, times), cache=cache, stop_ids=()) for times in (0, 3))  # noqa: B023
    assert quiet == busy


def test_finish_lets_replies_end_and_starts_none_meanwhile(cache: str) -> None:
    model = make_model()

    async def work(engine: Any) -> Any:
        engine.at_update = "finish"
        asked = [asyncio.ensure_future(ask(engine, prompt_of(9, i), seed=i, max_tokens=80)) for i in range(2)]
        await until(lambda: engine.stats()["running"] == 2)
        waiting = asyncio.ensure_future(ask(engine, prompt_of(9, 7), seed=7, max_tokens=80))
        changed = asyncio.create_task(asyncio.to_thread(publish_held, engine, model, 1))
        await until(lambda: engine._scheduler.draining)
        late = asyncio.ensure_future(ask(engine, prompt_of(9, 8), seed=8, max_tokens=5))
        await changed
        return await asyncio.gather(*asked), await asyncio.gather(waiting, late)

    before, after = run(work, model, cache=cache, stop_ids=(), max_batch=2)
    assert all(set(reply.versions) == {0} for reply in before)
    for reply in after:
        assert set(reply.versions) == {1}
    assert close_to(after[1].logprobs, full_logprobs(model, prompt_of(9, 8), after[1].token_ids))


def test_cancelling_the_last_reply_ends_the_wait_of_finish(cache: str) -> None:
    async def work(engine: Any) -> Any:
        engine.at_update = "finish"
        endless = asyncio.ensure_future(ask(engine, prompt_of(9), max_tokens=4000))
        await until(lambda: engine.stats()["sampled_tokens"])
        changed = asyncio.create_task(asyncio.to_thread(publish_held, engine, engine.model, 1))
        await until(lambda: engine._scheduler.draining)
        endless.cancel()
        await changed
        return await ask(engine, prompt_of(9), max_tokens=3)

    assert set(run(work, cache=cache, stop_ids=(), max_context=4100).versions) == {1}


def test_finish_gives_up_at_its_deadline_and_sampling_goes_on(cache: str) -> None:
    async def work(engine: Any) -> Any:
        engine.at_update = "finish"
        long = asyncio.ensure_future(ask(engine, prompt_of(9), max_tokens=4000))
        await until(lambda: engine.stats()["sampled_tokens"])
        with pytest.raises(DeadlineError, match=r"replies in progress did not end within 0\.05 s"), engine.hold(0.05):
            pass
        assert len((await ask(engine, prompt_of(9, 1), max_tokens=3)).token_ids) == 3
        long.cancel()

    run(work, cache=cache, stop_ids=(), max_context=4100)


def test_closing_the_engine_ends_the_wait_of_finish(cache: str) -> None:
    async def work(engine: Any) -> Any:
        engine.at_update = "finish"
        long = asyncio.ensure_future(ask(engine, prompt_of(9), max_tokens=4000))
        await until(lambda: engine.stats()["sampled_tokens"])
        changed = asyncio.create_task(asyncio.to_thread(publish_held, engine, engine.model, 1))
        await until(lambda: engine._scheduler.draining)
        await engine.close()
        await changed
        with pytest.raises(EngineError, match="was closed"):
            await long

    run(work, cache=cache, stop_ids=(), max_context=4100)


@EVERY_MODE
def test_weights_that_change_under_load_leave_every_reply_right(mode: str, cache: str) -> None:
    """Two threads hold the engine again and again while chains of several turns come, leave and are preempted.

    Chains come until enough replies were sampled by one version: the learners end at their limit, and then all are.
    """
    model = make_model()
    weights = {0: copy.deepcopy(model)}
    lock = threading.Lock()
    stop = threading.Event()
    checked = 0

    def learn(engine: Any) -> None:
        while not stop.is_set() and engine.version < 12:
            with engine.hold(), engine.hold():
                with lock:
                    change(model, 0.98)
                    version = max(weights) + 1
                    weights[version] = copy.deepcopy(model)
                engine.publish(version)
            stop.wait(0.02)

    async def chain(engine: Any, number: int) -> None:
        nonlocal checked
        prompt = [*prompt_of(20), *prompt_of(4, number % 3)]
        for turn in range(3):
            asked = asyncio.ensure_future(ask(engine, prompt, f"{number}", seed=turn, max_tokens=6 + number))
            if number % 5 == turn:
                await asyncio.sleep(0.01)
                asked.cancel()
            try:
                reply = await asked
            except asyncio.CancelledError:
                continue
            assert reply.versions == sorted(reply.versions)
            if len(set(reply.versions)) == 1:
                assert close_to(reply.logprobs, full_logprobs(weights[reply.versions[0]], prompt, reply.token_ids))
                checked += 1
            prompt = [*prompt, *reply.token_ids, *prompt_of(5, turn)]

    async def work(engine: Any) -> Any:
        engine.at_update = mode
        learners = [asyncio.create_task(asyncio.to_thread(learn, engine)) for _ in range(2)]
        try:
            while checked < 12 or engine.version < 4:
                await asyncio.gather(*(chain(engine, number) for number in range(12)))
        finally:
            stop.set()
        await asyncio.gather(*learners)
        await until(lambda: is_idle(engine))
        if cache == "pages":
            check_pages(engine._scheduler.allocator)
        return engine.stats(), engine.version

    stats, version = run(work, model, cache=cache, stop_ids=(), max_batch=5, kv_tokens=480, max_context=160, max_step_tokens=32)
    assert stats["stale_hits"] == 0
    assert version >= 4
    assert (stats["running"], stats["queued"]) == (0, 0)


def test_outside_of_hold_a_reply_keeps_nothing_from_before(cache: str) -> None:
    """A step may have run on weights that were half changed, so what it cached is not kept."""
    model = make_model()

    async def work(engine: Any) -> Any:
        engine.at_update = "keep"
        asked = asyncio.ensure_future(ask(engine, prompt_of(30), seed=1, max_tokens=150))
        await until(lambda: engine.stats()["sampled_tokens"] >= 20)
        change(model)
        engine.publish(1)
        return await asked

    reply = run(work, model, cache=cache, stop_ids=())
    switch = reply.versions.index(1)
    assert close_to(reply.logprobs[switch:], full_logprobs(model, prompt_of(30), reply.token_ids)[switch:])


@pytest.mark.parametrize("fault", ["caches are not renewed", "nothing is dropped"])
def test_a_stale_cache_is_counted_by_the_stamps(fault: str, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "caches are not renewed":
        for scheduler in (SlotScheduler, paged_scheduler.PagedScheduler):
            monkeypatch.setattr(scheduler, "renew", lambda self, publication, keep: None)
    else:
        for allocator in (PageAllocator, SlotAllocator):
            monkeypatch.setattr(allocator, "renew", lambda self, publication, keep: {})

    async def work(engine: Any) -> Any:
        prompt = prompt_of(50)
        first = await ask(engine, prompt, "chain", max_tokens=4)
        change(engine.model)
        engine.publish(1)
        await ask(engine, [*prompt, *first.token_ids, 7], "chain", max_tokens=4)
        own = engine.stats()["stale_hits"]
        await ask(engine, prompt, "sibling", max_tokens=4)
        return own, engine.stats()["stale_hits"]

    own, both = run(work, cache=cache, stop_ids=())
    assert own == 50 + 3
    assert both > own


def test_a_mode_that_does_not_exist_is_refused() -> None:
    async def work(engine: Any) -> None:
        assert isinstance(engine, TrainableEngine)
        assert engine.at_update == "recompute"
        with pytest.raises(
            ConfigError, match="at_update must be 'recompute' or 'keep' or 'finish' for LocalEngine, not 'drop'"
        ):
            engine.at_update = "drop"
        engine.at_update = "keep"
        assert engine.at_update == "keep"

    run(work)


def test_the_counters_of_a_step_account_for_the_time_of_the_engine(cache: str) -> None:
    async def work(engine: Any) -> Any:
        began = [time.perf_counter()]
        first = engine.stats()
        began.append(time.perf_counter())
        await asyncio.gather(*(ask(engine, prompt_of(60, i), seed=i, max_tokens=20) for i in range(4)))
        await until(lambda: not engine._scheduler.busy)
        with engine.hold():
            await asyncio.sleep(0.05)
        await until(lambda: engine.stats()["held_s"] > 0)
        ended = [time.perf_counter()]
        last = engine.stats()
        ended.append(time.perf_counter())
        return first, last, ended[0] - began[1], ended[1] - began[0]

    first, last, least_s, most_s = run(work, cache=cache, stop_ids=())
    spent = {name: last[name] - first[name] for name in (*COUNTERS, "busy_s", "held_s")}
    assert spent["sampled_tokens"] == 80
    assert spent["prefilled_tokens"] == 4 * 59
    assert spent["prepared_s"] == spent["stale_hits"] == 0
    assert all(spent[name] > 0 for name in ("prefill_s", "decode_s", "host_s", "idle_s"))
    assert spent["prefill_s"] + spent["decode_s"] + spent["host_s"] == pytest.approx(spent["busy_s"], rel=1e-3)
    assert least_s - 1e-6 <= spent["busy_s"] + spent["idle_s"] <= most_s + 1e-6
    assert spent["idle_s"] >= spent["held_s"] >= 0.05
