"""Marks of tests that need a package or a device; the reason of a skipped test says how to get it."""

from __future__ import annotations

import importlib.util

import numpy
import pytest
import torch

_triton = importlib.util.find_spec("triton") is not None
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and a build of torch for it")
has_triton = pytest.mark.skipif(not _triton, reason="Triton is not installed: pip install triton, on Linux")


def _interprets() -> bool:
    """Triton's interpreter makes a number of an array of one, which NumPy 2.4 and later refuse."""
    return _triton and tuple(map(int, numpy.__version__.split(".")[:2])) < (2, 4)


has_interpreter = pytest.mark.skipif(
    not _interprets(), reason="no Triton interpreter: pip install triton 'numpy<2.4', on Linux"
)
