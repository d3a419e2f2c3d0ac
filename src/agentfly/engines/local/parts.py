"""Norms, gated layers and rotary positions of a twin, each by one kernel: for the engine, and with gradients for the learner.

In: a twin and kernels (`fused`, `learn.layer_kernels`). Out: the twin with other forwards on some of its modules, and how many
of each kind. A part is replaced only where a probe on the device has shown that it computes the same, with `slopes` also the
same gradients; every other part stays as it was. Without `slopes` a replacement calls what it replaced while gradients are on;
with or without, it does so for shapes and types that the kernels are not made for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .swap import agrees, calls_rotary, fits_line, gap, is_real, line_to_turn, noise, put, same_slopes, with_rotary


def replace_parts(twin: Any, kernels: Any, *, slopes: bool) -> dict[str, int]:
    """Replace what can be; how many parts of each kind. Gradients are on where `slopes` are wanted, else off."""
    done = {"norms": 0, "gates": 0, "rotary": 0}
    turns: dict[Any, Any] = {}
    with torch.set_grad_enabled(slopes):
        for module in list(twin.modules()):
            if "forward" in vars(module):
                continue
            if type(module).__name__.endswith("RMSNorm"):
                done["norms"] += _norm(module, kernels, slopes)
            elif all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
                done["gates"] += _gate(module, kernels, slopes)
            elif calls_rotary(module):
                done["rotary"] += _rotary(module, kernels, slopes, turns, next(twin.parameters()))
    return done


def _norm(module: Any, kernels: Any, slopes: bool) -> bool:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float) or not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not is_real(weight):
        return False
    model = copy.deepcopy(module)  # with weights of its own: those of a new model are all 1, and would tell nothing
    model.weight.data = 1.0 + 0.5 * noise(weight, len(weight))
    model.weight.requires_grad_()
    x = (2.0 * noise(weight, 5, len(weight))).requires_grad_()
    ours: Callable[[str], Tensor] = partial(kernels.rms_norm, x, model.weight, eps)
    gaps = {kind: gap(partial(ours, kind), partial(model, x)) for kind in kernels.NORMS}
    kind = min(gaps, key=lambda name: gaps[name])
    if not gaps[kind] <= 1.0 or (slopes and not same_slopes(partial(ours, kind), partial(model, x), [x, model.weight])):
        return False
    plain = type(module).forward

    def forward(self: Any, x: Tensor) -> Any:
        if x.dtype != self.weight.dtype or x.device != self.weight.device or not _usable(x, slopes):
            return plain(self, x)
        return kernels.rms_norm(x, self.weight, eps, kind)

    put(module, forward)
    return True


def _gate(module: Any, kernels: Any, slopes: bool) -> bool:
    weight = next(module.parameters())
    if not is_real(weight):
        return False
    grid = torch.linspace(-8.0, 8.0, 257, device=weight.device)
    acts: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": nn.functional.silu,
        "gelu": partial(nn.functional.gelu, approximate="tanh"),
    }
    known = [kind for kind in kernels.GATES if gap(partial(acts[kind], grid), partial(module.act_fn, grid)) <= 1.0]
    if len(known) != 1:
        return False
    kind, plain = known[0], type(module).forward

    def forward(self: Any, x: Tensor) -> Any:
        if not _usable(x, slopes):
            return plain(self, x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        same = gate.dtype == up.dtype and gate.shape == up.shape
        return self.down_proj(kernels.gated(gate, up, kind) if same else self.act_fn(gate) * up)

    size = getattr(module.gate_proj, "in_features", None) or module.down_proj.weight.shape[0]
    x = noise(weight, 1, 5, int(size)).requires_grad_()
    learned = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not agrees(partial(forward, module, x), partial(plain, module, x), [x, *learned] if slopes else None):
        return False
    put(module, forward)
    return True


def _rotary(module: Any, kernels: Any, slopes: bool, turns: dict[Any, Any], like: Tensor) -> bool:
    """The module's forward, the same code, with another meaning of one global name."""
    kind = type(module).forward
    if kind not in turns:
        turns[kind] = with_rotary(module, partial(_turn, kernels=kernels, slopes=slopes, like=like))
    if turns[kind] is None:
        return False
    put(module, turns[kind])
    return True


def _turn(plain: Callable[..., Any], kernels: Any, slopes: bool, like: Tensor) -> Callable[..., Any] | None:
    """Both turned by the kernel where it can, else as before. None where the kernel does something else than `plain`."""
    if not is_real(like):
        return None
    q, k, cos, sin = line_to_turn(like)
    line = (q.requires_grad_(), k.requires_grad_(), cos, sin)

    def ours() -> Tensor:
        return torch.cat(kernels.rotary(*line), dim=1)

    def theirs() -> Tensor:
        return torch.cat(plain(*line), dim=1)

    if not agrees(ours, theirs, line[:2] if slopes else None):
        return None

    def turn(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 4 and not kwargs and fits_line(*args) and _usable(args[0], slopes) and not args[2].requires_grad:
            return kernels.rotary(*args)
        return plain(*args, **kwargs)

    return turn


def _usable(x: Tensor, slopes: bool) -> bool:
    """Kernels without gradients are for when none are wanted, and no kernel is launched over nothing."""
    return (slopes or not torch.is_grad_enabled()) and x.numel() > 0
