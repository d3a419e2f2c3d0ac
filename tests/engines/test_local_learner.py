"""The model is shared with the learner, and sampling leaves no trace in it."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch
import transformers

from .tiny import ask, close_to, full_logprobs, make_model, prompt_of, run, until


def loss_of(model, seed=0):
    ids = torch.tensor([prompt_of(40, seed), prompt_of(40, seed + 1)])
    return model(ids, labels=ids).loss


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_gradients_between_generations_are_those_of_an_untouched_copy(family):
    model = make_model(family)
    copied = copy.deepcopy(model)

    async def work(engine):
        await ask(engine, prompt_of(20), "chain", seed=1, max_tokens=10)
        model.train()
        loss_of(model).backward()
        await ask(engine, prompt_of(20), "chain", seed=1, max_tokens=10)

    run(work, model)
    copied.train()
    loss_of(copied).backward()
    assert model.training
    for (name, ours), theirs in zip(model.named_parameters(), copied.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name


def test_a_training_pass_may_run_while_chains_are_sampled():
    model = make_model()
    prompt = prompt_of(20)

    async def work(engine):
        tasks = [asyncio.create_task(ask(engine, prompt, seed=i, max_tokens=100)) for i in range(4)]
        await until(lambda: engine.stats()["sampled_tokens"])
        for _ in range(3):
            await asyncio.to_thread(lambda: loss_of(model).backward())
        return await asyncio.gather(*tasks)

    done = run(work, model, stop_ids=())
    assert model.config._attn_implementation == "sdpa"
    for completion in done:
        assert close_to(completion.logprobs, full_logprobs(model, prompt, completion.token_ids))


def test_an_optimizer_step_reaches_the_engine():
    model = make_model()
    prompt = prompt_of(20)

    async def work(engine):
        before = await ask(engine, prompt, "chain", temperature=0, max_tokens=5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        loss_of(model).backward()
        optimizer.step()
        engine.publish(1)
        return before, await ask(engine, prompt, "chain", temperature=0, max_tokens=5)

    before, after = run(work, model)
    assert after.logprobs != before.logprobs
    assert close_to(after.logprobs, full_logprobs(model, prompt, after.token_ids))


def test_dropout_of_the_learner_does_not_disturb_sampling():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=260,
        n_embd=48,
        n_layer=2,
        n_head=4,
        n_positions=128,
        resid_pdrop=0.5,
        embd_pdrop=0.5,
        bos_token_id=256,
        eos_token_id=257,
    )
    model = transformers.GPT2LMHeadModel(config).train()
    prompt = prompt_of(20)

    async def work(engine):
        return await ask(engine, prompt, temperature=0, max_tokens=10)

    done = run(work, model)
    assert model.training
    assert close_to(done.logprobs, full_logprobs(model.eval(), prompt, done.token_ids))


def test_gradient_checkpointing_of_the_learner_is_its_own_affair():
    model = make_model()
    model.gradient_checkpointing_enable()
    model.train()

    async def work(engine):
        return await ask(engine, prompt_of(20), temperature=0, max_tokens=10)

    assert run(work, model).token_ids == run(work, make_model()).token_ids
    assert model.is_gradient_checkpointing
