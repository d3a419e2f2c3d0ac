"""What a config tells before any weight is read: refusals are one sentence, and a miniature finds what no key says."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from agentfly.engines import open_engine
from agentfly.engines.local.families.files import has_weights
from agentfly.engines.local.families.miniature import REACH, make_miniature
from agentfly.engines.local.families.support import check_config
from agentfly.engines.local.load import load_model
from agentfly.errors import ConfigError
from agentfly.health.models import diagnose_model, is_model
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
        ("doge", {}, "its log-probs differ from the model's own by"),  # its mask depends on vectors that begin at zero
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


def write_header(file: Path, dtype: str, size: int = 8) -> None:
    header = json.dumps({"layer.weight": {"dtype": dtype, "shape": [2], "data_offsets": [0, 8]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder whose weights are only a header: a refusal that comes before they are read."""
    write_header(tmp_path / "model.safetensors", "F32")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path(model_dir()) / name).read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"vocab_size": 100}, "the tokenizer of the model .* has 1,280 ids, but its embeddings have 100 rows"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "is quantised .bitsandbytes., and"),
        ({"quantization_config": {"load_in_8bit": True}}, "is quantised, and"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "is quantised, and"),  # as MLX writes it
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "is quantised .compressed-tensors."),
        ({"architectures": ["LlamaForSequenceClassification"]}, "which has no output head for tokens"),
        (
            {"model_type": "new", "auto_map": {"AutoConfig": "configuration_new.NewConfig"}},
            "code of its own, which is never run",
        ),
        ({"model_type": "bloom"}, "the attention of BloomForCausalLM cannot be replaced"),
    ],
)
def test_a_refusal_comes_before_the_weights_are_read(folder: Path, change: dict[str, Any], why: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=why):
        load_model(folder, sampled=True)


INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
ADAPTER = json.dumps({"base_model_name_or_path": "some/base"})


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"model.safetensors": None}, "it has no model.safetensors: the download is not complete"),
        ({"model.safetensors": "cut"}, "model.safetensors of .* is cut off"),
        ({"model.safetensors": ""}, "is cut off or no safetensors file"),
        ({"model.safetensors": "version https://git-lfs.github.com/spec/v1"}, "is a pointer of Git LFS: run git lfs pull"),
        ({"tokenizer.json": "version https://git-lfs.github.com/spec/v1"}, "tokenizer.json .* is a pointer of Git LFS"),
        ({"tokenizer.json": "{"}, "its tokenizer cannot be read"),
        ({"model.safetensors": None, "model.safetensors.index.json": INDEX}, "2 of 2 files missing, model-1.safetensors among"),
        ({"model.safetensors": None, "model.safetensors.index.json": "{"}, "index.json of .* is no valid JSON"),
        ({"model.safetensors": None, "pytorch_model.bin.index.json": INDEX}, "2 of 2 files missing"),
        ({"model.safetensors": "I8"}, "is quantised .its weights are I8."),
        ({"model.safetensors": None, "model.gguf": "GGUF"}, "it holds weights in GGUF format"),
        ({"model.safetensors": None, "consolidated.safetensors": ""}, "it holds weights in Mistral's own format"),
        ({"model.safetensors": None, "adapter_config.json": ADAPTER}, "it holds adapters of some/base alone"),
        ({"adapter_config.json": ADAPTER}, "has adapters .adapter_config.json. beside its weights"),
        ({"config.json": None, "adapter_config.json": ADAPTER}, "not a model directory: it holds adapters of some/base"),
        ({"config.json": None, "model.gguf": "GGUF"}, "is not a model directory: it holds weights in GGUF format"),
        ({"config.json": "[]"}, "config.json of .* holds no JSON object"),
        ({"generation_config.json": "{"}, "generation_config.json of .* is no valid JSON"),
    ],
)
def test_what_the_files_of_a_folder_tell_is_told_before_the_weights_are_read(
    folder: Path, files: dict[str, str | None], why: str
) -> None:
    for name, text in files.items():
        if text is None:
            (folder / name).unlink()
        elif text in ("cut", "I8"):
            write_header(folder / name, "F32" if text == "cut" else text, size=5 if text == "cut" else 8)
        else:
            (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=why) as refused:
        load_model(folder)
    assert "\n" not in str(refused.value)
    if has_weights(folder):
        assert is_model(str(folder))
        try:
            told = diagnose_model(str(folder))[0].told
        except ConfigError as error:
            told = str(error)
        assert re.search(why, told)


def test_the_model_of_a_chat_server_can_be_sampled_from_and_not_trained() -> None:
    name = "openai:mine@http://127.0.0.1:1/v1"
    assert is_model(name)
    assert [(each.name, each.ok) for each in diagnose_model(name)] == [("sampled", True), ("trained", False)]


def test_the_folder_of_a_run_in_the_place_of_a_model_is_answered_with_its_newest_checkpoint(tmp_path: Path) -> None:
    for step in ("step-000004", "step-000008"):
        (tmp_path / "checkpoints" / step).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"is not a model directory: it is the folder of a run: .*step-000008$"):
        load_model(tmp_path)


def test_a_tokenizer_without_a_chat_template_is_refused_before_the_weights_are_read(folder: Path) -> None:
    with pytest.raises(ConfigError, match="has no chat template"):
        open_engine(folder)


def test_weights_of_another_shape_are_named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "model.safetensors").write_bytes((Path(model_dir()) / "model.safetensors").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 1344}))
    with pytest.raises(ConfigError, match=r"embed_tokens.weight has the shape \(1280, \d+\) instead of \(1344, \d+\)"):
        load_model(folder)
