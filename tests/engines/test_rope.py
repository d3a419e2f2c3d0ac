"""RoPE whose frequencies depend on the length is fixed once: no chain depends on its neighbours, nor on its own length."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
import transformers

from agentfly.engines.local import LocalEngine
from agentfly.engines.local.family.rope import fix_rope
from agentfly.errors import ConfigError
from agentfly.learn.batching import Rows
from agentfly.learn.model.logprobs import Scorer
from agentfly.types import Request, Sample, Sampling
from tests.engines.tiny import SHAPE, byte_tokenizer, prompt_of

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 32,
    "factor": 8.0,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [2.0 + 0.5 * i for i in range(6)],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def model_with(rope: dict[str, Any], made_for: int) -> Any:
    torch.manual_seed(1)
    shape = {name: value for name, value in SHAPE.items() if name != "head_dim"} | {"max_position_embeddings": made_for}
    config = transformers.LlamaConfig(**shape, rope_parameters=rope)
    return transformers.LlamaForCausalLM(config).eval()


CASES = {"longrope": (LONGROPE, 256), "dynamic": (DYNAMIC, 32)}


@torch.no_grad()
def truth(model: Any, ids: list[int]) -> torch.Tensor:
    scores = torch.log_softmax(model(torch.tensor([list(ids)])).logits[0], -1)[:-1]
    return scores.gather(1, torch.tensor(ids)[1:, None])[:, 0]


@pytest.mark.parametrize("cache", ["slots", "pages"])
@pytest.mark.parametrize("kind", CASES)
def test_a_chain_beside_a_longer_one_has_the_log_probs_of_the_chain_alone(kind: str, cache: Any) -> None:
    model = model_with(*CASES[kind])

    async def sample() -> list[Any]:
        engine = LocalEngine(model, byte_tokenizer(), max_context=200, cache=cache, stop_ids=[])
        asked = [(prompt_of(length), count) for length, count in ((10, 12), (90, 20), (25, 20))]
        try:
            return [
                (prompt, found)
                for (prompt, _), found in zip(
                    asked,
                    await asyncio.gather(*(engine.generate(Request(p, Sampling(max_tokens=n, seed=1), "")) for p, n in asked)),
                    strict=True,
                )
            ]
        finally:
            await engine.close()

    for prompt, found in asyncio.run(sample()):
        want = truth(model, prompt + found.token_ids)[len(prompt) - 1 :]
        assert (want - torch.tensor(found.logprobs)).abs().max() < 1e-3


@pytest.mark.parametrize("kind", CASES)
def test_a_row_of_the_learner_does_not_depend_on_the_length_of_its_neighbours(kind: str) -> None:
    model = model_with(*CASES[kind])
    fix_rope(model, 200)
    samples = []
    for length in (12, 90):
        ids, zeros = list(map(int, prompt_of(length))), [0.0] * length
        mask = [0] + [1] * (length - 1)
        samples.append(
            Sample(ids, mask, zeros, [0 if m else -1 for m in mask], zeros, zeros, group="g", trajectory=str(length))
        )
    scorer, rows = Scorer(model), Rows(samples)
    with torch.no_grad():
        together = scorer(rows.tensors([0, 1], torch.device("cpu")))
    alone = torch.cat([truth(model, sample.token_ids) for sample in samples])
    got = torch.zeros(rows.num_tokens)
    got[rows.tensors([0, 1], torch.device("cpu")).tokens] = together.logprobs
    assert (got - alone).abs().max() < 1e-3


def test_the_longest_sequence_of_the_run_chooses_the_factors() -> None:
    short, long = model_with(*CASES["longrope"]), model_with(*CASES["longrope"])
    fix_rope(short, 32)
    fix_rope(long, 33)
    ratio = short.model.rotary_emb.inv_freq / long.model.rotary_emb.inv_freq
    want = torch.tensor(LONGROPE["long_factor"]) / torch.tensor(LONGROPE["short_factor"])
    assert torch.allclose(ratio, want)


def test_a_model_that_was_fixed_for_another_length_is_refused() -> None:
    model = model_with(*CASES["longrope"])
    fix_rope(model, 32)
    fix_rope(model, 20)  # the same factors
    with pytest.raises(ConfigError, match="fixed for another length"):
        LocalEngine(model, byte_tokenizer(), max_context=100)


def test_a_class_that_scales_by_the_length_of_the_call_is_refused() -> None:
    shape = {name: value for name, value in SHAPE.items() if name != "head_dim"}
    scaled = LONGROPE | {"short_mscale": 1.0, "long_mscale": 1.5}
    model = transformers.PhimoeForCausalLM(transformers.PhimoeConfig(**shape, rope_parameters=scaled, num_local_experts=2))
    with pytest.raises(ConfigError, match="by the length of its neighbours"):
        fix_rope(model, 100)
