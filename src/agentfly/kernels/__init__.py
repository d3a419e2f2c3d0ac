"""Triton kernels shared by the local engine and the learner, and the model surgery that puts them to use.

    layers            RMSNorm, rotary embedding, gated activation, with gradients        sampler and learner
    log_probs         log-probs and entropies of logits, and their gradient in place     learner
    torch_layers      RMSNorm, rotary embedding in torch with short backward passes      learner on a CPU (no Triton)
    decode            writing keys and values, drawing tokens                            sampler
    paged_attention   attention over a paged KV cache, decode and prefill                sampler
    replace           puts `layers` into a model's modules, after a numerical probe      sampler and learner (no Triton)
    merged_linear     makes linear layers of one input a single matrix product           sampler (no Triton)
    lent_memory       GPU memory that is given back and taken again at its addresses    sampler (no Triton)
    replica           a module tree over a model's tensors with another attention        sampler and learner (no Triton)

Import the Triton ones late, where `has_kernels` is true: then Triton is installed.
"""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ALMOST_ONE = 1.0 - 2.0**-20
"""The largest uniform number that samplers use: in float32, u * total stays below total, so probability 0 is never drawn."""


class LayerKernels(Protocol):
    """The functions of `layers` and `torch_layers`; `NORMS` and `GATES` are the kinds that they compute."""

    NORMS: tuple[str, ...]
    GATES: tuple[str, ...]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, kind: str = ...) -> Tensor: ...

    def gated(self, gate: Tensor, up: Tensor, kind: str = ...) -> Tensor: ...

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]: ...


def has_kernels(device: torch.device) -> bool:
    """Whether the Triton kernels run there: on a CUDA device, if Triton is installed."""
    return device.type == "cuda" and _has_triton()


def layer_kernels(device: torch.device) -> LayerKernels | None:
    """The module `layers`, or None where it does not run."""
    if not has_kernels(device):
        return None
    from . import layers

    return layers


def launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which this thread launches on the device: Triton uses the thread's current device, not the tensors'."""
    if device.type != "cuda":
        return nullcontext()
    import torch

    return torch.cuda.device(device)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
