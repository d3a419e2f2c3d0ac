"""Marks of tests that need a package."""

from __future__ import annotations

import importlib.util

import numpy
import pytest

has_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def _interprets() -> bool:
    """Triton's interpreter makes a number of an array of one, which NumPy 2.4 and later refuse."""
    return importlib.util.find_spec("triton") is not None and tuple(map(int, numpy.__version__.split(".")[:2])) < (2, 4)


has_interpreter = pytest.mark.skipif(not _interprets(), reason="needs Triton, and for its interpreter NumPy before 2.4")
