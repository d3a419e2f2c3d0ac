"""What a config tells before any weight is read: refusals are one sentence, and a miniature finds what no key says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from agentfly.engines.local.family.miniature import REACH, make_miniature
from agentfly.engines.local.family.support import check_config
from agentfly.engines.local.load import load_model
from agentfly.errors import ConfigError
from agentfly.pocket import model_dir

torch.set_num_threads(1)


def config_of(kind: str, **own: Any) -> Any:
    return transformers.AutoConfig.for_model(kind, **own)


@pytest.mark.parametrize(
    ("kind", "own", "why"),
    [
        ("gpt_oss", {}, "has attention sinks"),
        ("qwen3_next", {}, "also has linear_attention"),
        ("phimoe", {"sliding_window": 2047}, "its log-probs differ from the model's own by"),  # the window is in the mask alone
        ("stablelm", {}, "does not pass its keyword arguments on to attention"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "is quantised .fp8., and such weights cannot be trained"),
        ("qwen3_vl", {}, "is no causal language model of transformers but has vision_config"),
        ("glm_moe_dsa", {}, "later tokens change the log-probs of earlier ones beyond 2,048 tokens"),
    ],
)
def test_a_model_that_the_local_engine_cannot_serve_is_refused_by_its_config(kind: str, own: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        check_config("some/model", config_of(kind, **own), sampled=True)
    assert len(str(refused.value)) < 330


def test_sparse_attention_that_no_sequence_reaches_can_be_trained() -> None:
    check_config("some/model", config_of("glm_moe_dsa"), sampled=False, max_context=2048)
    with pytest.raises(ConfigError, match="set engine.max_context = 2048"):
        check_config("some/model", config_of("glm_moe_dsa"), sampled=False, max_context=2049)


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "minimax_m2", "cohere2", "ministral3"])
def test_experts_latent_attention_and_windows_are_served(kind: str) -> None:
    check_config("some/model", config_of(kind), sampled=True)


@pytest.mark.parametrize(
    ("rope", "limit"), [({"rope_type": "default"}, 1024), ({"rope_type": "yarn", "factor": 4.0}, 4096)], ids=["plain", "yarn"]
)
def test_a_context_beyond_the_positions_of_the_model_is_refused(rope: Any, limit: int) -> None:
    config = config_of("llama", max_position_embeddings=1024, rope_parameters={"rope_theta": 10000.0, **rope})
    check_config("some/model", config, sampled=True, max_context=limit)
    with pytest.raises(ConfigError, match=f"was made for {limit:,} tokens, fewer than max_context = {limit + 1:,}"):
        check_config("some/model", config, sampled=True, max_context=limit + 1)


def test_a_miniature_is_small_and_its_window_is_shorter_than_the_check() -> None:
    model = make_miniature(config_of("mistral"))
    assert sum(weight.numel() for weight in model.parameters()) < 1e6
    assert model.config.sliding_window == REACH
    assert make_miniature(config_of("mistral"), max_context=1000).config.sliding_window == 4096


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder without weights: a refusal that comes before they are read."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path(model_dir()) / name).read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"vocab_size": 100}, "the tokenizer of the model .* has 1,280 ids, but its embeddings have 100 rows"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "is quantised"),
        ({"model_type": "bloom"}, "the attention of BloomForCausalLM cannot be replaced"),
    ],
)
def test_a_refusal_comes_before_the_weights_are_read(folder: Path, change: dict[str, Any], why: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=why):
        load_model(folder, sampled=True)
