"""Limits, stops, seeds, streaming, cancelling and failing."""

from __future__ import annotations

import asyncio
import sys

import pytest
import torch

from agentfly.engines.local import engine as engine_module
from agentfly.engines.local.engine import LocalEngine
from agentfly.engines.local.load import DEFAULT_SWITCH_S, SWITCH_S, tune
from agentfly.errors import ConfigError, EngineError
from agentfly.protocols import Engine
from agentfly.types import Request, Sampling

from .tiny import END, ask, close_to, make_model, prompt_of, run, until


def test_it_is_an_engine():
    async def work(engine):
        return isinstance(engine, Engine), engine.reads, engine.max_context

    assert run(work) == (True, "ids", 256)


def test_a_seed_gives_the_same_reply_alone_and_in_company():
    async def alone(engine):
        return (await ask(engine, prompt_of(12), seed=5, max_tokens=40)).token_ids

    async def in_company(engine):
        others = [asyncio.create_task(ask(engine, prompt_of(3 + 7 * i, i), seed=i, max_tokens=10 + 9 * i)) for i in range(7)]
        await asyncio.sleep(0.01)
        mine = await ask(engine, prompt_of(12), seed=5, max_tokens=40)
        await asyncio.gather(*others)
        return mine.token_ids

    assert run(alone) == run(in_company)


def test_without_a_seed_replies_differ():
    async def work(engine):
        return [tuple((await ask(engine, prompt_of(12), max_tokens=20)).token_ids) for _ in range(3)]

    assert len(set(run(work))) == 3


def test_max_tokens_ends_a_reply_as_length():
    async def work(engine):
        return await ask(engine, prompt_of(12), temperature=0, max_tokens=4)

    done = run(work, stop_ids=())
    assert (len(done.token_ids), done.stop) == (4, "length")


def test_a_full_context_ends_a_reply_as_length():
    async def work(engine):
        return await ask(engine, prompt_of(25), max_tokens=100, seed=0)

    done = run(work, max_context=32, stop_ids=())
    assert (len(done.token_ids), done.stop) == (7, "length")


def test_a_stop_id_is_kept_in_the_ids_and_left_out_of_the_text():
    async def work(engine):
        free = await ask(engine, prompt_of(12), seed=2, max_tokens=30)
        stop = free.token_ids[10]
        cut = await ask(engine, prompt_of(12), seed=2, max_tokens=30, stop_ids=(stop,))
        return free, cut, stop, engine.tokenizer

    free, cut, stop, tokenizer = run(work, stop_ids=())
    end = free.token_ids.index(stop) + 1
    assert cut.token_ids == free.token_ids[:end]
    assert cut.stop == "stop"
    assert cut.text == tokenizer.decode(cut.token_ids[:-1])


def test_a_stop_string_is_found_across_tokens_and_tokens_stay_as_sampled():
    async def work(engine):
        free = await ask(engine, prompt_of(12), seed=4, max_tokens=40)
        at = next(i for i in range(5, 38) if all(32 <= t < 127 for t in free.token_ids[i : i + 2]))
        word = bytes(free.token_ids[at : at + 2]).decode()
        return free, word, await ask(engine, prompt_of(12), seed=4, max_tokens=40, stop=("never there", word))

    free, word, cut = run(work, stop_ids=())
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) < 40
    assert cut.text.endswith(word)
    assert cut.stop == "stop"


def test_streamed_pieces_are_whole_characters_and_make_up_the_text():
    pieces: list[str] = []

    async def work(engine):
        return await ask(engine, "grüße", seed=1, max_tokens=60, on_text=pieces.append)

    done = run(work, stop_ids=())
    assert "".join(pieces) == done.text
    assert len(pieces) > 10


def test_a_listener_that_raises_fails_its_own_request_only():
    def listener(text):
        raise ValueError("no ears")

    async def work(engine):
        bad = asyncio.create_task(ask(engine, prompt_of(5), seed=1, max_tokens=50, on_text=listener))
        good = await ask(engine, prompt_of(6), seed=1, max_tokens=20)
        with pytest.raises(ValueError, match="no ears"):
            await bad
        return good

    assert len(run(work, stop_ids=()).token_ids) == 20


@pytest.mark.parametrize(("prompt", "sentence"), [([], "empty"), (prompt_of(32), "32 tokens and the context holds 32")])
def test_prompts_that_cannot_be_served_are_refused(prompt, sentence):
    async def work(engine):
        with pytest.raises(EngineError, match=sentence):
            await ask(engine, prompt)
        return await ask(engine, prompt_of(5), max_tokens=2, seed=0)

    assert run(work, max_context=32).token_ids


def test_a_prompt_may_grow_after_the_call():
    async def work(engine):
        prompt = prompt_of(10)
        task = asyncio.create_task(engine.generate(Request(prompt, Sampling(temperature=0, max_tokens=10))))
        await asyncio.sleep(0)
        prompt.extend([1, 2, 3])
        return (await task).token_ids, (await ask(engine, prompt_of(10), temperature=0, max_tokens=10)).token_ids

    lent, own = run(work)
    assert lent == own


def test_a_cancelled_request_leaves_the_batch():
    async def work(engine):
        task = asyncio.create_task(ask(engine, prompt_of(10), seed=0, max_tokens=200))
        await until(lambda: engine.stats()["sampled_tokens"])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not engine.stats()["running"])
        before = engine.stats()["sampled_tokens"]
        await ask(engine, prompt_of(5), seed=0, max_tokens=3)
        return engine.stats()["sampled_tokens"] - before

    assert run(work, stop_ids=()) == 3


def test_a_cancelled_request_hands_over_what_was_sampled():
    async def work(engine):
        cut, began = [], []
        sampling = Sampling(seed=0, max_tokens=200)
        asked = Request(prompt_of(10), sampling, on_text=began.append, on_cut=cut.append)
        task = asyncio.create_task(engine.generate(asked))
        await until(lambda: began)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return cut, await engine.generate(Request(prompt_of(10), sampling, on_cut=cut.append))

    (cut,), whole = run(work, stop_ids=())
    count = len(cut.token_ids)
    assert 0 < count < 200
    assert cut.token_ids == whole.token_ids[:count] and cut.versions == [0] * count and cut.stop == "length"
    assert cut.logprobs == pytest.approx(whole.logprobs[:count], abs=1e-5)


def test_more_requests_than_the_batch_takes_wait_their_turn():
    async def work(engine):
        seen = []
        tasks = [asyncio.create_task(ask(engine, prompt_of(5, i), seed=i, max_tokens=10)) for i in range(9)]
        while not all(task.done() for task in tasks):
            seen.append(engine.stats()["running"])
            await asyncio.sleep(0.001)
        return [len(task.result().token_ids) for task in tasks], max(seen)

    lengths, most = run(work, max_batch=3, stop_ids=())
    assert lengths == [10] * 9
    assert most <= 3


def test_a_failure_in_the_loop_fails_those_who_wait_and_those_who_come():
    async def work(engine):
        def broken(*args, **kwargs):
            raise RuntimeError("out of memory")

        engine._scheduler.model = broken
        waiting = [asyncio.create_task(ask(engine, prompt_of(5, i), max_tokens=5)) for i in range(3)]
        for task in [*waiting, asyncio.create_task(ask(engine, prompt_of(5)))]:
            with pytest.raises(EngineError, match="the local engine stopped: RuntimeError: out of memory"):
                await task
        with pytest.raises(EngineError, match="out of memory"):
            await ask(engine, prompt_of(5))

    run(work)


def test_an_engine_that_runs_out_of_memory_names_the_keys_in_one_line():
    async def work(engine):
        def broken(*args, **kwargs):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nGPU 0 has a total capacity of 1 GiB")

        engine._scheduler.model = broken
        with pytest.raises(EngineError, match="in the local engine: set agent.engine.kv_gib .* Tried to allocate 2 GiB.$"):
            await ask(engine, prompt_of(5))

    run(work)


def test_weights_that_are_not_numbers_are_an_engine_error_and_the_engine_lives_on():
    model = make_model()

    async def work(engine):
        kept = model.lm_head.weight.clone()
        with torch.no_grad():
            model.lm_head.weight.fill_(float("nan"))
        engine.publish(1)
        with pytest.raises(EngineError, match="not numbers"):
            await ask(engine, prompt_of(5))
        with torch.no_grad():
            model.lm_head.weight.copy_(kept)
        engine.publish(2)
        return await ask(engine, prompt_of(5), max_tokens=3)

    assert run(work, model, stop_ids=()).versions == [2] * 3


def test_closing_fails_what_still_runs_and_what_comes_after():
    async def work(engine):
        task = asyncio.create_task(ask(engine, prompt_of(5), max_tokens=200))
        await until(lambda: engine.stats()["running"])
        await engine.close()
        for late in (task, ask(engine, prompt_of(5))):
            with pytest.raises(EngineError, match="was closed"):
                await late

    run(work, stop_ids=())


def test_one_engine_serves_several_event_loops_in_turn():
    from agentfly.engines.local import LocalEngine

    from .tiny import byte_tokenizer

    engine = LocalEngine(make_model(), byte_tokenizer())
    replies = [asyncio.run(ask(engine, prompt_of(9), temperature=0, max_tokens=5)).token_ids for _ in range(2)]
    engine.shut()
    assert replies[0] == replies[1]


def test_the_end_token_of_the_model_ends_replies_by_default():
    async def work(engine):
        return engine.stop_ids

    assert END in run(work)


@pytest.mark.parametrize("option", ["max_context", "max_batch", "kv_tokens", "kv_gib", "kv_fraction", "max_step_tokens"])
def test_a_limit_of_zero_is_refused(option):
    with pytest.raises(ConfigError, match=f"agent.engine.{option} must be"):
        run(None, **{option: 0})


def test_a_float16_model_that_overflows_is_refused_with_the_cure():
    model = make_model().to(torch.float16)
    model.model.norm.weight.data.fill_(6e4)
    with pytest.raises(ConfigError, match="float16 overflows above 65,504: use bfloat16"):
        run(None, model)


def test_the_cache_may_be_a_share_of_the_free_memory(monkeypatch):
    async def work(engine):
        return engine.max_context

    monkeypatch.setattr("os.sysconf", lambda name: {"SC_AVPHYS_PAGES": 300, "SC_PAGE_SIZE": 4096}[name])
    whole, half = (run(work, max_context=10**6, kv_fraction=share) for share in (1.0, 0.5))
    assert 2 * half <= whole <= 2 * half + 1 < 10**6
    with pytest.raises(ConfigError, match="kv_gib and kv_fraction all say"):
        run(None, kv_gib=1, kv_fraction=0.5)


def test_a_model_whose_attention_is_of_another_kind_is_refused():
    import transformers

    config = transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(ConfigError, match="MambaForCausalLM also has linear_attention"):
        run(None, transformers.MambaForCausalLM(config))


@pytest.mark.parametrize(("before", "after"), [(DEFAULT_SWITCH_S, SWITCH_S), (0.001, 0.001), (0.02, 0.02)])
def test_the_engines_thread_gets_the_interpreter_soon_unless_the_program_has_set_its_own_interval(before, after):
    was = sys.getswitchinterval()
    try:
        sys.setswitchinterval(before)
        tune(torch.zeros(1))
        assert sys.getswitchinterval() == pytest.approx(after)
    finally:
        sys.setswitchinterval(was)


def test_a_request_wakes_a_thread_that_waits(monkeypatch):
    """Each request comes when the thread has gone to sleep; its next timeout is longer than `run` lets the test take."""
    monkeypatch.setattr("agentfly.engines.local.engine.IDLE_S", 600.0)

    async def work(engine):
        for number in range(5):
            await ask(engine, prompt_of(12), max_tokens=2, seed=number)
            await until(lambda: engine._waits)
        return True

    assert run(work)


def test_the_memory_of_a_cache_is_lent_on_a_gpu_only():
    with pytest.raises(ConfigError, match=r'lend_cache needs a GPU and cache = "pages"'):
        LocalEngine(make_model(), None, lend_cache=True)


class Lender:
    """Memory on a CPU that is overwritten while it is lent."""

    def __init__(self, num_bytes):
        self.tensor = torch.zeros(num_bytes, dtype=torch.uint8)
        self.lent, self.times = True, 0

    def lend(self):
        self.lent = True
        self.tensor.fill_(0xFF)  # NaN in every float format

    def take(self):
        if self.lent:
            self.lent, self.times = False, self.times + 1
            self.tensor.zero_()


def test_what_was_cached_before_the_memory_was_lent_is_not_used_again(monkeypatch):
    monkeypatch.setattr(engine_module, "cache_lender", lambda *_: Lender)
    prompts = [prompt_of(40, seed) for seed in range(4)]

    async def work(engine):
        first = [await ask(engine, each, f"{n}", seed=n, max_tokens=12) for n, each in enumerate(prompts)]
        times = engine._lender.times
        engine.rest()
        assert engine._lender.lent
        longer = [each + reply.token_ids + prompt_of(5) for each, reply in zip(prompts, first, strict=True)]
        second = [await ask(engine, each, f"{n}", seed=n, max_tokens=12) for n, each in enumerate(longer)]
        assert engine._lender.times == times + 1 == 2
        return longer, second, engine.stats()

    model = make_model()
    longer, second, stats = run(work, model, cache="pages")
    assert stats["stale_hits"] == 0
    for prompt, reply in zip(longer, second, strict=True):
        ids = torch.tensor([prompt + reply.token_ids])
        with torch.no_grad():
            scores = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1].float(), -1)
        assert close_to(scores.gather(1, ids[0, len(prompt) :, None])[:, 0].tolist(), reply.logprobs)
