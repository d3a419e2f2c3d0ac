"""The sampler: draws one token per row from a batch of logits.

Log-probs are those of softmax(logits / temperature), before top-k, top-p and min-p truncate it (temperature 0: the largest
logit, under softmax(logits)). A row is drawn by inverting its cumulative distribution at one uniform number, so its token
depends on that row alone and not on the rest of the batch. The module has no state and no random generator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels import ALMOST_ONE
from ...types import Sampling


def draw(logits: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> tuple[list[int], list[float]]:
    """One token and its log-prob per row. `uniforms` are in [0, 1); rows with temperature 0 ignore theirs."""
    numbers = [(u, s.temperature, s.top_p, s.min_p) for u, s in zip(uniforms, samplings, strict=True)]
    points, temperatures, top_p, min_p = torch.tensor(numbers, device=logits.device).unbind(1)
    truncates = any(s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0 for s in samplings)
    top_k = torch.tensor([s.top_k for s in samplings], device=logits.device) if truncates else None
    ids, logprobs = draw_batch(logits, points, temperatures, top_k, top_p, min_p)
    return ids.tolist(), logprobs.tolist()


def draw_batch(
    logits: Tensor, uniforms: Tensor, temperatures: Tensor, top_k: Tensor | None, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """`draw` with all arguments and results on the device: no size or branch depends on values, as CUDA graphs need.

    `top_k` None: no row truncates its distribution.
    """
    logits = logits.float() / torch.where(temperatures > 0, temperatures, 1.0)[:, None]
    probs = torch.softmax(logits, dim=-1)
    left = probs if top_k is None else _truncate(probs, top_k[:, None], top_p[:, None], min_p[:, None])
    cumulative = left.cumsum(dim=-1)
    points = (uniforms.clamp(max=ALMOST_ONE)[:, None] * cumulative[:, -1:]).contiguous()
    drawn = torch.searchsorted(cumulative, points, right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    ids = torch.where(temperatures > 0, drawn, logits.argmax(dim=-1))
    return ids, probs.gather(1, ids[:, None])[:, 0].log()


def _truncate(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Zero what top-k, then top-p of the rest, then min-p exclude. Rows are not normalised again; drawing does not need it.

    A row without an option keeps everything: rounding must not remove its tail.
    """
    small = probs < min_p * probs.amax(dim=-1, keepdim=True)
    values, places = probs.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(values.shape[1], device=probs.device)[None]
    values = values.masked_fill((ranks >= top_k) & (top_k > 0), 0.0)
    before = values.cumsum(dim=-1) - values
    values = values.masked_fill((before >= top_p * values.sum(dim=-1, keepdim=True)) & (top_p < 1.0), 0.0)
    return torch.zeros_like(probs).scatter(1, places, values).masked_fill(small, 0.0)
