"""What a model's config tells before its weights are read: whether it can be loaded, sampled and trained, else why not.

A family that is not PROVEN is tried on its miniature (see `miniature`): the engine's check of a replica, and whether later
tokens change earlier log-probs, as in attention that selects among all tokens of a call.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from ....errors import ConfigError
from ..replica import check_paged_replica, check_replica, make_replica
from .miniature import make_miniature, one_thread

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

PROVEN = frozenset(
    {"llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3", "gemma3_text", "phi", "phi3", "smollm3", "granite"}
    | {"olmo", "olmo2", "cohere", "starcoder2", "gpt2"}
)
"""Families whose attention depends on nothing but keys and values: the check of the model itself is enough."""
NOT_CAUSAL = "cannot be trained: in transformers later tokens change the log-probs of earlier ones"
ELSEWHERE = 'agent.engine.kind = "vllm" (docs/models.md) may sample from it'


def check_config(name: object, config: PretrainedConfig, *, sampled: bool, max_context: int | None = None) -> None:
    """Raise a ConfigError in one sentence if the model cannot be used. `sampled`: the local engine samples from it."""
    text = config.get_text_config()
    why = why_not_loaded(config) or why_too_long(text, max_context) or why_not_trained(text, max_context)
    if why is None and text.model_type not in PROVEN:
        causes = try_family(json.dumps(text.to_dict(), default=str), text, max_context)
        why = causes["trained"] or (causes["sampled"] if sampled else None)
    if why is not None:
        raise ConfigError(f"the model {str(name)!r} ({config.model_type}) {why}")


def why_not_loaded(config: PretrainedConfig) -> str | None:
    """Why transformers does not load a causal model of this config with weights that can be trained, or None."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    for key in ("quantization_config", "compression_config", "quantization"):  # the last ones: older checkpoints, MLX
        if (quantised := getattr(config, key, None)) is not None:
            kind = quantised.get("quant_method") if isinstance(quantised, dict) else getattr(quantised, "quant_method", None)
            how = f" ({getattr(kind, 'value', kind)})" if kind else ""
            return f"is quantised{how}, and such weights cannot be trained: take one in bfloat16"
    for made in getattr(config, "architectures", None) or ():
        if made.endswith(("Classification", "RewardModel", "QuestionAnswering")):
            return f"was saved as {made}, which has no output head for tokens: take a causal language model"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        parts = ", ".join(sorted(part for part in getattr(config, "sub_configs", ()) if part != "text_config"))
        return f"is no causal language model of transformers{f' but has {parts}' if parts else ''}: take a text model"
    return None


def check_tokenizer(name: object, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> None:
    """Raise a ConfigError if the tokenizer has ids that the embeddings have no rows for."""
    num_ids, rows = max(tokenizer.get_vocab().values()) + 1, int(config.get_text_config().vocab_size)
    if num_ids > rows:
        raise ConfigError(
            f"the tokenizer of the model {str(name)!r} has {num_ids:,} ids, but its embeddings have {rows:,} rows: save both "
            "together after model.resize_token_embeddings"
        )


def why_too_long(text: object, max_context: int | None) -> str | None:
    """Why the model has no positions for sequences so long, or None. A factor of RoPE reaches that much further."""
    made_for = getattr(text, "max_position_embeddings", None)
    if max_context is None or made_for is None:
        return None
    rope: Any = getattr(text, "rope_parameters", None) or {}
    ropes = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    scaled = [
        int(float(part["factor"]) * (part.get("original_max_position_embeddings") or made_for))
        for part in ropes
        if part.get("rope_type") in ("yarn", "linear", "dynamic") and part.get("factor")
    ]
    limit = max(made_for, *scaled) if scaled else made_for
    return None if max_context <= limit else f"was made for {limit:,} tokens, fewer than max_context = {max_context:,}"


def why_not_trained(text: Any, max_context: int | None) -> str | None:
    """Why rows of this length have other log-probs together than alone, as far as the config tells, or None."""
    selects = getattr(text, "index_topk", None)
    if selects and selects < (max_context or text.max_position_embeddings):
        return f"{NOT_CAUSAL} beyond {selects:,} tokens, which its attention selects: set engine.max_context = {selects}"
    return None


_tried: dict[tuple[str, int | None], dict[str, str | None]] = {}


@one_thread()
def try_family(key: str, text: object, max_context: int | None) -> dict[str, str | None]:
    """Why the miniature of a config cannot be "trained" and "sampled"; None each if it can, or if there is no miniature."""
    if (key, max_context) not in _tried:
        try:
            model = make_miniature(text, max_context)
        except ConfigError:  # the checks of the model itself are left
            _tried[key, max_context] = {"trained": None, "sampled": None}
        else:
            _tried[key, max_context] = {"trained": why_not_causal(model), "sampled": why_not_sampled(model)}
    return _tried[key, max_context]


@torch.no_grad()
def why_not_causal(model: torch.nn.Module) -> str | None:
    """Why right-padded rows have other log-probs than rows alone, or None."""
    ids = torch.tensor([[(7 * i + 3) % 160 for i in range(96)]])
    texts = [ids[:, :length] for length in (12, 24, 48, 96)]
    log_probs = [torch.log_softmax(model(input_ids=part, use_cache=False).logits[0, :12].float(), -1) for part in texts]
    gap = max(float((each - log_probs[0]).abs().max()) for each in log_probs)
    return None if gap <= 1e-2 else f"{NOT_CAUSAL} (by {gap:.2g} nats in a miniature)"


def why_not_sampled(model: torch.nn.Module) -> str | None:
    """Why the local engine cannot serve the model, or None."""
    device = next(model.parameters()).device
    try:
        replica = make_replica(model)
        cache = check_replica(model, replica, device)
        check_paged_replica(model, make_replica(model, on_pages=True), cache, device)
    except ConfigError as error:
        return f"cannot be sampled here: {error}; {ELSEWHERE}"
    return None


def what_works(family: str, keys: dict[str, Any]) -> tuple[str | None, str | None]:
    """Why a family of transformers with its default config cannot be sampled here, and why not trained; None each if it can."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **keys)
    text = config.get_text_config()
    if why := why_not_loaded(config) or why_not_trained(text, None):
        return why, why
    causes = try_family(json.dumps(text.to_dict(), default=str), text, None)
    return causes["sampled"] and causes["sampled"].removesuffix(f"; {ELSEWHERE}"), causes["trained"]
