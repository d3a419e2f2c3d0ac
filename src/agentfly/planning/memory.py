"""What one device holds, in GiB: the learner's share, the sampler's copy and cache, activations."""

from __future__ import annotations

from dataclasses import dataclass

from ..learn.settings import OptimSettings
from .shapes import ModelShape
from .throughput import Fit, fitted

GIB = 2**30
LOGITS_GIB = 0.25
"""The logits of one chunk: train.logprob_chunk."""
RUNTIME_GIB = 1.5
"""CUDA's context, kernels and fragments of one process: assumed."""
EXCHANGE_GIB = 1.0
"""Buffers of NCCL where several ranks learn: assumed."""
LEARNER = ("weights", "masters", "moments", "gradients", "activations", "critic", "reference")
SAMPLER = ("sampler", "cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """GiB of one device, per use. `asleep`: the sampler holds nothing while the learner works; `offload`: nor the other way."""

    weights: float = 0.0
    masters: float = 0.0
    moments: float = 0.0
    gradients: float = 0.0
    activations: float = 0.0
    critic: float = 0.0
    reference: float = 0.0
    sampler: float = 0.0
    cache: float = 0.0
    runtime: float = RUNTIME_GIB
    asleep: bool = False
    offload: bool = False

    @property
    def total(self) -> float:
        """The largest that the device holds at once."""
        learner, sampler = (sum(float(getattr(self, name)) for name in names) for names in (LEARNER, SAMPLER))
        if not self.asleep:
            return learner + sampler + self.runtime
        return max(learner, sampler + self.beside_sampler) + self.runtime

    @property
    def beside_sampler(self) -> float:
        """What the learner keeps on the device while chains are sampled."""
        if self.asleep:
            return 0.0 if self.offload else self.weights + self.masters + self.moments + self.reference + self.critic
        return sum(float(getattr(self, name)) for name in LEARNER)


def memory_of(
    shape: ModelShape,
    *,
    ranks: int = 1,
    lora_rank: int = 0,
    batch_tokens: int = 8192,
    again: bool = False,
    critic: bool = False,
    reference: bool | ModelShape = False,
    cache_tokens: float = 0.0,
    sampler_gpus: int = 1,
    shares: bool | None = None,
    fit: Fit | None = None,
    optim: OptimSettings = OptimSettings(),  # noqa: B008  a frozen value
) -> DeviceMemory:
    """Returns the memory of a device that learns (one of `ranks`) and samples (one of `sampler_gpus` of a sampler).

    One rank keeps bfloat16 weights and float32 masters; several keep float32 shards, which are cast layer by layer. `shares`:
    the sampler uses the learner's weights, which one rank can (None: if there is one). With adapters the frozen weights are
    the reference, unless it is a model of another shape.
    """
    fit = fit or fitted()
    shares = ranks == 1 if shares is None else shares
    trained = shape.adapters(lora_rank) if lora_rank else shape.weights
    frozen = shape.weights if lora_rank else 0
    gathered = 0.0 if ranks == 1 else 2.0 * (shape.tables + 2 * shape.layer)  # the root and two layers, in bfloat16
    unreduced = 0.0 if ranks == 1 or lora_rank else 4.0 * shape.tables  # the root's whole gradients, before they are reduced
    whole = 2.0 * shape.weights if ranks == 1 else 2.0 * frozen / ranks + gathered
    kept_values = 2 * shape.layers * shape.hidden if again else 0
    layers = 1 if again else shape.layers
    active = batch_tokens * (kept_values + layers * fit.activation_bytes(shape)) / GIB + LOGITS_GIB
    matrices = trained if lora_rank else trained - shape.tables
    moments = (optim.moment_bytes(True) * matrices + optim.moment_bytes(False) * (trained - matrices)) / ranks
    states = 4.0 * trained / ranks + moments
    copied = shape if reference and not lora_rank else None
    of_reference = reference if isinstance(reference, ModelShape) else copied
    processes = 1 if shares else 2
    return DeviceMemory(
        weights=whole / GIB,
        masters=4.0 * trained / ranks / GIB,
        moments=moments / GIB,
        gradients=(4.0 * trained / ranks + unreduced) / GIB,
        activations=active,
        critic=(2.0 * shape.weights / ranks + 4.0 * shape.weights / ranks + states) / GIB if critic else 0.0,
        reference=0.0 if of_reference is None else 2.0 * of_reference.weights / ranks / GIB,
        sampler=0.0 if shares else 2.0 * shape.weights / sampler_gpus / GIB,
        cache=cache_tokens * shape.kv_bytes / sampler_gpus / GIB,
        runtime=processes * RUNTIME_GIB + (EXCHANGE_GIB if ranks > 1 else 0.0),
    )


def sampler_memory(shape: ModelShape, cache_tokens: float, sampler_gpus: int = 1) -> DeviceMemory:
    """Returns the memory of a device that samples alone."""
    return DeviceMemory(
        sampler=2.0 * shape.weights / sampler_gpus / GIB, cache=cache_tokens * shape.kv_bytes / sampler_gpus / GIB
    )
