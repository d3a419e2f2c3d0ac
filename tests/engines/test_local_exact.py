"""The local engine computes what the model itself computes, whatever else is in the batch."""

from __future__ import annotations

import asyncio

import pytest
import torch

from .tiny import FAMILIES, ask, close_to, full_logprobs, make_model, prompt_of, run, until

LENGTHS = (5, 61, 17, 1, 120, 30)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_replies_are_those_of_generate_though_chains_join_and_leave(family):
    model = make_model(family)
    prompts = [prompt_of(length) for length in LENGTHS]

    async def work(engine):
        first = [asyncio.create_task(ask(engine, p, temperature=0, max_tokens=12 + 5 * i)) for i, p in enumerate(prompts[:3])]
        await asyncio.wait(first[:1])  # the others join while the first ones still run
        later = [asyncio.create_task(ask(engine, p, temperature=0, max_tokens=20)) for p in prompts[3:]]
        return await asyncio.gather(*first, *later)

    for prompt, completion in zip(prompts, run(work, model, max_step_tokens=32), strict=True):
        count = len(completion.token_ids)
        want = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[0, len(prompt) :].tolist()
        assert completion.token_ids == want
        assert close_to(completion.logprobs, full_logprobs(model, prompt, completion.token_ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tiny_models_notice_what_is_far_back(family):
    """Else the tests above could not fail."""
    model = make_model(family)
    prompt = prompt_of(24)
    other = [(prompt[0] + 1) % 250, *prompt[1:]]
    far = full_logprobs(model, prompt, [5])[0] - full_logprobs(model, other, [5])[0]
    assert abs(far) > 1e-3


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_logprobs_are_under_the_temperature_and_before_truncation(temperature):
    model = make_model()
    prompt = prompt_of(20)

    async def work(engine):
        return await ask(engine, prompt, temperature=temperature, top_k=5, top_p=0.8, min_p=0.05, max_tokens=30, seed=1)

    completion = run(work, model)
    assert close_to(completion.logprobs, full_logprobs(model, prompt, completion.token_ids, temperature))


def test_half_of_the_batch_may_read_prompts_while_the_other_half_samples():
    model = make_model()

    async def work(engine):
        talkers = [asyncio.create_task(ask(engine, prompt_of(9, i), temperature=0, max_tokens=40)) for i in range(4)]
        await until(lambda: engine.stats()["sampled_tokens"] >= 8)
        readers = [asyncio.create_task(ask(engine, prompt_of(100 + i, i), temperature=0, max_tokens=3)) for i in range(4)]
        return await asyncio.gather(*talkers, *readers)

    done = run(work, model, max_step_tokens=40)
    prompts = [prompt_of(9, i) for i in range(4)] + [prompt_of(100 + i, i) for i in range(4)]
    for prompt, completion in zip(prompts, done, strict=True):
        assert close_to(completion.logprobs, full_logprobs(model, prompt, completion.token_ids))
