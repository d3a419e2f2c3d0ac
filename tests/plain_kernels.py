"""The kernels of a twin in torch, so that what is done with them is seen without Triton or a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


class Plain:
    """The kernels in torch, with gradients by torch itself. `calls` counts them."""

    NORMS = ("llama", "gemma", "plain")
    GATES = ("silu", "gelu")

    def __init__(self) -> None:
        self.calls = {"rms_norm": 0, "rotary": 0, "gated": 0}

    def rms_norm(self, x: Any, weight: Any, eps: float, kind: str) -> Any:
        self.calls["rms_norm"] += 1
        out = x.float() * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        scales = {"llama": lambda: out.to(x.dtype) * weight, "gemma": lambda: out * (1 + weight.float())}
        return scales.get(kind, lambda: out * weight.float())().to(x.dtype)

    def rotary(self, q: Any, k: Any, cos: Any, sin: Any) -> Any:
        self.calls["rotary"] += 1
        half = q.shape[-1] // 2
        turned = [t * cos[:, None] + torch.cat((-t[..., half:], t[..., :half]), -1) * sin[:, None] for t in (q, k)]
        return tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in turned)

    def gated(self, gate: Any, up: Any, kind: str) -> Any:
        self.calls["gated"] += 1
        return (functional.silu(gate) if kind == "silu" else functional.gelu(gate, approximate="tanh")) * up

    def store(self, key: Any, value: Any, keys: Any, values: Any, places: Any) -> None:
        for pool, new in ((keys, key), (values, value)):
            pool.view(-1, *pool.shape[2:]).index_copy_(0, places, new.contiguous())
