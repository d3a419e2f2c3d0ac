"""Sizes of published models: weights, adapters, and the memory of a token's keys and values."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with grouped attention and a gated MLP, as Llama and Qwen have.

    The weights of a model of another kind are `counted`; `active` of them take part in a token, `adapted` are the weights of
    adapters of rank 1, and `cached` of its layers keep keys and values.
    """

    name: str
    of: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    counted: int | None = None
    active: int = 0
    adapted: int = 0
    cached: int | None = None

    @property
    def linears(self) -> list[tuple[int, int]]:
        """The inputs and outputs of one layer's matrices."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return [
            (self.hidden, queries), (self.hidden, keys), (self.hidden, keys), (queries, self.hidden),
            (self.hidden, self.intermediate), (self.hidden, self.intermediate), (self.intermediate, self.hidden),
        ]  # fmt: skip

    @property
    def layer(self) -> int:
        """Weights of one layer."""
        if self.counted is not None:
            return max(0, self.counted - self.tables) // self.layers
        return sum(inputs * outputs for inputs, outputs in self.linears) + 2 * self.hidden

    @property
    def tables(self) -> int:
        """Weights of the embedding and the output head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def weights(self) -> int:
        if self.counted is not None:
            return self.counted
        return self.layers * self.layer + self.tables + self.hidden

    @property
    def computed(self) -> int:
        """Weights that a token is multiplied with: the embedding is looked up, the head is not."""
        if self.counted is not None:
            return self.active - (0 if self.tied else self.vocabulary * self.hidden)
        return self.layers * self.layer + self.vocabulary * self.hidden

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one token, in two bytes each."""
        return 2 * (self.layers if self.cached is None else self.cached) * self.kv_heads * self.head_dim * 2

    def adapters(self, rank: int) -> int:
        """Weights of LoRA adapters of this rank on every matrix of the layers."""
        if self.counted is not None:
            return rank * self.adapted
        return self.layers * sum(rank * (inputs + outputs) for inputs, outputs in self.linears)


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("135M", "SmolLM2-135M", 576, 1536, 30, 9, 3, 64, 49152, tied=True),
        ModelShape("0.5B", "Qwen2.5-0.5B", 896, 4864, 24, 14, 2, 64, 151936, tied=True),
        ModelShape("1.5B", "Qwen2.5-1.5B", 1536, 8960, 28, 12, 2, 128, 151936, tied=True),
        ModelShape("3B", "Qwen2.5-3B", 2048, 11008, 36, 16, 2, 128, 151936, tied=True),
        ModelShape("7B", "Qwen2.5-7B", 3584, 18944, 28, 28, 4, 128, 152064),
        ModelShape("8B", "Llama-3.1-8B", 4096, 14336, 32, 32, 8, 128, 128256),
        ModelShape("14B", "Qwen2.5-14B", 5120, 13824, 48, 40, 8, 128, 152064),
        ModelShape("32B", "Qwen2.5-32B", 5120, 27648, 64, 40, 8, 128, 152064),
        ModelShape("70B", "Llama-3.1-70B", 8192, 28672, 80, 64, 8, 128, 128256),
    )
}


def find_shape(name: str) -> ModelShape:
    """Returns the shape of a size such as "7B". Raises ConfigError."""
    shape = next((shape for key, shape in SHAPES.items() if key.lower() == name.lower()), None)
    if shape is None:
        near = difflib.get_close_matches(name, list(SHAPES), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"no model size is called {name!r}; {hint}known: {', '.join(SHAPES)}; for another, set agent.model")
    return shape


def shape_of(config: Any, name: str) -> ModelShape:
    """Returns the shape of a model's transformers config. The weights are counted in the model itself, without memory."""
    from ..engines.local.load import count_weights  # late: torch

    text = config.get_text_config()
    hidden = int(text.hidden_size)
    heads = _number(text, "num_attention_heads") or 1
    kinds = getattr(text, "layer_types", None)
    attends = hasattr(text, "num_attention_heads")
    chosen = _number(text, "num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k") or 1
    weights, active, adapted = count_weights(config, chosen)
    return ModelShape(
        name=name,
        of=name,
        hidden=hidden,
        intermediate=(_number(text, "moe_intermediate_size") or 0) * chosen or _number(text, "intermediate_size") or 4 * hidden,
        layers=int(text.num_hidden_layers),
        heads=heads,
        kv_heads=_number(text, "num_key_value_heads") or heads,
        head_dim=_number(text, "head_dim") or hidden // heads,
        vocabulary=int(text.vocab_size),
        tied=bool(getattr(text, "tie_word_embeddings", False)),
        counted=weights,
        active=active,
        adapted=adapted,
        cached=sum("attention" in kind and kind != "linear_attention" for kind in kinds) if kinds else None if attends else 0,
    )


def _number(config: Any, *names: str) -> int | None:
    """The first of these numbers that a config has; the largest if it differs from layer to layer."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except RuntimeError:  # transformers refuses a value that differs from layer to layer
            value = max(getattr(config.per_layer_config[at], name) for at in range(config.num_hidden_layers))
        if isinstance(value, list | tuple):
            value = max(value)
        if value:
            return int(value)
    return None
