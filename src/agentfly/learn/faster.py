"""Puts the learner's work on a GPU: the device context of its thread, and fused kernels in its packed replica.

The kernels are those of the sampler (`agentfly.kernels.layers`), with gradients: one launch forward and one backward where
transformers launches ten. A module is replaced only if a probe gives the same values and gradients.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ..kernels.replace import replace_modules


def at(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which this thread launches on the device: Triton uses the thread's current device, not the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def fuse_modules(replica: nn.Module, kernels: Any) -> dict[str, int]:
    """Replace the modules of a packed replica (see `packed`) that pass their probe. Returns how many of each kind."""
    return replace_modules(replica, kernels, gradients=True)
