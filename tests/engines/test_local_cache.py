"""What is cached saves work and never changes a result."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
import torch

from agentfly.engines.local.scheduler import SequenceState
from agentfly.types import Request, Sampling

from .tiny import FAMILIES, ask, close_to, full_logprobs, make_model, prompt_of, run, until


@pytest.mark.parametrize("family", FAMILIES)
def test_later_turns_read_only_what_is_new(family):
    model = make_model(family)
    ids = prompt_of(40)

    async def work(engine):
        prompt = list(ids)
        for turn in range(3):
            before = engine.stats()["prefilled_tokens"]
            completion = await ask(engine, prompt, "chain", temperature=0, max_tokens=8)
            assert close_to(completion.logprobs, full_logprobs(model, prompt, completion.token_ids))
            if turn:
                # the last sampled token and the ten new ones, of which the last is the one that draws
                assert engine.stats()["prefilled_tokens"] - before == 10
            prompt += completion.token_ids + prompt_of(10, turn + 1)

    run(work, model)


def test_a_history_that_was_rewritten_is_read_again_from_where_it_differs():
    model = make_model()
    first = prompt_of(40)
    second = [*first[:25], *prompt_of(30, 7)]

    async def work(engine):
        await ask(engine, first, "chain", temperature=0, max_tokens=8)
        before = engine.stats()["prefilled_tokens"]
        completion = await ask(engine, second, "chain", temperature=0, max_tokens=8)
        return completion, engine.stats()["prefilled_tokens"] - before

    completion, num_read = run(work, model)
    assert num_read == 29
    assert close_to(completion.logprobs, full_logprobs(model, second, completion.token_ids))


def test_the_same_prompt_twice_draws_again_from_its_last_token():
    model = make_model()

    async def work(engine):
        return [(await ask(engine, prompt_of(30), "chain", temperature=0, max_tokens=8)).token_ids for _ in range(2)]

    first, second = run(work, model)
    assert first == second


def test_siblings_read_their_prompt_once():
    model = make_model()
    prompt = prompt_of(100)

    async def work(engine):
        chains = [ask(engine, prompt, f"chain {i}", temperature=1, seed=i, max_tokens=8) for i in range(8)]
        return await asyncio.gather(*chains), engine.stats()

    done, stats = run(work, model, max_step_tokens=32)
    assert stats["prefilled_tokens"] == 99
    assert stats["shared_tokens"] == 7 * 99
    for completion in done:
        assert close_to(completion.logprobs, full_logprobs(model, prompt, completion.token_ids))


def test_chains_that_begin_alike_share_only_their_beginning():
    model = make_model()
    prompts = [[*prompt_of(60), *prompt_of(20, i)] for i in range(4)]

    async def work(engine):
        done = await asyncio.gather(*(ask(engine, p, f"{i}", temperature=0, max_tokens=8) for i, p in enumerate(prompts)))
        return done, engine.stats()

    done, stats = run(work, model)
    assert stats["prefilled_tokens"] == 60 + 4 * 19
    for prompt, completion in zip(prompts, done, strict=True):
        assert close_to(completion.logprobs, full_logprobs(model, prompt, completion.token_ids))


def test_a_cancelled_leader_does_not_hold_up_its_siblings():
    model = make_model()
    prompt = prompt_of(200)

    async def work(engine):
        leader = asyncio.create_task(ask(engine, prompt, "a", temperature=0, max_tokens=8))
        follower = asyncio.create_task(ask(engine, prompt, "b", temperature=0, max_tokens=8))
        await until(lambda: engine.stats()["prefilled_tokens"])
        leader.cancel()
        return await follower

    completion = run(work, model, max_step_tokens=4)
    assert close_to(completion.logprobs, full_logprobs(model, prompt, completion.token_ids))


def change(model):
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(0.8)


def test_after_a_published_change_nothing_old_is_used():
    model = make_model()
    prompt = prompt_of(50)

    async def work(engine):
        old = await ask(engine, prompt, "chain", temperature=0, max_tokens=8)
        change(model)
        engine.publish(7)
        return old, await ask(engine, prompt, "chain", temperature=0, max_tokens=8)

    old, new = run(work, model)
    assert (set(old.versions), set(new.versions)) == ({0}, {7})
    assert close_to(new.logprobs, full_logprobs(model, prompt, new.token_ids))
    assert not close_to(old.logprobs, full_logprobs(model, prompt, old.token_ids))


def test_a_reply_that_spans_a_change_says_which_token_is_from_which_weights():
    model = make_model()
    prompt = prompt_of(30)

    async def work(engine):
        task = asyncio.create_task(ask(engine, prompt, temperature=1, seed=3, max_tokens=200))
        await until(lambda: engine.stats()["sampled_tokens"] >= 20)
        with engine.hold():
            change(model)
            engine.publish(1)
        return await task

    done = run(work, model, stop_ids=())
    switch = done.versions.index(1)
    assert 20 <= switch < 200
    assert done.versions == [0] * switch + [1] * (200 - switch)
    assert close_to(done.logprobs[switch:], full_logprobs(model, prompt, done.token_ids)[switch:])


def test_a_caller_that_holds_the_engine_waits_for_at_most_one_step():
    class SlowToWake:
        """The engine's lock for a thread that the system wakes late: it asks, sleeps, and only then tries to take it."""

        def __init__(self, engine):
            self.engine, self.lock = engine, engine._forward
            self.release = self.lock.release

        def acquire(self, timeout):
            self.before = self.engine.stats()["sampled_tokens"]
            time.sleep(0.2)
            return self.lock.acquire(timeout=timeout)

        def __enter__(self):
            return self.lock.__enter__()

        def __exit__(self, *why):
            self.lock.__exit__(*why)

    async def work(engine):
        lock = engine._forward = SlowToWake(engine)
        task = asyncio.create_task(ask(engine, prompt_of(30), temperature=1, seed=3, max_tokens=1500))
        await until(lambda: engine.stats()["sampled_tokens"] >= 5)
        with engine.hold():
            after = engine.stats()["sampled_tokens"]
        task.cancel()
        return after - lock.before

    assert run(work, stop_ids=(), max_context=1600) <= 2


def test_a_step_that_overlapped_a_change_of_weights_leaves_nothing_behind():
    model = make_model()
    prompt = prompt_of(20)

    async def work(engine):
        batch = engine._scheduler
        row = SequenceState(Request(prompt, Sampling(temperature=0, max_tokens=1)), engine.stop_ids, engine._decode_tail)
        batch.add(row)
        with torch.no_grad():
            assert batch.step(0, lambda: False) == []
            assert (row.tokens, row.kv.cached) == (prompt, 0)
            assert batch.step(1, lambda: True) == [row]
        return row

    row = run(work, model)
    assert row.versions == [1]
    assert close_to(row.logprobs, full_logprobs(model, prompt, row.tokens[20:]))


def test_weights_published_during_a_step_make_that_step_void():
    model = make_model()
    prompt = prompt_of(20)

    async def work(engine):
        real = engine._scheduler.model

        def changing(**inputs):
            out = real(**inputs)
            if engine.version == 0:
                change(model)
                engine.publish(1)
            return out

        engine._scheduler.model = changing
        return await ask(engine, prompt, temperature=0, max_tokens=3)

    done = run(work, model, stop_ids=())
    assert done.versions == [1, 1, 1]
    assert close_to(done.logprobs, full_logprobs(model, prompt, done.token_ids))


def test_a_model_that_was_rebuilt_is_followed_at_the_next_publish():
    model = make_model()
    prompt = prompt_of(30)

    async def work(engine):
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 0.5)
        engine.publish(1)
        return await ask(engine, prompt, temperature=0, max_tokens=8)

    done = run(work, model)
    assert close_to(done.logprobs, full_logprobs(model, prompt, done.token_ids))


def test_more_chains_than_the_cache_holds_all_get_their_reply():
    model = make_model()
    prompts = [prompt_of(40, i) for i in range(12)]

    async def work(engine):
        async def chain(i):
            first = await ask(engine, prompts[i], f"{i}", temperature=0, max_tokens=20)
            longer = prompts[i] + first.token_ids + prompt_of(30, i)
            return longer, await ask(engine, longer, f"{i}", temperature=0, max_tokens=20)

        return await asyncio.gather(*(chain(i) for i in range(12))), engine.stats()

    done, stats = run(work, model, kv_tokens=300)
    assert stats["slots"] * stats["slot_length"] <= 300
    assert stats["evicted"] > 0
    for prompt, completion in done:
        assert close_to(completion.logprobs, full_logprobs(model, prompt, completion.token_ids))


def test_rows_that_outgrow_the_cache_go_back_to_the_queue_and_come_again():
    model = make_model()
    prompts = [prompt_of(8, i) for i in range(6)]

    async def work(engine):
        done = await asyncio.gather(*(ask(engine, p, temperature=1, seed=1, max_tokens=150) for p in prompts))
        return done, engine.stats()

    done, stats = run(work, model, kv_tokens=256, max_context=160, stop_ids=())
    assert stats["preempted"] > 0
    for prompt, completion in zip(prompts, done, strict=True):
        assert len(completion.token_ids) == 150
        assert close_to(completion.logprobs, full_logprobs(model, prompt, completion.token_ids))


def test_nothing_goes_wrong_in_a_storm():
    """Many chains, a small cache, cancelled turns, released chains and new weights, all at random."""
    model = make_model()
    rng = random.Random(0)
    tasks = [prompt_of(30, i) for i in range(5)]
    checked = 0

    async def chain(engine, i):
        nonlocal checked
        prompt = list(tasks[i % 5])
        turn = 0
        while turn < 3:  # a cancelled turn is asked again: how many turns finish does not depend on timing
            asked = asyncio.create_task(ask(engine, prompt, f"{i}", seed=i, max_tokens=rng.randint(1, 25)))
            if rng.random() < 0.25:
                await asyncio.sleep(rng.random() * 0.02)
                asked.cancel()
            await asyncio.wait([asked])
            if asked.cancelled():
                continue
            turn += 1
            done = asked.result()
            if set(done.versions) == {engine.version}:
                assert close_to(done.logprobs, full_logprobs(model, prompt, done.token_ids))
                checked += 1
            prompt += done.token_ids + prompt_of(rng.randint(1, 20), 10 * i + turn)
        engine.release(f"{i}")

    async def work(engine):
        chains = asyncio.gather(*(chain(engine, i) for i in range(40)))
        for version in (1, 2):
            await until(lambda: checked > 15 * version)  # noqa: B023
            with engine.hold():
                change(model)
                engine.publish(version)
        await chains
        return engine.stats()

    stats = run(work, model, kv_tokens=900, max_context=200, max_step_tokens=48, max_batch=9)
    assert checked > 50
    assert stats["evicted"] > 0
    assert (stats["running"], stats["queued"]) == (0, 0)


def test_a_released_chain_makes_room_without_an_eviction():
    async def work(engine):
        for i in range(20):
            await ask(engine, prompt_of(40, i), f"{i}", temperature=0, max_tokens=2)
            engine.release(f"{i}")
        return engine.stats()

    stats = run(work, kv_tokens=512)
    assert stats["evicted"] == 0
