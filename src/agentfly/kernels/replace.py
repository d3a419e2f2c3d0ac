"""Replaces RMSNorm, gated MLP and rotary embedding inside a model by the kernels of `layers`.

Give it a replica of a model (a second module tree over the same parameters), never a model that others hold. Only single
module instances get another `forward`; classes and module globals are not touched, and `restore` undoes everything.

    probe on random numbers -> same values (and, with `gradients`, same gradients)?    yes: replace     no: leave the module

A module is replaced only if the probe passes on the device itself. Shapes and dtypes that the kernels do not support go to the
original forward at run time, as does every call with gradients enabled if `gradients` was false.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import LayerKernels
from .rotation import defer_rotation

ROTARY = "apply_rotary_pos_emb"
_MARK = "agentfly_fused"


class KernelMismatch(Exception):
    """A probe found that a kernel does not compute what the module computes."""


def replace_modules(
    replica: Any, kernels: LayerKernels, *, gradients: bool, defers: bool = False, failed: dict[str, str] | None = None
) -> dict[str, int]:
    """Replace the modules that pass their probe. Returns how many of each kind; modules replaced before are not counted.

    `defers`: the attention function rotates queries and keys (`rotation`). `failed` receives, per kind, why the last module
    that was not replaced failed its probe.
    """
    done = {"norms": 0, "gates": 0, "rotary": 0}
    rotated: dict[Any, Any] = {}
    with torch.set_grad_enabled(gradients):
        for module in list(replica.modules()):
            if "forward" in vars(module):
                continue
            if type(module).__name__.endswith("RMSNorm"):
                kind, replace = "norms", partial(_replace_norm, module, kernels, gradients)
            elif all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
                kind, replace = "gates", partial(_replace_gate, module, kernels, gradients)
            elif _calls_rotary(module):
                like = next(replica.parameters())
                kind, replace = "rotary", partial(_replace_rotary, module, kernels, gradients, defers, rotated, like)
            else:
                continue
            try:
                replace()
                done[kind] += 1
            except KernelMismatch as reason:
                if failed is not None:
                    failed[kind] = str(reason)
    return done


def set_forward(module: Any, forward: Callable[..., Any]) -> None:
    """Give one instance another forward. It is bound as a method, so that a deep copy of the module is bound to the copy."""
    if not hasattr(forward, _MARK):
        setattr(forward, _MARK, True)
    module.forward = types.MethodType(forward, module)


def restore(replica: torch.nn.Module) -> list[Any]:
    """Give every module its original forward back. Returns the modules that had another one."""
    restored = [module for module in replica.modules() if hasattr(vars(module).get("forward"), _MARK)]
    for module in restored:
        del module.forward
    return restored


# ---- the three kinds of modules ------------------------------------------------------------------------------------------


def _replace_norm(module: Any, kernels: LayerKernels, gradients: bool) -> None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float) or not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not _is_supported(weight):
        raise KernelMismatch("a norm of another kind")
    model = copy.deepcopy(module)  # with random weights: those of a new model are all 1 and would not tell the kinds apart
    model.weight.data = 1.0 + 0.5 * _noise(weight, len(weight))
    model.weight.requires_grad_()
    x = (2.0 * _noise(weight, 5, len(weight))).requires_grad_()
    ours: Callable[[str], Tensor] = partial(kernels.rms_norm, x, model.weight, eps)
    errors = {kind: _error(partial(ours, kind), partial(model, x)) for kind in kernels.NORMS}
    kind = min(errors, key=lambda name: errors[name])
    by = [x, model.weight] if gradients else None
    _check_agreement(partial(ours, kind), partial(model, x), by)
    original = type(module).forward

    def forward(self: Any, x: Tensor) -> Any:
        if x.dtype != self.weight.dtype or x.device != self.weight.device or not _usable(x, gradients):
            return original(self, x)
        return kernels.rms_norm(x, self.weight, eps, kind)

    set_forward(module, forward)


def _replace_gate(module: Any, kernels: LayerKernels, gradients: bool) -> None:
    weight = next(module.parameters())
    if not _is_supported(weight):
        raise KernelMismatch(f"weights of {weight.dtype}")
    grid = torch.linspace(-8.0, 8.0, 257, device=weight.device)
    acts: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": nn.functional.silu,
        "gelu": partial(nn.functional.gelu, approximate="tanh"),
    }
    fitting = [kind for kind in kernels.GATES if _error(partial(acts[kind], grid), partial(module.act_fn, grid)) <= 1.0]
    if len(fitting) != 1:
        raise KernelMismatch("an activation of another kind")
    kind, original = fitting[0], type(module).forward

    def forward(self: Any, x: Tensor) -> Any:
        if not _usable(x, gradients):
            return original(self, x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        same = gate.dtype == up.dtype and gate.shape == up.shape
        return self.down_proj(kernels.gated(gate, up, kind) if same else self.act_fn(gate) * up)

    size = getattr(module.gate_proj, "in_features", None) or module.down_proj.weight.shape[0]
    x = _noise(weight, 1, 5, int(size)).requires_grad_()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    _check_agreement(partial(forward, module, x), partial(original, module, x), [x, *trained] if gradients else None)
    set_forward(module, forward)


def _calls_rotary(module: torch.nn.Module) -> bool:
    original = inspect.unwrap(type(module).forward)
    return inspect.isfunction(original) and ROTARY in original.__code__.co_names and callable(original.__globals__.get(ROTARY))


def _replace_rotary(
    module: torch.nn.Module, kernels: LayerKernels, gradients: bool, defers: bool, made: dict[Any, Any], like: Tensor
) -> None:
    """Rebuild the module's forward from the same code with another value of one global name."""
    kind = type(module).forward
    if kind not in made:
        original = inspect.unwrap(kind)
        rotary = _fused_rotary(original.__globals__[ROTARY], kernels, gradients, defers, like)
        names = {**original.__globals__, ROTARY: rotary}
        forward = types.FunctionType(original.__code__, names, original.__name__, original.__defaults__, original.__closure__)
        forward.__kwdefaults__ = original.__kwdefaults__
        made[kind] = forward
    set_forward(module, made[kind])


def _fused_rotary(
    original: Callable[..., Any], kernels: LayerKernels, gradients: bool, defers: bool, like: Tensor
) -> Callable[..., Any]:
    """The kernel where it applies, else `original`. Raises Mismatch if the kernel computes something else than `original`."""
    if not _is_supported(like):
        raise KernelMismatch(f"weights of {like.dtype}")
    # Strided as a model's are. The second half of cos differs from the first: only the plain rotation of halves passes.
    q, k = _noise(like, 1, 3, 4, 16).transpose(1, 2), _noise(like, 1, 3, 2, 16).transpose(1, 2)
    cos, sin = _noise(like, 2, 1, 3, 16)
    inputs = (q.requires_grad_(), k.requires_grad_(), cos, sin)

    def ours() -> Tensor:
        return torch.cat(kernels.rotary(*inputs), dim=1)

    def theirs() -> Tensor:
        return torch.cat(original(*inputs), dim=1)

    _check_agreement(ours, theirs, inputs[:2] if gradients else None)

    def rotate(*args: Any, **kwargs: Any) -> Any:
        supported = len(args) == 4 and not kwargs and _fits_rotary(*args)
        if supported and _usable(args[0], gradients) and not args[2].requires_grad:
            q, k, cos, sin = args
            return defer_rotation(q, k, cos, sin, kernels.rotary) if defers else kernels.rotary(q, k, cos, sin)
        return original(*args, **kwargs)

    return rotate


def _fits_rotary(q: Any, k: Any, cos: Any, sin: Any) -> bool:
    """Whether the rotary kernel supports these arguments."""
    if not all(isinstance(tensor, Tensor) and tensor.stride(-1) == 1 for tensor in (q, k, cos, sin)):
        return False
    if q.dim() != 4 or k.dim() != 4 or q.shape[0] != 1 or len({q.dtype, k.dtype, cos.dtype, sin.dtype}) != 1:
        return False
    _, _, tokens, dim = q.shape
    shape = (1, tokens, dim)
    return bool(dim % 2 == 0 and k.shape == (1, k.shape[1], tokens, dim) and cos.shape == shape and sin.shape == shape)


def _usable(x: Tensor, gradients: bool) -> bool:
    """Kernels that were not probed for gradients run only while gradients are off; empty tensors launch nothing."""
    return (gradients or not torch.is_grad_enabled()) and x.numel() > 0


# ---- the probes ----------------------------------------------------------------------------------------------------------


def _check_agreement(ours: Callable[[], Tensor], theirs: Callable[[], Tensor], by: Sequence[Tensor] | None) -> None:
    """Raise Mismatch unless both return the same values and, if `by` is given, the same gradients by these tensors."""
    error = _compare(ours, theirs)
    if not error <= 1.0:
        raise KernelMismatch(f"values differ by {error:.1f} times the tolerance")
    if by is not None:
        _check_gradients(ours, theirs, by)


def _error(ours: Callable[[], Tensor], theirs: Callable[[], Tensor]) -> float:
    """As `_compare`, and infinite if either call fails."""
    try:
        return _compare(ours, theirs)
    except KernelMismatch:
        return float("inf")


def _compare(ours: Callable[[], Tensor], theirs: Callable[[], Tensor]) -> float:
    """The difference in units of what rounding explains (at most 1: equal). Raises Mismatch if either call fails."""
    try:
        got, want = ours(), theirs()
    except Exception as error:  # a module that cannot be probed keeps its forward
        raise KernelMismatch(f"the probe failed: {_describe(error)}") from error
    if got.shape != want.shape or got.dtype != want.dtype:
        raise KernelMismatch(f"{got.dtype} {tuple(got.shape)} instead of {want.dtype} {tuple(want.shape)}")
    # Tolerance: four units in the last place, of each value or of a tenth of the largest. In float32, matrix products may add
    # up in any order, hence the larger eps.
    eps = max(torch.finfo(want.dtype).eps, 2.5e-6)
    got, want = got.detach().float(), want.detach().float()
    tolerance = 4.0 * eps * torch.maximum(want.abs(), want.abs().max() / 10.0)
    ratio = (got - want).abs() / tolerance.clamp(min=1e-30)
    worst = float(ratio.max())
    # Within the tolerance the mean ranks the candidates: kinds of norms that differ in rounding only are told apart by it.
    return worst if not worst <= 1.0 else float(ratio.mean())


def _check_gradients(ours: Callable[[], Tensor], theirs: Callable[[], Tensor], by: Sequence[Tensor]) -> None:
    """Raise Mismatch unless both have the same gradients with respect to each tensor of `by`, within rounding."""
    try:
        out = theirs()
        # The incoming gradient has a component along the output: noise alone would hardly show the term that a norm subtracts.
        push = _noise(out, *out.shape) + out.detach() / out.detach().float().square().mean().sqrt().to(out.dtype)
        want = torch.autograd.grad(out, by, push)
        got = torch.autograd.grad(ours(), by, push)
    except Exception as error:  # a module that cannot be probed keeps its forward
        raise KernelMismatch(f"the probe of gradients failed: {_describe(error)}") from error
    if not all(_close(a, b) for a, b in zip(got, want, strict=True)):
        raise KernelMismatch("gradients differ")


def _describe(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _close(got: Tensor, want: Tensor) -> bool:
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    eps = max(torch.finfo(want.dtype).eps, 2.5e-6)
    got, want = got.float(), want.float()
    error = (got - want).abs()
    # Gradients are sums of rounded numbers: single ones may be off by several units, their root mean square by about one.
    near = error.square().mean().sqrt() <= 2.0 * eps * want.square().mean().sqrt()
    return bool(near & (error.max() <= 8.0 * eps * want.abs().max()))


def _noise(like: Tensor, *shape: int) -> Tensor:
    """Random numbers from a separate generator: a probe must not change the learner's own random draws."""
    generator = torch.Generator(like.device).manual_seed(1)
    return torch.randn(*shape, generator=generator, device=like.device).to(like.dtype)


def _is_supported(tensor: Tensor) -> bool:
    """Whether the tensor holds data (is not on the meta device) of a dtype that the kernels support."""
    return not tensor.is_meta and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
