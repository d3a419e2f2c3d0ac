"""How a module of a twin gets another `forward`, and how one proves beforehand that it computes the same.

In: modules of a twin (never of a model that others hold) and functions that would take the place of parts of them. Out: methods
on single instances, which `restore` takes back. No class and no module's globals are touched: a `forward` that calls a function
by a global name is made again, the same code with another meaning of that name. Refuses nothing: what cannot be tried has an
infinite `gap`, and whoever asked leaves that part as it was.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ROTARY = "apply_rotary_pos_emb"
_MARK = "agentfly_fused"


def put(module: Any, forward: Callable[..., Any]) -> None:
    """As a method, so that a copy of the module has one of its own."""
    if not hasattr(forward, _MARK):
        setattr(forward, _MARK, True)
    module.forward = types.MethodType(forward, module)


def restore(twin: Any) -> list[Any]:
    """The modules that had been given another forward; they have their own again."""
    found = [module for module in twin.modules() if hasattr(vars(module).get("forward"), _MARK)]
    for module in found:
        del module.forward
    return found


def calls_rotary(module: Any) -> bool:
    plain = inspect.unwrap(type(module).forward)
    return inspect.isfunction(plain) and ROTARY in plain.__code__.co_names and callable(plain.__globals__.get(ROTARY))


def with_rotary(module: Any, turn: Callable[[Callable[..., Any]], Callable[..., Any] | None]) -> Callable[..., Any] | None:
    """The module's forward with `turn(its own rotation)` for its rotation; None where `turn` gives none."""
    plain = inspect.unwrap(type(module).forward)
    other = turn(plain.__globals__[ROTARY])
    if other is None:
        return None
    names = {**plain.__globals__, ROTARY: other}
    made = types.FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    made.__kwdefaults__ = plain.__kwdefaults__
    return made


def line_to_turn(like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, cosines and sines to try a rotation on.

    Strided as a model's are, and with other cosines in the second half: only the plain rotation of halves agrees.
    """
    q, k = noise(like, 1, 3, 4, 16).transpose(1, 2), noise(like, 1, 3, 2, 16).transpose(1, 2)
    cos, sin = noise(like, 2, 1, 3, 16)
    return q, k, cos, sin


def fits_line(q: Any, k: Any, cos: Any, sin: Any) -> bool:
    """Whether the rotary kernel is made for such arguments."""
    if not all(isinstance(tensor, Tensor) and tensor.stride(-1) == 1 for tensor in (q, k, cos, sin)):
        return False
    if q.dim() != 4 or k.dim() != 4 or q.shape[0] != 1 or len({q.dtype, k.dtype, cos.dtype, sin.dtype}) != 1:
        return False
    _, _, tokens, dim = q.shape
    line = (1, tokens, dim)
    return bool(dim % 2 == 0 and k.shape == (1, k.shape[1], tokens, dim) and cos.shape == line and sin.shape == line)


def gap(ours: Callable[[], Tensor], theirs: Callable[[], Tensor]) -> float:
    """How far apart both are, in units of what rounding explains; infinite where either cannot be computed."""
    try:
        got, want = ours(), theirs()
    except Exception:  # noqa: BLE001  a part that cannot be tried is left as it is
        return float("inf")
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    # Four steps of the number format, of each value or of a tenth of the largest. float32: products add up in any order.
    eps = max(torch.finfo(want.dtype).eps, 2.5e-6)
    got, want = got.detach().float(), want.detach().float()
    room = 4.0 * eps * torch.maximum(want.abs(), want.abs().max() / 10.0)
    ratio = (got - want).abs() / room.clamp(min=1e-30)
    found = float(ratio.max())
    # The mean decides between kinds that differ in rounding only; any kind within the room is right.
    return found if not found <= 1.0 else float(ratio.mean())


def agrees(ours: Callable[[], Tensor], theirs: Callable[[], Tensor], by: Sequence[Tensor] | None) -> bool:
    """Whether both compute the same, and have the same gradients by these tensors, if any are given."""
    return gap(ours, theirs) <= 1.0 and (by is None or same_slopes(ours, theirs, by))


def same_slopes(ours: Callable[[], Tensor], theirs: Callable[[], Tensor], by: Sequence[Tensor]) -> bool:
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


def noise(like: Tensor, *shape: int) -> Tensor:
    """Random numbers from a generator of their own: the learner's draws must not depend on whether anything was tried."""
    generator = torch.Generator(like.device).manual_seed(1)
    return torch.randn(*shape, generator=generator, device=like.device).to(like.dtype)


def is_real(tensor: Tensor) -> bool:
    """Whether there are numbers in it to try, of a type that the kernels know."""
    return not tensor.is_meta and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
