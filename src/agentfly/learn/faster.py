"""Faster norms, gates and rotary positions for a packed twin.

In: a twin (see `packed`) on a GPU. Out: the same twin with other `forward`s on some of its modules, each one kernel forward and
one back (`layer_kernels`) where transformers launches ten. Only instances of the twin are changed, never a class and never the
model whose weights it shares. A part is replaced only after a probe on the device: on random numbers, with weights that require
gradients, it must give the values and all gradients of the module it replaces; every other part stays as it was. Without a GPU
or Triton, nothing is replaced.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..engines.local.swap import calls_rotary, fits_line, gap, is_real, line_to_turn, noise, put, with_rotary


def find_kernels(device: torch.device) -> Any:
    """The kernels for this device; None where there are none."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from . import layer_kernels

    return layer_kernels


@torch.enable_grad()
def quicken(twin: nn.Module, kernels: Any) -> dict[str, int]:
    """Replace what can be; how many parts of each kind."""
    done = {"norms": 0, "gates": 0, "rotary": 0}
    turns: dict[Any, Any] = {}
    for module in list(twin.modules()):
        if "forward" in vars(module):
            continue
        if type(module).__name__.endswith("RMSNorm"):
            done["norms"] += _norm(module, kernels)
        elif all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
            done["gates"] += _gate(module, kernels)
        elif calls_rotary(module):
            done["rotary"] += _rotary(module, kernels, turns, next(twin.parameters()))
    return done


def _norm(module: Any, kernels: Any) -> bool:
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
    if not gaps[kind] <= 1.0 or not _same_slopes(partial(ours, kind), partial(model, x), [x, model.weight]):
        return False
    plain = type(module).forward

    def forward(self: Any, x: Tensor) -> Any:
        if x.dtype != self.weight.dtype or x.device != self.weight.device or not x.numel():
            return plain(self, x)
        return kernels.rms_norm(x, self.weight, eps, kind)

    put(module, forward)
    return True


def _gate(module: Any, kernels: Any) -> bool:
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
        gate, up = self.gate_proj(x), self.up_proj(x)
        if gate.dtype != up.dtype or gate.shape != up.shape or not gate.numel():
            return self.down_proj(self.act_fn(gate) * up)
        return self.down_proj(kernels.gated(gate, up, kind))

    size = getattr(module.gate_proj, "in_features", None) or module.down_proj.weight.shape[0]
    x = noise(weight, 1, 5, int(size)).requires_grad_()
    ours, theirs = partial(forward, module, x), partial(plain, module, x)
    learned = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not gap(ours, theirs) <= 1.0 or not _same_slopes(ours, theirs, [x, *learned]):
        return False
    put(module, forward)
    return True


def _rotary(module: Any, kernels: Any, turns: dict[Any, Any], like: Tensor) -> bool:
    kind = type(module).forward
    if kind not in turns:
        turns[kind] = with_rotary(module, partial(_turn, kernels=kernels, like=like))
    if turns[kind] is None:
        return False
    put(module, turns[kind])
    return True


def _turn(plain: Callable[..., Any], kernels: Any, like: Tensor) -> Callable[..., Any] | None:
    """Both turned by the kernel where it can, else as before. None where the kernel does something else than `plain`."""
    if not is_real(like):
        return None
    q, k, cos, sin = line_to_turn(like)
    line = (q.requires_grad_(), k.requires_grad_(), cos, sin)

    def ours() -> Tensor:
        return torch.cat(kernels.rotary(*line), dim=1)

    def theirs() -> Tensor:
        return torch.cat(plain(*line), dim=1)

    if not gap(ours, theirs) <= 1.0 or not _same_slopes(ours, theirs, line[:2]):
        return None

    def turn(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 4 and not kwargs and fits_line(*args) and not args[2].requires_grad and args[0].numel():
            return kernels.rotary(*args)
        return plain(*args, **kwargs)

    return turn


def _same_slopes(ours: Callable[[], Tensor], theirs: Callable[[], Tensor], by: Sequence[Tensor]) -> bool:
    """Whether both have the same gradients, by each of these tensors, within what rounding on the way explains."""
    try:
        out = theirs()
        # With a part along the values themselves: what a norm takes away from a gradient is hardly seen in noise alone.
        push = noise(out, *out.shape) + out.detach() / out.detach().float().square().mean().sqrt().to(out.dtype)
        want = torch.autograd.grad(out, by, push)
        got = torch.autograd.grad(ours(), by, push)
    except Exception:  # noqa: BLE001  a part that cannot be tried is left as it is
        return False
    return all(_alike(a, b) for a, b in zip(got, want, strict=True))


def _alike(got: Tensor, want: Tensor) -> bool:
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    eps = max(torch.finfo(want.dtype).eps, 2.5e-6)
    got, want = got.float(), want.float()
    error = (got - want).abs()
    # Sums of rounded numbers: each may be off by some steps of the format, all together by about one.
    near = error.square().mean().sqrt() <= 2.0 * eps * want.square().mean().sqrt()
    return bool(near & (error.max() <= 8.0 * eps * want.abs().max()))
