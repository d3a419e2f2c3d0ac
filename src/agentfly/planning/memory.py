"""What one device holds, in GiB: the learner's share, the sampler's copy and cache, activations."""

from __future__ import annotations

from dataclasses import dataclass, fields

from .shapes import ModelShape
from .throughput import Fit, fitted

GIB = 2**30
LOGITS_GIB = 0.25
"""The logits of one chunk: train.logprob_chunk."""
RUNTIME_GIB = 1.5
"""CUDA's context, kernels and fragments: assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """GiB of one device, per use."""

    weights: float
    masters: float
    moments: float
    gradients: float
    activations: float
    critic: float
    reference: float
    sampler: float
    cache: float
    runtime: float = RUNTIME_GIB

    @property
    def total(self) -> float:
        return sum(float(getattr(self, each.name)) for each in fields(self))


def memory_of(
    shape: ModelShape,
    *,
    ranks: int = 1,
    lora_rank: int = 0,
    batch_tokens: int = 8192,
    again: bool = False,
    critic: bool = False,
    reference: bool = False,
    cache_tokens: float = 0.0,
    sampler_gpus: int = 1,
    shares: bool | None = None,
    fit: Fit | None = None,
) -> Memory:
    """Returns the memory of a device that learns (one of `ranks`) and samples (one of `sampler_gpus` of a sampler).

    One rank keeps bfloat16 weights and float32 masters; several keep float32 shards, which are cast layer by layer. `shares`:
    the sampler uses the learner's weights, which one rank can (None: if there is one). With adapters the frozen weights are
    the reference.
    """
    fit = fit or fitted()
    shares = ranks == 1 if shares is None else shares
    trained = shape.adapters(lora_rank) if lora_rank else shape.weights
    frozen = shape.weights if lora_rank else 0
    gathered = 0.0 if ranks == 1 else 2.0 * (shape.tables + 2 * shape.layer)  # the root and two layers, in bfloat16
    whole = 2.0 * shape.weights if ranks == 1 else 2.0 * frozen / ranks + gathered
    kept = 2 * shape.layers * shape.hidden if again else 0
    layers = 1 if again else shape.layers
    active = batch_tokens * (kept + layers * fit.activation_bytes(shape)) / GIB + LOGITS_GIB
    states = 12.0 * trained / ranks
    return Memory(
        weights=whole / GIB,
        masters=4.0 * trained / ranks / GIB,
        moments=8.0 * trained / ranks / GIB,
        gradients=4.0 * trained / ranks / GIB,
        activations=active,
        critic=(2.0 * shape.weights / ranks + 4.0 * shape.weights / ranks + states) / GIB if critic else 0.0,
        reference=2.0 * shape.weights / ranks / GIB if reference and not lora_rank else 0.0,
        sampler=0.0 if shares else 2.0 * shape.weights / sampler_gpus / GIB,
        cache=cache_tokens * shape.kv_bytes / sampler_gpus / GIB,
    )
