"""Packed batches: rows in one line without padding, in which each token attends to its own row only.

    rows           A A A A      B B      C C C
    packed         a a a a b b c c c            input_ids [1, 9], position_ids 0 1 2 3 0 1 0 1 2

`packed_replica` makes a second module tree over the same tensors whose attention reads such lines. On a GPU all rows attend in
one kernel (torch's varlen attention: half precision, head sizes that are multiples of 8); elsewhere row by row. Attention
sinks, position biases and soft caps raise a ConfigError. `backbone` probes whether a model can be packed at all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ..kernels.replica import check_attention, share_tensors

NAME = "agentfly_packed"
_HALF = (torch.bfloat16, torch.float16)
_MAX_DIM = 256  # largest head size of torch's varlen kernel


class PackedLayout:
    """The positions of rows in a packed layout."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths, self.longest = lengths, max(lengths)
        counts = torch.tensor(lengths)
        ends = counts.cumsum(0)
        self.starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(device, torch.int32)
        offsets = torch.repeat_interleave(ends - counts, counts)
        self.positions = (torch.arange(int(ends[-1])) - offsets)[None].to(device)


def packed_replica(module: nn.Module) -> nn.Module:
    """A replica of the module whose attention reads packed lines. Raises ConfigError if its attention cannot be replaced."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    replica: nn.Module = share_tensors(module, ALL_ATTENTION_FUNCTIONS, NAME, attention)
    return replica


def run_packed(replica: nn.Module, input_ids: Tensor, lengths: Sequence[int]) -> Tensor:
    """Hidden states [1, tokens, width] of a packed layout."""
    layout = PackedLayout(lengths, input_ids.device)
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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Called by every layer: query [1, heads, tokens, head_dim], key and value [1, kv_heads, tokens, head_dim]."""
    check_attention(module, agentfly_layout, kwargs, "its rows cannot be packed")
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    fits = query.is_cuda and query.dtype in _HALF and query.shape[-1] % 8 == 0 and query.shape[-1] <= _MAX_DIM
    kernel = _varlen_kernel() if fits else None
    attend = kernel or _row_by_row
    return attend(query, key, value, agentfly_layout, scaling, sliding_window)[None], None


def _row_by_row(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float | None, window: int | None
) -> Tensor:
    outs, start = [], 0
    for length in layout.lengths:
        q, k, v = (tensor[start : start + length].transpose(0, 1)[None] for tensor in (query, key, value))
        mask = None
        if window is not None and window < length:
            reach = torch.arange(length, device=query.device)
            distance = reach[:, None] - reach[None]
            mask = (distance >= 0) & (distance < window)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        outs.append(out[0].transpose(0, 1))
        start += length
    return torch.cat(outs)


@cache
def _varlen_kernel() -> Callable[..., Tensor] | None:
    """torch's varlen attention, adapted to the signature of the installed torch; None if torch has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters

    def attend(
        query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float | None, window: int | None
    ) -> Tensor:
        options: dict[str, Any] = {}
        if scale is not None:
            options["scale"] = scale
        if "window_size" in known:
            options["window_size"] = (-1 if window is None else window - 1, 0)
        elif window is None or window >= layout.longest:
            options["is_causal"] = True
        else:
            return _row_by_row(query, key, value, layout, scale, window)
        if query.shape[1] != key.shape[1]:
            if "enable_gqa" in known:
                options["enable_gqa"] = True
            else:
                times = query.shape[1] // key.shape[1]
                key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        out: Any = varlen_attn(query, key, value, layout.starts, layout.starts, layout.longest, layout.longest, **options)
        return out  # type: ignore[no-any-return]

    return attend if "scale" in known else None
