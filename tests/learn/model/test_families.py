"""A dozen families on miniatures: engine, learner, adapters and saved models compute what the model's own forward computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from agentfly.engines.local.families import support as families_support
from agentfly.engines.local.families.miniature import make_miniature
from agentfly.engines.local.families.support import PROVEN
from agentfly.errors import ConfigError
from agentfly.kernels.rope import fix_rope
from agentfly.learn.batching import Rows
from agentfly.learn.model import examine as examine_module
from agentfly.learn.model.examine import _samples, examine
from agentfly.learn.model.logprobs import Scorer
from agentfly.learn.settings import OptimSettings

torch.set_num_threads(1)

LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, "factor": 4.0}
FACTORS = {"short_factor": [1.0 + 0.1 * i for i in range(48)], "long_factor": [2.0 + 0.5 * i for i in range(48)]}
CONV = ["conv", "conv", "full_attention", "conv"]
PACKED, PADDED = "rows packed, prompts shared", "rows padded"
# family: its config's own keys, how rows are run, and a word of why it is not sampled here
FAMILIES: dict[str, tuple[dict[str, Any], str, str]] = {
    "llama": ({}, PACKED, ""),
    "qwen2": ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1}, PACKED, ""),
    "mistral": ({}, PACKED, ""),
    "gemma2": ({}, PADDED, ""),
    "gemma3_text": ({}, PACKED, ""),
    "phi3": ({"rope_parameters": {**LONG, **FACTORS}, "max_position_embeddings": 512, "sliding_window": 30}, PACKED, ""),
    "qwen3_moe": ({}, PACKED, ""),
    "deepseek_v3": ({}, PACKED, ""),
    "cohere2": ({}, PACKED, ""),
    "phimoe": ({"sliding_window": 2047}, PADDED, "its log-probs differ from the model's own"),
    "gpt_oss": ({}, PADDED, "attention sinks"),
    "lfm2": ({"layer_types": CONV, "num_hidden_layers": 4}, PADDED, "also has conv"),
    "qwen3_next": ({"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}, PADDED, "linear_attention"),
}


def config_of(family: str) -> Any:
    return transformers.AutoConfig.for_model(family, **FAMILIES[family][0])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_sampled_trained_adapted_and_exported_or_says_why_not(family: str) -> None:
    _, rows, why = FAMILIES[family]
    found = {each.name: each for each in examine(config_of(family))}
    assert found["sampled"].ok == (not why), found["sampled"].told
    assert why in found["sampled"].told
    assert found["trained"].told == rows
    assert [each.name for each in found.values() if not each.ok] == (["sampled"] if why else [])


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_in_bfloat16_differ_from_rows_alone_by_rounding_only(family: str) -> None:
    model = make_miniature(config_of(family)).to(torch.bfloat16)
    fix_rope(model, 64)
    scorer, samples = Scorer(model), _samples()
    shape = scorer.prepare(OptimSettings())
    assert (shape == "padded") == (FAMILIES[family][1] == PADDED)
    rows = Rows(samples)
    together, alone = torch.zeros(rows.num_tokens), torch.zeros(rows.num_tokens)
    with torch.no_grad():
        for batch in rows.batches(range(len(rows)), 200, torch.device("cpu"), shape):
            together[batch.tokens] = scorer(batch).logprobs.float()
        for row in range(len(rows)):
            batch = rows.tensors([row], torch.device("cpu"))
            alone[batch.tokens] = scorer(batch).logprobs.float()
    # The median: a token near a tie of two experts may take the other one.
    assert float((together - alone).abs().median()) < 0.05


def test_every_family_that_skips_the_trial_passes_it() -> None:
    """PROVEN families are not tried when a model is opened, so they are tried here, as far as the matrix does not."""
    for family in sorted(PROVEN - set(FAMILIES) - {"gemma3"}):
        found = examine(transformers.AutoConfig.for_model(family))
        lacking = [(family, each.name) for each in found if not each.ok]
        assert lacking == ([("gpt2", "adapted")] if family == "gpt2" else [])  # its matrices are no linear layers


def test_a_family_is_tried_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads wait for each other at every small product: a hybrid takes ten times as long."""
    seen = []

    def counted(*args: Any) -> Any:
        seen.append(torch.get_num_threads())
        return make_miniature(*args)

    for module in (families_support, examine_module):
        monkeypatch.setattr(module, "make_miniature", counted)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        examine(config_of("llama"))
        families_support.try_family("a family that was not tried yet", config_of("llama"), None)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 1]


def test_a_model_that_cannot_be_made_small_says_so() -> None:
    with pytest.raises(ConfigError, match="no small config of the family"):
        examine(transformers.AutoConfig.for_model("longcat_flash"))
