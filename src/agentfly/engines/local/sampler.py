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
    device = logits.device
    logits = logits.float()
    temperatures = [sampling.temperature for sampling in samplings]
    if any(t not in (0.0, 1.0) for t in temperatures):
        logits = logits / torch.tensor([t or 1.0 for t in temperatures], device=device)[:, None]
    probs = torch.softmax(logits, dim=-1)
    cold = [t == 0.0 for t in temperatures]
    if all(cold):
        ids = logits.argmax(dim=-1)
    else:
        cumulative = _truncate(probs, samplings).cumsum(dim=-1)
        points = torch.tensor([min(u, ALMOST_ONE) for u in uniforms], device=device)[:, None] * cumulative[:, -1:]
        ids = torch.searchsorted(cumulative, points, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)
        if any(cold):
            ids = torch.where(torch.tensor(cold, device=device), logits.argmax(dim=-1), ids)
    chosen = probs.gather(1, ids[:, None])[:, 0].log_()
    return ids.tolist(), chosen.tolist()


def draw_batch(
    logits: Tensor, uniforms: Tensor, temperatures: Tensor, top_k: Tensor | None, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """`draw` with all arguments on the device: no size or branch depends on values, as CUDA graphs need.

    `top_k` None: no row truncates its distribution.
    """
    logits = logits.float() / torch.where(temperatures > 0, temperatures, 1.0)[:, None]
    probs = torch.softmax(logits, dim=-1)
    left = probs if top_k is None else _truncate_batch(probs, top_k[:, None], top_p[:, None], min_p[:, None])
    cumulative = left.cumsum(dim=-1)
    points = (uniforms.clamp(max=ALMOST_ONE)[:, None] * cumulative[:, -1:]).contiguous()
    drawn = torch.searchsorted(cumulative, points, right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    ids = torch.where(temperatures > 0, drawn, logits.argmax(dim=-1))
    return ids, probs.gather(1, ids[:, None])[:, 0].log()


def _truncate_batch(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    small = probs < min_p * probs.amax(dim=-1, keepdim=True)
    values, places = probs.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(values.shape[1], device=probs.device)[None]
    values = values.masked_fill((ranks >= top_k) & (top_k > 0), 0.0)
    before = values.cumsum(dim=-1) - values
    values = values.masked_fill((before >= top_p * values.sum(dim=-1, keepdim=True)) & (top_p < 1.0), 0.0)
    return torch.zeros_like(probs).scatter(1, places, values).masked_fill(small, 0.0)


def _truncate(probs: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Zero what top-k, then top-p of the rest, then min-p exclude. Rows are not normalised again; drawing does not need it."""
    device = probs.device
    if any(sampling.min_p > 0 for sampling in samplings):
        floors = torch.tensor([sampling.min_p for sampling in samplings], device=device)[:, None]
        small = probs < floors * probs.amax(dim=-1, keepdim=True)
    else:
        small = None
    sorting = [i for i, sampling in enumerate(samplings) if sampling.top_k > 0 or sampling.top_p < 1.0]
    if sorting:
        rows = probs if len(sorting) == len(samplings) else probs[sorting]
        cut = _truncate_sorted(rows, [samplings[i] for i in sorting])
        if rows is probs:
            probs = cut
        else:
            probs = probs.index_copy(0, torch.tensor(sorting, device=device), cut)
    return probs if small is None else probs.masked_fill(small, 0.0)


def _truncate_sorted(probs: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    size = probs.shape[1]
    tops = [min(sampling.top_k or size, size) for sampling in samplings]
    values, places = probs.topk(max(tops), dim=-1)  # sorted, best first
    ranks = torch.arange(values.shape[1], device=probs.device)
    values = values.masked_fill(ranks >= torch.tensor(tops, device=probs.device)[:, None], 0.0)
    if any(sampling.top_p < 1.0 for sampling in samplings):
        before = values.cumsum(dim=-1) - values
        limits = torch.tensor([sampling.top_p for sampling in samplings], device=probs.device)[:, None]
        # A row without top-p keeps everything: rounding must not remove its tail.
        over = (before >= limits * values.sum(dim=-1, keepdim=True)) & (limits < 1.0)
        values = values.masked_fill(over, 0.0)
    return torch.zeros_like(probs).scatter_(1, places, values)
