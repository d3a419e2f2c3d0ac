"""The same engine on a GPU: the same tokens, and log-probs as near as the precision allows."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest
import torch

from agentfly.kernels.lent_memory import LentMemory
from tests.needs import needs_cuda

from .tiny import FAMILIES, ask, ask_or_leave, check_pages, close_to, is_idle, make_model, prompt_of, run, until

pytestmark = [pytest.mark.gpu, needs_cuda]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 0.3)])
def test_logprobs_equal_a_full_forward_on_the_gpu(family, dtype, tolerance):
    model = make_model(family).to("cuda", dtype)
    prompts = [prompt_of(length) for length in (5, 61, 17, 120)]

    async def chain(engine, i):
        first = await ask(engine, prompts[i], f"{i}", seed=i, max_tokens=12)
        longer = prompts[i] + first.token_ids + prompt_of(9, i)
        return longer, await ask(engine, longer, f"{i}", seed=i, max_tokens=12)

    async def work(engine):
        return await asyncio.gather(*(chain(engine, i) for i in range(4))), engine.stats()

    done, stats = run(work, model, max_step_tokens=32)
    assert stats["reused_tokens"] > 0
    for prompt, completion in done:
        assert mean_gap(model, prompt, completion) < tolerance


def mean_gap(model, prompt, completion, first=0):
    """How far the log-probs of a reply, from the `first` token on, are from those of a full forward."""
    ids = torch.tensor([prompt + completion.token_ids], device="cuda")
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    want = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
    return (want - torch.tensor(completion.logprobs)).abs()[first:].mean()


def test_the_prompts_of_many_chains_are_read_in_one_pass():
    model = make_model().to("cuda")
    prompts = [prompt_of(9 + number % 30, number) for number in range(250)]

    async def work(engine):
        with engine.hold():
            asked = [asyncio.ensure_future(ask(engine, each, f"{n}", seed=n, max_tokens=9)) for n, each in enumerate(prompts)]
            await until(lambda: len(engine._inbox) == len(prompts))
        return await asyncio.gather(*asked), engine.stats()

    completions, stats = run(work, model, stop_ids=[], max_step_tokens=8192)
    for prompt, completion in zip(prompts, completions, strict=True):
        assert mean_gap(model, prompt, completion) < 2e-3
    assert stats["prefilled_tokens"] == sum(len(each) - 1 for each in prompts)


def test_chains_that_leave_come_again_and_do_not_fit_at_once_are_read_again_and_stay_right():
    """Pages for a quarter of the lanes: rows are sent back, caches are taken from chains that wait, prompts are read beside."""
    model = make_model().to("cuda")
    rng = random.Random(4)
    seen = 0

    async def chain(engine, number):
        nonlocal seen
        prompt = [*prompt_of(rng.choice([10, 33])), *prompt_of(rng.randint(1, 20), number)]
        for turn in range(4):
            given = {"seed": turn, "max_tokens": rng.randint(1, 90)}
            completion = await ask_or_leave(engine, rng, 0.2, prompt, f"{number}", **given)
            if completion is None:
                continue
            assert mean_gap(model, prompt, completion) < 2e-3
            seen += 1
            prompt = [*prompt[: rng.randint(5, 50)], *completion.token_ids, *prompt_of(rng.randint(1, 9), turn)]

    async def work(engine):
        for _ in range(2):
            await asyncio.gather(*(chain(engine, number) for number in range(64)))
            await until(lambda: is_idle(engine))
            check_pages(engine._scheduler.allocator)
        return engine.stats()

    stats = run(work, model, stop_ids=[], kv_tokens=1200, max_context=250, max_batch=32, max_step_tokens=128)
    assert seen > 100
    assert stats["preempted"] > 0
    assert stats["evicted"] > 0


def test_a_publish_in_the_middle_of_a_reply_goes_on_with_the_new_weights_on_the_gpu():
    model = make_model().to("cuda")

    async def work(engine):
        asked = [ask(engine, prompt_of(20, i), f"{i}", temperature=1, seed=i, max_tokens=8000) for i in range(8)]
        going = asyncio.gather(*asked)
        await until(lambda: engine.stats()["sampled_tokens"] > 10)
        with engine.hold():
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)
            engine.publish(1)
        return await going

    for number, completion in enumerate(run(work, model, stop_ids=[], max_context=8100, kv_tokens=8 * 8112)):
        assert sorted(completion.versions) == completion.versions
        assert completion.versions[-1] == 1
        first = completion.versions.index(1)
        assert mean_gap(model, prompt_of(20, number), completion, first) < 2e-3


def test_a_reply_does_not_wait_for_what_another_thread_has_launched():
    model = make_model().to("cuda")
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    began, stopped = threading.Event(), threading.Event()

    def learn():
        """Launch work without an end: a reply that waited for it would never come."""
        while not stopped.is_set():
            torch.mm(matrix, matrix)
            began.set()

    async def work(engine):
        alone = await ask(engine, prompt_of(20), "alone", seed=3, max_tokens=16)
        learner = threading.Thread(target=learn)
        learner.start()
        try:
            await asyncio.to_thread(began.wait)
            return alone, await asyncio.wait_for(ask(engine, prompt_of(20), "beside", seed=3, max_tokens=16), 60.0)
        finally:
            stopped.set()
            learner.join()

    alone, beside = run(work, model)
    assert beside.token_ids == alone.token_ids
    assert close_to(beside.logprobs, alone.logprobs)


def test_weights_that_were_changed_by_kernels_still_running_are_those_of_the_next_reply():
    model = make_model().to("cuda")
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    async def work(engine):
        await ask(engine, prompt_of(20), "before", seed=3, max_tokens=4)
        for _ in range(300):
            torch.mm(matrix, matrix)
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                generator = torch.Generator("cuda").manual_seed(number)
                parameter.add_(0.05 * torch.randn(parameter.shape, device="cuda", generator=generator))
        engine.publish(1)
        return await ask(engine, prompt_of(20), "after", seed=3, max_tokens=16)

    after = run(work, model)
    assert set(after.versions) == {1}
    assert mean_gap(model, prompt_of(20), after) < 2e-3


def test_lent_memory_keeps_its_addresses_and_other_tensors_may_use_the_memory_meanwhile():
    memory = LentMemory(2**30, torch.device("cuda"))
    address = memory.tensor.data_ptr()
    memory.take()
    memory.tensor.fill_(7)
    free = torch.cuda.mem_get_info()[0]
    memory.lend()
    assert torch.cuda.mem_get_info()[0] - free >= 2**30
    other = torch.full((2**20,), 3.0, device="cuda")
    memory.take()
    assert memory.tensor.data_ptr() == address
    assert not memory.tensor.any()
    assert (other == 3.0).all()
    view = memory.tensor[256 : 256 + 4096].view(torch.bfloat16)
    del memory
    assert not view.any()  # the tensor keeps its memory
    del view


def test_after_the_cache_was_lent_replies_are_those_of_a_new_engine():
    model = make_model().to("cuda")
    prompts = [prompt_of(61, seed) for seed in range(8)]

    async def replies(engine):
        return await asyncio.gather(*(ask(engine, each, f"{n}", seed=n, max_tokens=24) for n, each in enumerate(prompts)))

    async def work(engine):
        first = await replies(engine)
        engine.rest()
        used = [torch.randn(2**24, device="cuda") for _ in range(8)]  # what a learner would do with it
        del used
        return first, await replies(engine), engine.stats()

    (first, second, stats), plain = run(work, model, lend_cache=True), run(replies, model, lend_cache=False)
    for one, two, three in zip(first, second, plain, strict=True):
        assert one.token_ids == two.token_ids == three.token_ids
    assert stats["stale_hits"] == 0
