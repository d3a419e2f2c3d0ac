"""Miniatures: a model of the same family and structure as a config describes, with few small layers and random weights.

What a family can do is tried on its miniature before weights are read or downloaded. Windows and limits of sparse attention are
a few tokens long there, so that a short text reaches beyond them. The weights are loud: a wrong row shows in the first digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ....errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MAX_WEIGHTS = 200_000_000
MAX_LAYERS = 6
REACH = 4
"""Tokens that a window or a selection of a miniature holds."""

_SIZES = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 32, "head_dim": 16,
    "shared_expert_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "ffn_hidden_size": 48, "n_inner": 48,
    "n_embd": 64, "d_model": 64, "word_embed_proj_dim": 64, "ffn_dim": 48, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "index_head_dim": 32, "index_n_heads": 2,
    "vocab_size_per_layer_input": 160, "hidden_size_per_layer_input": 16, "global_head_dim": 16, "query_pre_attn_scalar": 16,
    "chunk_size": 16, "mamba_chunk_size": 16, "rotary_dim": 8, "n_positions": 512, "max_position_embeddings": 512, "n_ctx": 512,
}  # fmt: skip
_REACHES = ("sliding_window", "attention_chunk_size", "index_topk", "window_size", "sliding_window_size")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k", "num_selected_experts", "moe_top_k")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KEYS = ("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads", "multi_query_group_num")


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread. Those of torch wait for each other at every small product, for minutes beside other programs."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


def make_miniature(config: Any, max_context: int | None = None) -> Any:
    """The miniature of a model's text part in evaluation mode.

    Windows and limits that `max_context` does not reach stay as they are. Raises ConfigError if no small config of the family
    makes a model that runs.
    """
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    text = config.get_text_config()
    why = ""
    for shrinks in (True, False):
        try:
            small = type(text).from_dict(_smaller(text, shrinks, max_context))
            with torch.device("meta"):
                if sum(weight.numel() for weight in auto.from_config(small).parameters()) > MAX_WEIGHTS:
                    continue
            with torch.random.fork_rng(), torch.no_grad():
                torch.manual_seed(0)
                model = auto.from_config(small, attn_implementation=_attention(small)).eval()
                _speak_up(model)
                if bool(model(input_ids=torch.tensor([[3, 5, 8, 13]]), use_cache=False).logits.isfinite().all()):
                    return model
        except Exception as error:  # noqa: BLE001  a config of any family may refuse a number in any way
            why = why or f": {type(error).__name__}: {' '.join(str(error).split())[:120]}"
    raise ConfigError(f"no small config of the family {text.model_type} makes a model that runs{why}")


def _attention(config: PretrainedConfig) -> str | None:
    return "eager" if getattr(config, "attn_logit_softcapping", None) else None


def _speak_up(model: torch.nn.Module) -> None:
    """Draw matrices so wide that attention is not flat and logits are not small, and move what begins at zero or one."""
    for weight in model.parameters():
        if weight.ndim > 1 and weight.is_floating_point():
            weight.normal_(std=1.5 / math.sqrt(weight.shape[-1]))
        elif weight.is_floating_point():
            weight.add_(torch.randn_like(weight), alpha=0.2)


def _smaller(text: Any, shrinks: bool, max_context: int | None) -> dict[str, Any]:
    """The config as a dict with few layers and short reaches; with `shrinks` also with small layers."""
    values: dict[str, Any] = text.to_dict()
    count = int(values.get("num_hidden_layers") or values.get("n_layer") or values.get("num_layers") or 2)
    lists = {name: value for name, value in values.items() if isinstance(value, list) and len(value) == count > 1}
    kinds: dict[str, int] = {}
    for at, kind in enumerate(zip(*lists.values(), strict=True)):
        kinds.setdefault(repr(kind), at)
    layers_at = sorted({0, 1, *kinds.values()} if lists else range(min(count, MAX_LAYERS)))
    layers_at = layers_at[:MAX_LAYERS]
    values |= {name: [value[at] for at in layers_at] for name, value in lists.items()}
    values |= {name: len(layers_at) for name in ("num_hidden_layers", "n_layer", "num_layers") if name in values}
    limit = max_context or int(values.get("max_position_embeddings") or 1 << 30)
    values |= {name: REACH for name in _REACHES if isinstance(values.get(name), int) and REACH < values[name] < limit}
    for name in ("first_k_dense_replace", "num_dense_layers", "num_nextn_predict_layers", "max_window_layers"):
        if values.get(name):
            values[name] = 1
    if values.get("num_kv_shared_layers"):
        values["num_kv_shared_layers"] = 1
    values |= {name: 8 for name in _EXPERTS if isinstance(values.get(name), int) and values[name] > 8}
    values |= {name: 2 for name in _CHOSEN if isinstance(values.get(name), int) and values[name] > 2}
    values |= {name: 1 for name in ("n_group", "topk_group") if values.get(name)}
    values |= {name: 1 for name in values if name.endswith("_token_id")}
    values |= {"pad_token_id": 0, "vocab_size": 160}
    values.pop("quantization_config", None)
    if isinstance(layers := values.get("per_layer_config"), dict):
        values["per_layer_config"] = {str(to): layers[str(at)] for to, at in enumerate(layers_at) if str(at) in layers}
    if not shrinks:
        return values
    values |= {name: size for name, size in _SIZES.items() if isinstance(values.get(name), int) and values[name] > size}
    if "mamba_n_heads" in values:
        values |= {"mamba_n_heads": 8, "mamba_d_head": 16} | ({"mamba_d_ssm": 128} if values.get("mamba_d_ssm") else {})
    heads = next((values[name] for name in _HEADS if values.get(name)), 4)
    for name in (*_HEADS, *_KEYS):
        if isinstance(value := values.get(name), int) and not isinstance(value, bool):
            values[name] = 4 if name in _HEADS else max(1, 4 * value // heads)
    if {"expand", "num_heads", "head_dim"} <= set(values):  # Mamba 2
        values["num_heads"] = int(values["expand"] * values["hidden_size"]) // values["head_dim"]
    rope = values.get("rope_parameters") or {}
    dim = values.get("head_dim") or 16
    for part in [rope, *(each for each in rope.values() if isinstance(each, dict))]:
        half = int(dim * part.get("partial_rotary_factor", values.get("partial_rotary_factor") or 1.0)) // 2
        part |= {name: part[name][:half] for name in ("short_factor", "long_factor") if name in part}
        if "original_max_position_embeddings" in part:
            part["original_max_position_embeddings"] = 16
    return values
