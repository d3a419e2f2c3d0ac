"""Packed batches: rows in one line without padding, in which each token attends to its own row only.

    rows           A A A A      B B      C C C
    packed         a a a a b b c c c            input_ids [1, 9], position_ids 0 1 2 3 0 1 0 1 2

Rows that begin alike may share their beginning: a row then has only the tokens in which it differs from the rows before it, and
its other keys and values are taken from them. Gradients of shared keys and values add up.

    rows           P P P A A     P P P B     P P Q       `keys` of the rows, as places in the line
    packed         p p p a a b q                         0 1 2 3 4 | 0 1 2 5 | 0 1 6
                   position_ids 0 1 2 3 4 3 2

`packed_replica` makes a second module tree over the same tensors whose attention reads such lines. On a GPU all rows attend in
one kernel (torch's flash attention for rows of different lengths: half precision, head sizes that are multiples of 8) if it
passes a probe; elsewhere in a few calls, see `bucketed`. Attention sinks, position biases and soft caps raise a ConfigError.
`backbone` probes whether a model can be packed at all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..kernels.replica import check_attention, share_tensors
from .bucketed import Buckets, Take

NAME = "agentfly_packed"
_HALF = (torch.bfloat16, torch.float16)
_MAX_DIM = 256  # largest head size of torch's kernel


class PackedLayout:
    """The places of rows in a packed line. Every row has at least one token that it shares with no other row."""

    def __init__(self, lengths: Sequence[int], device: torch.device, keys: Sequence[NDArray[np.int64]] | None = None) -> None:
        """`lengths` count the tokens of each row in the line; `keys` are the places of all its tokens if rows share some."""
        self.lengths = tuple(lengths)
        firsts = np.cumsum([0, *lengths])
        self.keys = [np.arange(a, b) for a, b in pairwise(firsts)] if keys is None else list(keys)
        self.key_lengths = tuple(len(places) for places in self.keys)
        self.longest, self.longest_key = max(self.lengths), max(self.key_lengths)
        self.starts, self.key_starts = _starts(self.lengths, device), _starts(self.key_lengths, device)
        positions = [np.arange(whole - own, whole) for own, whole in zip(self.lengths, self.key_lengths, strict=True)]
        self.positions = torch.from_numpy(np.concatenate(positions))[None].to(device)
        self.take = None if keys is None else Take(np.concatenate(keys), int(firsts[-1]), device)
        self.attention = ""
        """The attention function that ran, after a run."""
        self._buckets: dict[int | None, Buckets] = {}

    def buckets(self, window: int | None) -> Buckets:
        """The division of the rows into calls, made once for all layers."""
        if window is not None and window >= self.longest_key:
            window = None
        if window not in self._buckets:
            self._buckets[window] = Buckets(self.lengths, self.keys, window, self.positions.device)
        return self._buckets[window]


def _starts(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.from_numpy(np.cumsum([0, *lengths])).to(device, torch.int32)


def packed_replica(module: nn.Module) -> nn.Module:
    """A replica of the module whose attention reads packed lines. Raises ConfigError if its attention cannot be replaced."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    replica: nn.Module = share_tensors(module, ALL_ATTENTION_FUNCTIONS, NAME, attention)
    return replica


def run_packed(replica: nn.Module, input_ids: Tensor, layout: PackedLayout) -> Tensor:
    """Hidden states [1, tokens, width] of a packed line."""
    output: Any = replica(input_ids=input_ids, position_ids=layout.positions, use_cache=False, agentfly_layout=layout)
    hidden: Tensor = output.last_hidden_state
    return hidden


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    agentfly_layout: Any = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Called by every layer: query [1, heads, tokens, head_dim], key and value [1, kv_heads, tokens, head_dim]."""
    check_attention(module, agentfly_layout, kwargs, "its rows cannot be packed")
    layout: PackedLayout = agentfly_layout
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    kernel = find_kernel(query.device, query.dtype, query.shape[1], key.shape[1], query.shape[2])
    layout.attention = kernel.name
    return kernel.attend(query, key, value, layout, scaling, sliding_window)[None], None


# ---- attention functions -------------------------------------------------------------------------------------------------
#
# Each takes query [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim], the layout, the scale and the window.
# The last query of a row is at the position of its last key.

Attend = Callable[[Tensor, Tensor, Tensor, PackedLayout, float | None, int | None], Tensor]


class Kernel(NamedTuple):
    name: str
    attend: Attend


def _bucketed(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float | None, window: int | None
) -> Tensor:
    return layout.buckets(window).attend(query, key, value, scale)


def _all_keys(layout: PackedLayout, *tensors: Tensor) -> list[Tensor]:
    """Keys and values of all rows one after another, where they share some."""
    return [tensor.contiguous() if layout.take is None else layout.take(tensor) for tensor in tensors]


def _flash(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float | None, window: int | None) -> Tensor:
    """torch's own flash attention, whose gradient is dispatched in C++."""
    out = torch.ops.aten._flash_attention_forward(
        query.contiguous(),
        *_all_keys(layout, key, value),
        layout.starts,
        layout.key_starts,
        max(2, layout.longest),  # a longest row of 1 would select a path for decoding, which has no gradient
        layout.longest_key,
        0.0,
        window is None,
        False,
        scale=scale,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0,
    )
    return out[0]  # type: ignore[no-any-return]


def _varlen(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float | None, window: int | None) -> Tensor:
    """The public function for the same kernel, adapted to the signature of the installed torch."""
    from torch.nn.attention.varlen import varlen_attn

    parameters = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {} if scale is None else {"scale": scale}
    if "window_size" in parameters:
        options["window_size"] = (-1 if window is None else window - 1, 0)
    elif window is None or window >= layout.longest_key:
        options["is_causal"] = True
    else:
        return _bucketed(query, key, value, layout, scale, window)
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in parameters:
            options["enable_gqa"] = True
        else:
            times = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    lengths = layout.starts, layout.key_starts, max(2, layout.longest), layout.longest_key
    attend: Any = varlen_attn
    out: Tensor = attend(query.contiguous(), *_all_keys(layout, key, value), *lengths, **options)
    return out


@cache
def find_kernel(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> Kernel:
    """The first attention function that gives the values and gradients of `_bucketed` on this device for such heads."""
    why = f"on {device.type}"
    if device.type == "cuda":
        why = f"in {str(dtype).removeprefix('torch.')}" if dtype not in _HALF else f"with heads of {dim}"
        if dtype in _HALF and dim % 8 == 0 and dim <= _MAX_DIM:
            why = "no kernel passed its probe"
            for name, attend in (("torch flash", _flash), ("torch varlen", _varlen)):
                if agrees(attend, device, dtype, heads, kv_heads, dim):
                    return Kernel(name, attend)
    return Kernel(f"rows in buckets ({why})", _bucketed)


def agrees(attend: Attend, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> bool:
    """Whether `attend` gives the values and gradients of `_bucketed` on rows that share a beginning, also in a window."""
    layout = PackedLayout((9, 1, 4), device, [np.arange(9), np.array([0, 1, 9]), np.array([0, 1, 2, 3, 4, 10, 11, 12, 13])])
    generator = torch.Generator(device).manual_seed(1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    given = noise(14, heads, dim), noise(14, kv_heads, dim), noise(14, kv_heads, dim)
    push = noise(14, heads, dim)

    def run(function: Attend, window: int | None, kind: torch.dtype) -> list[Tensor]:
        inputs = [tensor.detach().to(kind).requires_grad_() for tensor in given]
        query, key, value = inputs
        out = function(query, key, value, layout, 0.3, window)
        return [out.detach(), *torch.autograd.grad(out, inputs, push.to(kind))]

    try:
        with torch.enable_grad():
            for window in (None, 3):
                pairs = zip(run(attend, window, dtype), run(_bucketed, window, torch.float32), strict=True)
                if not all(bool((got.float() - want).norm() <= 2e-2 * want.norm()) for got, want in pairs):
                    return False
    except Exception:  # noqa: BLE001  another torch: the next function is tried
        return False
    return True
