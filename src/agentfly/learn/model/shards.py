"""Modules over ranks with FSDP2: every layer is gathered for its pass and freed after it, gradients are averaged over ranks.

Everything that reads weights runs inside one method of the root module (`ShardedScorer`), where they are plain tensors: the
packed attention, the fused layers and the kernel of the output head are used as they are. Copies (critic, reference) and probes
are made before a module is sharded; afterwards it cannot be copied.

Trained parameters are float32 shards. The mixed precision policy casts them to the model's dtype for each pass, so no separate
master weights exist.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Container, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from ...engines.local.load import plain_tensors
from ...errors import ConfigError
from ..batching import MicroBatch
from .logprobs import EntropyMode, Scorer, Scores
from .lora import FOLDER as ADAPTER
from .lora import adapters, is_adapted
from .shard_files import PlainFiles
from .sharded import assign, layers_of, rows_of, whole

HALF = (torch.bfloat16, torch.float16)


def meta_copy(model: nn.Module) -> nn.Module:
    """Returns a copy of the module tree without the data of its parameters."""
    empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()}
    memo: dict[int, Any] = dict(empty)
    return copy.deepcopy(model, memo)


def shard_model(root: nn.Module, size: int, *, dtype: torch.dtype, reduce: torch.dtype = torch.float32) -> None:
    """Shard a module over `size` ranks in place: each layer for itself, then the rest.

    It computes in `dtype`; gradients are summed in `reduce`. Raises ConfigError if FSDP cannot shard the module.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # Values are a view of the value head's output, which nothing changes in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    half = dtype if dtype in HALF else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=reduce, cast_forward_inputs=False)
    mesh = init_device_mesh(next(root.parameters()).device.type, (size,))
    try:
        for module in [*layers_of(root), root]:
            _keep_full_precision(module)
            fully_shard(module, mesh=mesh, mp_policy=policy)
    except (AssertionError, NotImplementedError, ValueError) as error:
        raise ConfigError(f"{type(root).__name__} cannot be sharded over ranks: {error}; set learner.ranks = 1") from error


def _keep_full_precision(module: nn.Module) -> None:
    """Make the trained parameters float32, layer by layer, so that the whole model never exists in float32."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.dtype in HALF and not hasattr(parameter, "to_local"):
            parameter.data = parameter.data.float()


class ShardedScorer(Scorer):
    """A scorer whose model is sharded: its methods gather the weights. Every rank calls them equally often."""

    def __init__(self, scorer: Scorer) -> None:
        from torch.distributed.fsdp import register_fsdp_forward_method

        self.model, self.temperature, self.head, self._chunk = scorer.model, scorer.temperature, scorer.head, scorer._chunk
        model: Any = self.model
        model.agentfly_score, model.agentfly_hidden = self._score, super().hidden
        register_fsdp_forward_method(model, "agentfly_score")
        register_fsdp_forward_method(model, "agentfly_hidden")

    def _score(
        self, batch: MicroBatch, entropy: EntropyMode, keep_hidden: bool, drawn: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor | None, ...]:
        # FSDP finds the tensors whose gradients it waits for in a tuple, not in a dataclass.
        scores = super().__call__(batch, entropy=entropy, keep_hidden=keep_hidden, drawn=drawn)
        return scores.logprobs, scores.entropies, scores.hidden, scores.fit

    def __call__(
        self,
        batch: MicroBatch,
        *,
        entropy: EntropyMode = "none",
        keep_hidden: bool = False,
        drawn: tuple[Tensor, Tensor] | None = None,
    ) -> Scores:
        model: Any = self.model
        scores = Scores(*model.agentfly_score(batch, entropy, keep_hidden, drawn))
        free(model)
        return scores

    def hidden(self, batch: MicroBatch) -> Tensor:
        model: Any = self.model
        hidden: Tensor = model.agentfly_hidden(batch)
        free(model)
        return hidden


def free(module: object) -> None:
    """After a pass without gradients: free the gathered weights of a sharded module.

    In a pass with gradients the root keeps them for the backward pass.
    """
    if not torch.is_grad_enabled() and hasattr(module, "reshard"):
        module.reshard()


# ---- tensors ---------------------------------------------------------------------------------------------------------------


def load_tensors(module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Copy a saved state into a module. Each tensor is there, or is a function that reads rows of it.

    Raises ConfigError if the tensors are others.
    """
    held = module.state_dict()
    tensors = {name: tensor for name, tensor in saved.items() if isinstance(tensor, Tensor) and name in held}
    other = {name for name, tensor in tensors.items() if tensor.shape != held[name].shape}
    if other := other | (held.keys() ^ saved.keys()):
        raise ConfigError(f"the checkpoint has other tensors: {sorted(other)[:3]}")
    for name, tensor in held.items():
        assign(tensor, rows_of(saved[name]))


def load_plain_weights(model: nn.Module, checkpoint: Path, buffers: Container[str]) -> None:
    """Load the weights that one process has saved into a sharded model. `buffers` are the names of its saved buffers."""
    adapted = is_adapted(model)
    files = PlainFiles(checkpoint / ADAPTER if adapted else checkpoint)
    tensors: list[tuple[str, Tensor]]
    if adapted:
        tensors = [
            (f"base_model.model.{name}.lora_{part}.weight", matrix)
            for name, module in adapters(model)
            for part, matrix in (("A", module.lora_a), ("B", module.lora_b))
        ]
    else:
        tensors = [*model.named_parameters(), *((name, each) for name, each in model.named_buffers() if name in buffers)]
    for name, tensor in tensors:
        files.check(name, tuple(tensor.shape))
        assign(tensor, partial(files.rows, name))


@torch.no_grad()
def whole_weights(model: nn.Module, names: Iterable[str], dtype: torch.dtype, keep: bool) -> list[tuple[str, Tensor]]:
    """Returns full tensors of the equivalent model without adapters, in `dtype`; nothing without `keep`. A collective."""
    held = {name: (tensor, adapter) for name, tensor, adapter in plain_tensors(model)}
    weights: list[tuple[str, Tensor]] = []
    for name in names:
        part, layer = held[name]
        if layer is not None:
            base, a, b = (whole(tensor, dtype) for tensor in (layer.frozen, layer.lora_a, layer.lora_b))
            tensor = (base.float() + layer.scale * (b.float() @ a.float())).to(base.dtype)
        else:
            tensor = whole(part, dtype if part.dtype == torch.float32 and dtype in HALF else None)
        if keep:
            weights.append((name, tensor))
    return weights
