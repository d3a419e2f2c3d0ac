"""Low-rank adapters of experts, whose weights are one three-dimensional parameter; one adapter per expert.

    y = x W[e]^T + (alpha / rank) (x A[e]^T) B[e]^T        tokens x of expert e, A [experts, rank, in], B [experts, out, rank]

The tokens are sorted by expert and multiplied in groups, as in transformers' own functions for experts. Only classes that
declare their layout to transformers (`use_experts_implementation`) are adapted.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..settings import LoraSettings

_LAYOUT = ("has_gate", "has_bias", "is_transposed", "_apply_gate", "num_experts", "down_proj")


class ExpertAdapter(nn.Module):
    """The adapters beside one weight of all experts. Their product has the shape in which the weight is stored."""

    def __init__(self, owner: nn.Module, name: str, settings: LoraSettings, generator: torch.Generator) -> None:
        super().__init__()
        object.__setattr__(self, "_owner", owner)  # no submodule: the weight has one name
        self.name, self.rank, self.scale = name, settings.rank, settings.alpha / settings.rank
        self.merges = False  # computes with the merged weight, to compare
        weight = self.frozen
        experts, rows, columns = weight.shape
        bound = 1.0 / math.sqrt(columns)
        drawn = torch.empty(experts, settings.rank, columns).uniform_(-bound, bound, generator=generator)
        self.lora_a = nn.Parameter(drawn.to(weight.device, weight.dtype))
        self.lora_b = nn.Parameter(torch.zeros(experts, rows, settings.rank, device=weight.device, dtype=weight.dtype))

    @property
    def frozen(self) -> Tensor:
        weight: Tensor = getattr(self._owner, self.name)
        return weight

    def merged(self) -> Tensor:
        """Returns the weight of the equivalent experts."""
        return (self.frozen.float() + self.scale * (self.lora_b.float() @ self.lora_a.float())).to(self.frozen.dtype)

    def forward(self, x: Tensor, ends: Tensor, transposed: bool) -> Tensor:
        """The products of tokens that are sorted by expert; `ends` are the ends of the experts' groups."""
        weight = self.merged() if self.merges else self.frozen
        pair: tuple[Tensor, Tensor] = self.lora_a, self.lora_b
        first, second = pair
        if transposed:
            first, second = self.lora_b, self.lora_a
        else:
            weight, first, second = (matrix.transpose(1, 2) for matrix in (weight, first, second))
        out = grouped(x, weight, ends)
        return out if self.merges else out + grouped(grouped(x, first, ends), second, ends) * self.scale


class LoraExperts(nn.Module):
    """Frozen experts and an adapter for each of their weights, under the name of the weight."""

    adapts = True

    def __init__(self, base: Any, names: list[str], settings: LoraSettings, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        for name in names:
            self.add_module(name, ExpertAdapter(base, name, settings, generator))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        base: Any = self.base
        chosen = top_k_index.shape[-1]
        experts, order = torch.sort(top_k_index.reshape(-1))
        ends = torch.searchsorted(experts, torch.arange(base.num_experts, device=experts.device), right=True).to(torch.int32)
        out = self._product("gate_up_proj" if base.has_gate else "up_proj", hidden_states[order // chosen], experts, ends)
        out = base._apply_gate(out) if base.has_gate else base.act_fn(out)
        out = self._product("down_proj", out, experts, ends)
        if getattr(base, "has_post_expert_norm", False):
            out = base.post_expert_norm(out)
        out = out * top_k_weights.reshape(-1)[order, None]
        return out[torch.argsort(order)].view(len(hidden_states), chosen, -1).sum(dim=1).to(hidden_states.dtype)

    def _product(self, name: str, x: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        base: Any = self.base
        weight: Tensor = getattr(base, name)
        x = x.to(weight.dtype)
        if (adapter := self._modules.get(name)) is not None:
            out: Tensor = adapter(x, ends, base.is_transposed)
        else:
            out = grouped(x, weight if base.is_transposed else weight.transpose(1, 2), ends)
        return out + getattr(base, f"{name}_bias")[experts] if base.has_bias else out


def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Tokens [tokens, in], sorted by expert, times the weights [experts, in, out] of their experts."""
    aligned = all(size % 8 == 0 for size in weight.shape[1:])  # the kernel reads 16 bytes at a time
    if aligned and x.dtype == torch.bfloat16 and x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 0):
        multiply: Any = torch.nn.functional.grouped_mm
        product: Tensor = multiply(x, weight, offs=ends)
        return product
    bounds = pairwise([0, *ends.tolist()])
    return torch.cat([x[start:end] @ weight[expert] for expert, (start, end) in enumerate(bounds)])


def expert_weights(module: nn.Module) -> list[str]:
    """The names of the three-dimensional weights of experts with a known layout; none for another module."""
    if not all(hasattr(module, name) for name in _LAYOUT):
        return []
    return [name for name, weight in module.named_parameters(recurse=False) if weight.ndim == 3]
