"""The same engine on a GPU: the same tokens, and log-probs as near as the precision allows."""

from __future__ import annotations

import asyncio

import pytest
import torch

from .tiny import FAMILIES, ask, make_model, prompt_of, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


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
        ids = torch.tensor([prompt + completion.token_ids], device="cuda")
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        want = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
        assert (want - torch.tensor(completion.logprobs)).abs().mean() < tolerance
