"""Triton kernels shared by the local engine and the learner, and the model surgery that puts them to use.

    layers            RMSNorm, rotary embedding, gated activation, with gradients        sampler and learner
    log_probs         log-probs and entropies of logits, and their gradient in place     learner
    torch_layers      RMSNorm, rotary embedding in torch with short backward passes      learner on a CPU (no Triton)
    decode            writing keys and values, drawing tokens                            sampler
    paged_attention   attention over a paged KV cache, decode and prefill                sampler
    replace           puts `layers` into a model's modules, after a numerical probe      sampler and learner (no Triton)
    merged_linear     makes linear layers of one input a single matrix product           sampler (no Triton)
    replica           a module tree over a model's tensors with another attention        sampler and learner (no Triton)

Import the Triton ones through `find_kernels`, which needs neither Triton nor a GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Literal

ALMOST_ONE = 1.0 - 2.0**-20
"""The largest uniform number that samplers use: in float32, u * total stays below total, so probability 0 is never drawn."""


def find_kernels(name: Literal["layers", "log_probs", "decode", "paged_attention"], device: Any) -> Any:
    """Return the kernel module for a torch device, or None unless it is a CUDA device and Triton is installed."""
    return _load(name) if device.type == "cuda" else None


def launching_on(device: Any) -> AbstractContextManager[Any]:
    """A context in which this thread launches on the device: Triton uses the thread's current device, not the tensors'."""
    if device.type != "cuda":
        return nullcontext()
    import torch

    return torch.cuda.device(device)


@cache
def _load(name: str) -> Any:
    return importlib.import_module(f".{name}", __name__) if importlib.util.find_spec("triton") is not None else None
