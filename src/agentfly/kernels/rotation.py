"""The rotary embedding of a replica over pages, left to the attention function, which does it inside its own kernel.

    model's attention --q, k, cos, sin--> defer_rotation --q, k (not rotated, marked with cos and sin)--> attention function
                                                                    decode: `take_rotation`, the kernel rotates
                                                                    prefill: `rotate_now`

The mark is an attribute of the two tensors themselves. A model that changes them between the rotary embedding and the attention
function loses it; the replica then computes something else than the model, and the check of every new replica finds that.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

_MARK = "agentfly_rotation"
Rotary = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def defer_rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Returns q and k as they are, with a mark that says how to rotate them."""
    q, k = q.detach(), k.detach()  # new tensor objects over the same memory
    for tensor in (q, k):
        setattr(tensor, _MARK, (cos, sin, rotary))
    return q, k


def take_rotation(q: object, k: object) -> tuple[Tensor, Tensor] | None:
    """The cos and sin by which both are still to be rotated; None if they are rotated."""
    mark, other = getattr(q, _MARK, None), getattr(k, _MARK, None)
    assert (mark is None) == (other is None), "one of query and key was replaced between rotary embedding and attention"
    return None if mark is None else (mark[0], mark[1])


def rotate_now(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate both, if that was deferred."""
    mark = getattr(q, _MARK, None)
    if take_rotation(q, k) is None or mark is None:
        return q, k
    cos, sin, rotary = mark
    rotated: tuple[Tensor, Tensor] = rotary(q, k, cos, sin)
    return rotated
