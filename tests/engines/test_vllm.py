"""The real vLLM, in this process. Skipped where it is not installed; its CPU build serves.

One engine lasts the whole file, since it takes half a minute to start.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import math

import pytest
import torch

import agentfly
from agentfly.engines import open_engine
from agentfly.errors import ConfigError, EngineError, InvariantError
from agentfly.learn.model.lora import adapt
from agentfly.learn.settings import LoraSettings
from agentfly.protocols import Engine
from agentfly.types import Request, Sampling
from tests.close import assert_close_to_norm
from tests.tiny import ROWS, save_tiny_model, tiny_agent

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install 'agentfly[vllm]'"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
PROMPT = [(31 * i + 5) % 900 for i in range(150)]  # more than a block of the cache


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), head_dim=32)  # vLLM's CPU kernels know none smaller


@pytest.fixture(scope="module")
def engine(folder):
    made, _ = open_engine(str(folder), kind="vllm", max_batch=16, kv_gib=0.25)
    yield made
    made.shut()


def ask(engine, prompt=PROMPT, on_text=None, **sampling):
    return asyncio.run(engine.generate(Request(list(prompt), Sampling(**sampling), on_text=on_text)))


def full_logprobs(model, prompt, sampled, temperature):
    with torch.no_grad():
        logits = model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(sampled)[:, None])[:, 0].tolist()


def change(engine, by=0.02, seed=1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in engine.model.parameters():
            if weights.requires_grad:
                weights.add_(by * torch.randn(weights.shape, generator=generator))


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_log_probs_are_those_of_a_forward_pass_at_the_temperature(engine, temperature):
    engine.publish(engine.version)
    done = ask(engine, temperature=temperature, max_tokens=12, seed=3)
    assert isinstance(engine, Engine)
    assert_close_to_norm(done.logprobs, full_logprobs(engine.model, PROMPT, done.token_ids, temperature or 1.0), scale=1.0)
    assert set(done.versions) == {engine.version}


def test_a_seed_repeats_a_reply(engine):
    assert ask(engine, max_tokens=12, seed=3).token_ids == ask(engine, max_tokens=12, seed=3).token_ids


def test_a_stop_id_ends_the_reply_and_stays_in_its_ids(engine):
    free = ask(engine, max_tokens=12, seed=3)
    third = free.token_ids[2]
    done = ask(engine, max_tokens=12, seed=3, stop_ids=(third,))
    first = free.token_ids.index(third)
    assert done.token_ids == free.token_ids[: first + 1]
    assert done.stop == "stop"
    assert done.text == engine.tokenizer.decode(
        done.token_ids[:-1], skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def test_a_stop_string_ends_the_reply_and_stays_in_its_text(engine):
    for seed in range(20):
        free = ask(engine, max_tokens=12, seed=seed)
        letters = [letter for letter in free.text if letter.isascii() and letter.isalnum()]
        if letters:
            break
    done = ask(engine, max_tokens=12, seed=seed, stop=(letters[0],))
    assert letters[0] in done.text
    assert done.token_ids == free.token_ids[: len(done.token_ids)]


def test_text_is_shown_as_it_comes(engine):
    shown: list[str] = []
    done = ask(engine, on_text=shown.append, max_tokens=20, seed=5)
    assert done.text.startswith("".join(shown))
    assert len(shown) > 1


def test_many_at_once_get_what_each_would_get_alone(engine):
    async def main():
        asked = [engine.generate(Request(PROMPT[: 20 + n], Sampling(max_tokens=8, seed=n))) for n in range(12)]
        return await asyncio.gather(*asked)

    together = asyncio.run(main())
    for n, done in enumerate(together):
        assert_close_to_norm(done.logprobs, full_logprobs(engine.model, PROMPT[: 20 + n], done.token_ids, 1.0), scale=1.0)


def test_more_prompts_than_one_step_reads_keep_their_seeds(engine):
    async def main():
        asked = [engine.generate(Request([n, *PROMPT[:149], *PROMPT], Sampling(max_tokens=3, seed=n))) for n in range(40)]
        return await asyncio.gather(*asked)

    for n, done in enumerate(asyncio.run(main())):
        prompt = [n, *PROMPT[:149], *PROMPT]
        assert_close_to_norm(done.logprobs, full_logprobs(engine.model, prompt, done.token_ids, 1.0), scale=1.0)


def test_a_request_that_is_given_up_leaves_the_engine_free(engine):
    async def main():
        asked = asyncio.create_task(engine.generate(Request(PROMPT[:4], Sampling(max_tokens=400, stop_ids=(), seed=1))))
        while engine.stats()["steps"] == before:
            await asyncio.sleep(0.001)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        return await engine.generate(Request(PROMPT[:4], Sampling(max_tokens=2, seed=1)))

    before = engine.stats()["steps"]
    assert len(asyncio.run(asyncio.wait_for(main(), 120)).token_ids) <= 2


def test_after_publishing_a_cached_prompt_is_read_anew(engine):
    engine.publish(engine.version)
    ask(engine, max_tokens=2)  # its blocks are in the cache now
    change(engine)
    engine.publish(engine.version + 1)
    assert engine.proof.version == engine.version
    assert engine.proof.gap < 1e-4 < engine.proof.moved
    done = ask(engine, max_tokens=8, seed=2)
    assert_close_to_norm(done.logprobs, full_logprobs(engine.model, PROMPT, done.token_ids, 1.0), scale=1.0)
    assert set(done.versions) == {engine.version}


@pytest.mark.parametrize("mode", ["recompute", "keep", "finish"])
def test_replies_in_progress_at_a_publish_carry_the_versions_of_their_tokens(engine, mode):
    engine.publish(engine.version)
    before = engine.version

    async def main():
        asked = [asyncio.create_task(engine.generate(Request(PROMPT, Sampling(max_tokens=200, seed=n)))) for n in range(3)]
        while engine.stats()["sampled_tokens"] < started + 30:
            await asyncio.sleep(0.001)

        def publish():
            with engine.hold():
                change(engine)
                engine.publish(before + 1)

        await asyncio.to_thread(publish)
        later = await engine.generate(Request(PROMPT, Sampling(max_tokens=8, seed=9)))
        return await asyncio.gather(*asked), later

    started = engine.stats()["sampled_tokens"]
    engine.at_update = mode
    try:
        done, later = asyncio.run(asyncio.wait_for(main(), 300))
    finally:
        engine.at_update = "recompute"
    assert set(later.versions) == {before + 1}
    assert_close_to_norm(later.logprobs, full_logprobs(engine.model, PROMPT, later.token_ids, 1.0), scale=1.0)
    for reply in done:
        assert reply.versions == sorted(reply.versions)
        assert reply.versions[0] == before
        switch = reply.versions.index(before + 1) if before + 1 in reply.versions else len(reply.versions)
        assert mode != "finish" or switch == len(reply.versions)
        if mode == "recompute":
            want = full_logprobs(engine.model, PROMPT, reply.token_ids, 1.0)
            assert_close_to_norm(reply.logprobs[switch:], want[switch:], scale=1.0)


def test_a_cache_that_was_not_emptied_is_caught(engine):
    salts, engine._salts = engine._salts, itertools.repeat(0)  # new requests are not told from old ones either
    engine.publish(engine.version)
    change(engine, 0.2)
    inside = engine._thread.call(lambda vllm: vllm, 60, "say who it is")
    kept = inside.reset_prefix_cache
    inside.reset_prefix_cache = lambda **options: True
    try:
        with pytest.raises(InvariantError, match="its cache is old"):
            engine.publish(engine.version + 1)
    finally:
        inside.reset_prefix_cache, engine._salts = kept, salts
    engine.publish(engine.version + 1)


def test_weights_that_did_not_arrive_are_caught(engine):
    engine.publish(engine.version)
    change(engine, 0.001)
    inside = engine._thread.call(lambda vllm: vllm, 60, "say who it is")
    kept = inside.collective_rpc
    inside.collective_rpc = lambda *args, **options: [None]
    try:
        with pytest.raises(InvariantError, match="weights"):
            engine.publish(engine.version + 1)
    finally:
        inside.collective_rpc = kept
    engine.publish(engine.version + 1)


def test_a_cut_leaves_no_log_probs(engine):
    assert all(math.isnan(x) for x in ask(engine, max_tokens=3, top_k=4).logprobs)


def test_a_prompt_that_does_not_fit_is_refused(engine):
    with pytest.raises(EngineError, match="the context holds 512"):
        ask(engine, [1] * 512)


def test_adapters_arrive_merged(engine):
    adapt(engine.model, LoraSettings(rank=2), seed=1)
    engine.publish(engine.version + 1)
    change(engine)
    engine.publish(engine.version + 1)
    done = ask(engine, max_tokens=8, seed=2)
    assert_close_to_norm(done.logprobs, full_logprobs(engine.model, PROMPT, done.token_ids, 1.0), scale=1.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(("option", "value", "match"), [("sleep", True, "needs a GPU"), ("memory_fraction", 0.5, "for a GPU")])
def test_what_a_cpu_cannot_do_is_refused(folder, option, value, match):
    with pytest.raises(ConfigError, match=match):
        open_engine(str(folder), kind="vllm", **{option: value})


def test_a_run_trains_on_vllm(folder, tmp_path, engine):
    agent = tiny_agent(folder, engine={"kind": "vllm", "max_batch": 16, "kv_gib": 0.25})
    settings = {"run.dir": str(tmp_path), "train.lr": 1e-2, "rollout.num_tasks": 2, "rollout.num_chains": 3}
    result = agentfly.train(
        agent, data=ROWS[:-2], validation=ROWS[-2:], steps=2, **{"train.validate_at_start": False}, **settings
    )
    asyncio.run(agent.close())
    assert all(row["handover/gap"] < 1e-4 for row in result.history)
    assert all(row["train/logprob_gap"] < 1e-4 for row in result.history)
    assert result.steps == 2
