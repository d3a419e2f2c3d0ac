"""Numbers computed in two ways: the tolerance follows from the number format, the length of the sums and the scale.

A sum of n numbers is exact to n roundings of the sum of their magnitudes, in whatever order a CPU and its threads add them.
Two computations of a tensor therefore differ by that share of its norm. A single element may be off by any share of itself.
"""

from __future__ import annotations

from typing import Any

import torch

TERMS = 1000  # the additions on the longest path from a weight of a tiny model of two or three layers to a gradient
ROUNDING = TERMS * torch.finfo(torch.float32).eps


def error_of_norm(actual: Any, expected: Any, scale: float = 0.0) -> float:
    """Returns the norm of the difference as a share of that of `expected`, or of that of numbers of size `scale` if larger."""
    got, want = (torch.as_tensor(each).detach().to("cpu", torch.float64) for each in (actual, expected))
    assert got.shape == want.shape, (got.shape, want.shape)
    assert torch.isfinite(want).all()
    if torch.equal(got, want):
        return 0.0
    size = max(float(want.norm()), scale * want.numel() ** 0.5)
    return float((got - want).norm()) / size if size else float("inf")


def assert_close_to_norm(actual: Any, expected: Any, *, terms: int = TERMS, scale: float = 0.0, of: Any = "") -> None:
    """Assert that two tensors, lists or numbers differ by at most `terms` roundings of the norm of `expected`.

    `scale` is the size of the numbers whose differences these are, where they may cancel. Numbers of Python count as float32.
    """
    formats = (each.dtype if isinstance(each, torch.Tensor) else torch.float32 for each in (actual, expected))
    eps = max(torch.finfo(each).eps for each in formats)
    error = error_of_norm(actual, expected, scale)
    assert error <= terms * eps, f"{of}: {error:.2g} of the norm, which is {error / eps:.0f} roundings and not at most {terms}"
