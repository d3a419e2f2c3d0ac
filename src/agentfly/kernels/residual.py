"""Adds a product to the residual inside the product, in the layers of a replica: two launches fewer per layer.

    layer:  h = h + attention(norm(h)),  h = h + mlp(norm(h))
            the last product of attention and MLP (o_proj, down_proj) adds to h itself, as `addmm_`

A sum is rounded once instead of twice. Only layers of this form are changed: a probe runs the layer's own forward with simple
modules in place of its parts and compares. With gradients enabled the original forwards run.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from .replace import set_forward

PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
_SUM = "agentfly_sum"


def fuse_residuals(replica: Any) -> int:
    """Change the layers that have this form. Returns their number."""
    count = 0
    for layer in list(replica.modules()):
        if "forward" in vars(layer) or not all(isinstance(getattr(layer, name, None), nn.Module) for name in PARTS):
            continue
        ends = [getattr(layer.self_attn, "o_proj", None), getattr(layer.mlp, "down_proj", None)]
        if not all(map(_is_plain, ends)) or not _adds_residuals(layer):
            continue
        for end in ends:
            set_forward(end, _add_product)
        set_forward(layer, _layer_forward(type(layer).forward))
        count += 1
    return count


def _layer_forward(original: Any) -> Any:
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or torch.is_grad_enabled() or not hidden_states.is_contiguous():
            return original(self, hidden_states, *args, **kwargs)
        vars(self.self_attn.o_proj)[_SUM] = hidden_states
        hidden_states, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        vars(self.mlp.down_proj)[_SUM] = hidden_states
        return self.mlp(self.post_attention_layernorm(hidden_states))

    return forward


def _add_product(self: Any, x: Tensor) -> Tensor:
    """nn.Linear without a bias, added to the tensor that the layer left here, in place."""
    total: Tensor | None = vars(self).pop(_SUM, None)
    if total is None:
        return nn.functional.linear(x, self.weight)
    total.view(-1, total.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), self.weight.t())
    return total


def _is_plain(layer: Any) -> bool:
    """Whether it is an nn.Linear without bias, adapters or hooks."""
    kind: Any = type(layer)
    if kind is not nn.Linear or layer.bias is not None or "forward" in vars(layer) or hasattr(layer, "_hf_hook"):
        return False
    return not layer._forward_hooks and not layer._forward_pre_hooks and type(layer.weight.data) is Tensor


class _Scale(nn.Module):
    """Multiplies by a number. As the attention it also returns the weights, None."""

    def __init__(self, factor: float, pair: bool = False) -> None:
        super().__init__()
        self.factor, self.pair = factor, pair

    def forward(self, hidden_states: Tensor, **_: object) -> Any:
        out = hidden_states * self.factor + self.factor
        return (out, None) if self.pair else out


def _adds_residuals(layer: Any) -> bool:
    """Whether the layer's own forward computes h + mlp(norm(h)) of h + attention(norm(h)), and nothing else."""
    probe = copy.copy(layer)
    probe._modules = dict(layer._modules)
    parts = [_Scale(0.5), _Scale(-1.25, pair=True), _Scale(2.0), _Scale(0.75)]
    probe._modules |= dict(zip(PARTS, parts, strict=True))
    x = torch.linspace(-1.0, 1.0, 12).view(1, 3, 4)
    try:
        with torch.no_grad():
            got = type(layer).forward(probe, x)
    except Exception:  # noqa: BLE001  a layer that cannot be probed keeps its forward
        return False
    h = x + parts[1](parts[0](x))[0]
    want = h + parts[3](parts[2](h))
    return isinstance(got, Tensor) and got.shape == want.shape and bool(torch.allclose(got, want))
