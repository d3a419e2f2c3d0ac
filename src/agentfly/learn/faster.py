"""Faster norms, gates and rotary positions for a packed twin.

In: a twin (see `packed`) on a GPU. Out: the same twin with other `forward`s on some of its modules, each one kernel forward and
one back (`layer_kernels`) where transformers launches ten. Only instances of the twin are changed, never a class and never the
model whose weights it shares. A part is replaced only after a probe on the device: on random numbers, with weights that require
gradients, it must give the values and all gradients of the module it replaces; every other part stays as it was. Without a GPU
or Triton, nothing is replaced.
"""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ..engines.local.parts import replace_parts


def at(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, this thread launches on the device: a thread begins on the first one, whatever device its tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def find_kernels(device: torch.device) -> Any:
    """The kernels for this device; None where there are none."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from . import layer_kernels

    return layer_kernels


def quicken(twin: nn.Module, kernels: Any) -> dict[str, int]:
    """Replace what can be; how many parts of each kind."""
    return replace_parts(twin, kernels, slopes=True)
