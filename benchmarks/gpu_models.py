"""Models of known shapes with random weights, and what the machine could do with them at best.

In: a shape's name, a device, a type. Out: a model made from a config of transformers (nothing is downloaded); the measured
bandwidth and matrix speed of the device, and from them how fast a decode step could be and how many operations an update takes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Shape:
    """A published model's sizes. `micro_tokens`: of one forward and backward pass in the learner's rows."""

    name: str
    family: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    micro_tokens: int

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype.itemsize


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("135M", "llama", 576, 1536, 30, 9, 3, 64, 49152, 49152),  # SmolLM2-135M
        Shape("0.5B", "qwen2", 896, 4864, 24, 14, 2, 64, 151936, 49152),  # Qwen2.5-0.5B
        Shape("3B", "qwen2", 2048, 11008, 36, 16, 2, 128, 151936, 12288),  # Qwen2.5-3B
        Shape("tiny", "llama", 64, 128, 2, 4, 2, 16, 512, 512),  # for a CPU
    )
}


class NoText:
    """The text of a reply is not measured, so no tokenizer is needed."""

    eos_token_id = None

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return ""


def make_model(shape: Shape, device: torch.device, dtype: torch.dtype) -> Any:
    """The same weights each time, made where they will be."""
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoConfig
    config = auto.for_model(
        shape.family,
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    maker: Any = AutoModelForCausalLM
    with torch.device(device):
        model = maker.from_config(config, dtype=dtype)
    return model.eval()


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clean(device: torch.device) -> None:
    """Give back what is no longer used, and begin to watch the memory anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float | None:
    """The most memory that tensors held since `clean`; not known on a CPU."""
    return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None


def seconds_of(work: Callable[[], Any], device: torch.device, repeats: int = 1) -> float:
    """The quickest of several times."""
    times = []
    for _ in range(repeats):
        sync(device)
        began = time.perf_counter()
        work()
        sync(device)
        times.append(time.perf_counter() - began)
    return min(times)


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured, not from a data sheet: bytes per second of a copy (read and written), operations per second of a product."""

    bytes_per_s: float
    flops_per_s: float


def measure_limits(device: torch.device, dtype: torch.dtype) -> Limits:
    num_bytes, size = (2**30, 8192) if device.type == "cuda" else (2**24, 256)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = source.clone()
    copying = seconds_of(lambda: [target.copy_(source) for _ in range(5)], device, 5) / 5
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    torch.mm(left, right)
    product = seconds_of(lambda: [torch.mm(left, right) for _ in range(10)], device, 5) / 10
    return Limits(2 * num_bytes / copying, 2 * size**3 / product)


def num_body(model: Any) -> int:
    """Weights that every token is multiplied with: all but the table of embeddings, which is also the head."""
    table = model.get_input_embeddings().weight
    return sum(tensor.numel() for tensor in model.parameters() if tensor is not table)


def decode_limits(model: Any, shape: Shape, limits: Limits, chains: int, context: float) -> dict[str, float]:
    """How many tokens per second one step could make that reads each weight and each key once, or computes without waiting."""
    parameters = num_body(model) + shape.hidden * shape.vocabulary
    item = next(model.parameters()).dtype
    read = parameters * item.itemsize + chains * context * shape.kv_bytes(item)
    attention = 4 * chains * context * shape.heads * shape.head_dim * shape.layers
    memory, compute = read / limits.bytes_per_s, (2 * parameters * chains + attention) / limits.flops_per_s
    return {
        "memory_tokens_per_s": chains / memory,
        "compute_tokens_per_s": chains / compute,
        "roofline_tokens_per_s": chains / max(memory, compute),
    }


def update_flops(body: int, shape: Shape, lengths: Sequence[int], num_sampled: int, *, frozen: bool = False) -> float:
    """Operations that an update needs, none counted twice: every token through the layers, sampled ones through the head.

    Forward is one part; backward is two, one for what came in and one for the weights, which frozen weights are spared.
    """
    parts = 2 if frozen else 3
    attention = sum(2 * length**2 for length in lengths) * shape.heads * shape.head_dim * shape.layers
    dense = 2.0 * body * sum(lengths) + 2.0 * shape.hidden * shape.vocabulary * num_sampled
    return parts * dense + 3 * attention


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How much of the line is under at least one span."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        if stop > end:
            total += stop - max(start, end)
            end = stop
    return total


def device_busy(work: Callable[[], float], device: torch.device) -> float | None:
    """The share of the time that `work` says it took in which a kernel ran; not known on a CPU.

    The profiler slows the host down, so the true share is this or more.
    """
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        seconds = work()
        sync(device)
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or []
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return min(1.0, covered(spans) * 1e-6 / seconds)
