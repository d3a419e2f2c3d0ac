"""Moments of an optimizer in 32, 16 or 8 bits per number, rounded at random in proportion to the distance.

The average of squares changes by a thousandth in a step, less than half the distance between two bfloat16 or 8-bit numbers:
rounded to the nearest one it would never change. Rounded up with a probability equal to the share of the distance it is right
on average. The random numbers are a hash of step and place: a resumed run, and any number of ranks, rounds alike.

8 bits are an index into a table that is dense near 0, times the largest magnitude of a block of a row (arXiv:2110.02861).
Blocks end with their row, so that ranks that divide the rows divide the scales, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from ..model.evidence import strided

BLOCK = 256
"""Numbers of a row that share a scale."""
SHORTEST_ROW = 64
"""Vectors, and matrices with shorter rows, keep float32 moments: the scales would take what 8 bits save."""
SHORT = {"bf16": torch.bfloat16, "8bit": torch.uint8}
SCALE = "_scale"
WIDEST = 0.0142
"""The widest gap between two values of the table."""
_WORD = 2**32 - 1


@cache
def table_of(signed: bool, device: torch.device) -> Tensor:
    """The 255 values that 8 bits stand for, ascending, of magnitudes up to 1; without a sign none is 0.

    Each decade has twice as many as the next smaller one. An average of squares never becomes 0 beside a mean that is not.
    """
    values = [torch.ones(1, dtype=torch.float64)]
    for place in range(signed, 7):
        edges = torch.linspace(0.1, 1.0, 2 ** (place + (not signed)) + 1, dtype=torch.float64)
        values.append(10.0 ** (place - 6) * (edges[:-1] + edges[1:]) / 2.0)
    half = torch.cat(values)
    whole = torch.cat([half, -half, torch.zeros(1, dtype=torch.float64)]) if signed else half
    return whole.sort().values.float().to(device)


def uniform(seed: int, first: int, count: int, device: torch.device) -> Tensor:
    """Returns integers from 0 to 2**32 - 1: an integer hash (of T. Mueller) of `count` places from `first` on."""
    mixed = (torch.arange(first, first + count, device=device) + (seed * 0x9E3779B9 & _WORD)) & _WORD
    for factor in (0x45D9F3B, 0x45D9F3B, 1):  # small enough for the products to fit into int64
        mixed = ((mixed ^ (mixed >> 16)) * factor) & _WORD
    return mixed


def make(weights: Tensor, kind: str | None) -> dict[str, Tensor]:
    """Returns an empty moment for some rows of weights: its numbers under "" and, of 8 bits, the scales under SCALE."""
    width = math.prod(weights.shape[1:])
    if kind is None or (kind == "8bit" and (weights.dim() < 2 or width < SHORTEST_ROW)):
        return {"": torch.zeros_like(weights)}
    empty, blocks = torch.zeros_like(weights, dtype=SHORT[kind]), -(-width // BLOCK)
    return {"": empty} | ({SCALE: weights.new_zeros(len(weights), blocks)} if kind == "8bit" else {})


def read(state: Mapping[str, Tensor], name: str, rows: slice, signed: bool) -> Tensor:
    """Returns rows of a moment in float32, with one dimension for the row."""
    short = flat(state[name])[rows]
    if short.dtype != torch.uint8:
        return short.float()
    values = table_of(signed, short.device)[short.int()]
    return values * _spread(state[name + SCALE][rows], short.shape[1])


def write(state: Mapping[str, Tensor], name: str, rows: slice, value: Tensor, signed: bool, seed: int, first: int) -> None:
    """Store rows of a moment. `first` is the place of their first number in the whole tensor, for the rounding."""
    short = flat(state[name])[rows]
    if short.dtype == torch.float32:
        short.copy_(value)
        return
    chance = uniform(seed, first, value.numel(), value.device).view(value.shape)
    if short.dtype == torch.bfloat16:
        bits = value.contiguous().view(torch.int32) + (chance & 0xFFFF).int()
        short.copy_((bits & -65536).view(torch.float32))
        return
    scales, table = state[name + SCALE][rows], table_of(signed, value.device)
    padded = torch.nn.functional.pad(value, (0, scales.shape[1] * BLOCK - value.shape[1]))
    scales.copy_(padded.view(len(value), -1, BLOCK).abs().amax(-1))
    shares = value / _spread(scales, value.shape[1]).clamp(min=torch.finfo(torch.float32).tiny)
    below = (torch.bucketize(shares, table, right=True) - 1).clamp(0, len(table) - 2)
    part = (shares - table[below]) / (table[below + 1] - table[below])
    short.copy_(below + (part * 2.0**24 > (chance >> 8)))


def sample(state: Mapping[str, Tensor], name: str, signed: bool, count: int) -> tuple[Tensor, Tensor]:
    """Returns at least `count` evenly spaced numbers of a moment, and how far rounding may have moved each."""
    stored = strided(state[name], count)
    if stored.dtype != torch.uint8:
        values = stored.double()
        return values, values.abs() * (2.0**-7 if stored.dtype == torch.bfloat16 else 0.0)
    places = strided(torch.arange(state[name].numel(), device=stored.device), count)
    width = flat(state[name]).shape[1]
    scales = state[name + SCALE][places // width, places % width // BLOCK].double()
    return table_of(signed, stored.device)[stored.int()].double() * scales, WIDEST * scales


def flat(tensor: Tensor) -> Tensor:
    """Returns a view with one dimension for the row."""
    return tensor.view(len(tensor), math.prod(tensor.shape[1:])) if tensor.dim() else tensor.view(1, 1)


def _spread(scales: Tensor, width: int) -> Tensor:
    """The scale of each number of a row."""
    return scales.repeat_interleave(BLOCK, 1)[:, :width]
