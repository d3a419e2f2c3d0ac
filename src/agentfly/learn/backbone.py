"""The forward pass of a model up to its last hidden states, with the common prefix of a batch computed once.

Rows of one batch mostly share a prefix: the system message with its tools and, between siblings, the whole prompt. The prefix
is run once as one row, and the rest of every row attends to its keys and values. Gradients flow back through them, so values
and gradients are those of the plain run.

    P P P A A        P P P            P P P run once
    P P P B B B  ->        A A .      A, B and C attend to it
    P P P C                B B B
                           C . .

A probe, once per model, decides whether this is used: a model whose cache is not a list of keys and values per layer (recurrent
state, sliding windows) is run plainly. A packed batch (see `packed`) is run by a replica with another attention and, on a GPU,
fused kernels. With `checkpoints`, each layer is recomputed in the backward pass; transformers enables that in training mode
only, so the layers are switched to training mode around the run, and dropout stays off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..kernels import find_kernels
from ..kernels.replace import replace_modules, restore
from ..kernels.replica import evaluating
from .batching import MicroBatch
from .packed import packed_replica, run_packed

# Sharing saves (rows - 1) x prefix tokens and costs a second, short run: not worth it below this fraction of the batch.
WORTH_SHARING = 0.1


class Backbone:
    """A transformer without its output head."""

    def __init__(self, module: nn.Module, *, shares: bool | None = None) -> None:
        """`shares` skips the probe: for a copy of a backbone whose result is known."""
        self.module = module
        self.shares = _can_share(module) if shares is None else shares
        self.checkpoints = False
        self._replica: nn.Module | None = None

    @property
    def packs(self) -> bool:
        """Whether packed batches can be run."""
        return self._replica is not None

    def pack(self) -> bool:
        """Prepare for packed batches. Returns False if this model cannot run them."""
        if self._replica is None:
            self._replica = _make_replica(self.module)
            if self._replica is not None and self.checkpoints:
                _enable_checkpoints(self._replica)
        return self._replica is not None

    def checkpoint(self) -> None:
        """Keep no activations inside layers from now on. Raises ConfigError if the model does not support that."""
        for module in filter(None, (self.module, self._replica)):
            _enable_checkpoints(module)
        self.checkpoints = True

    def __call__(self, batch: MicroBatch) -> Tensor:
        """Hidden states [sampled tokens, width]."""
        if batch.lengths is not None:
            assert self._replica is not None  # the caller packs only after `pack` returned True
            with self._recomputed(self._replica):
                return run_packed(self._replica, batch.input_ids, batch.lengths)[0][batch.where]
        if self.checkpoints and torch.is_grad_enabled():
            with self._recomputed(self.module):
                return _run(self.module, batch.input_ids).flatten(0, 1)[batch.where]
        rows, width = batch.input_ids.shape
        if self.shares and (rows - 1) * batch.prefix > WORTH_SHARING * rows * width:
            hidden = _run_shared(self.module, batch.input_ids, batch.prefix)
            where = batch.where - (batch.where // width + 1) * batch.prefix
        else:
            hidden, where = _run(self.module, batch.input_ids), batch.where
        return hidden.flatten(0, 1)[where]

    @contextmanager
    def _recomputed(self, module: nn.Module) -> Iterator[None]:
        layers = _layers(module) if self.checkpoints and torch.is_grad_enabled() else []
        for layer in layers:
            layer.training = True
        try:
            yield
        finally:
            for layer in layers:
                layer.training = False


def _layers(module: nn.Module) -> list[nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]


def _enable_checkpoints(module: nn.Module) -> None:
    if not _layers(module):
        raise ConfigError(
            f"{type(module).__name__} does not support gradient checkpointing: remove train.gradient_checkpointing"
        )
    enable: Any = module.gradient_checkpointing_enable
    enable(gradient_checkpointing_kwargs={"use_reentrant": False, "preserve_rng_state": False})


def _make_replica(module: nn.Module) -> nn.Module | None:
    """A replica for packed batches, with fused kernels if they pass; None if this model cannot be packed."""
    try:
        replica = packed_replica(module)
    except (AttributeError, ConfigError, RuntimeError, TypeError, ValueError):  # another kind of model
        return None
    if not _runs_packed(module, replica):
        return None
    kernels = find_kernels("layers", next(module.parameters()).device)
    fused = kernels is not None and any(replace_modules(replica, kernels, gradients=True).values())
    if fused and not _runs_packed(module, replica, room=2.0):
        restore(replica)
    return replica


def _runs_packed(module: nn.Module, replica: nn.Module, *, room: float = 1.0) -> bool:
    """Whether the replica, given two short rows as one line, computes the hidden states of the model.

    `room` widens the tolerance: fused modules have been probed one by one, and together they round once more.
    """
    parameter = next(module.parameters())
    ids = torch.tensor([[1, 2, 3, 4, 5], [1, 6, 7, 0, 0]], device=parameter.device)
    try:
        with torch.no_grad(), evaluating(module):
            packed = run_packed(replica, torch.cat([ids[0], ids[1, :3]])[None], (5, 3))[0]
            plain = _run(module, ids)
    except (AttributeError, ConfigError, IndexError, RuntimeError, TypeError, ValueError):  # another kind of model
        return False
    return _alike(packed, torch.cat([plain[0], plain[1, :3]]), room)


def _run(module: nn.Module, input_ids: Tensor) -> Tensor:
    output: Any = module(input_ids=input_ids, use_cache=False)
    hidden: Tensor = output.last_hidden_state
    return hidden


def _run_shared(module: nn.Module, input_ids: Tensor, prefix: int) -> Tensor:
    """Hidden states of the tokens after the prefix."""
    first: Any = module(input_ids=input_ids[:1, :prefix], use_cache=True)
    cache = first.past_key_values
    cache.batch_repeat_interleave(len(input_ids))
    rest: Any = module(input_ids=input_ids[:, prefix:], past_key_values=cache, use_cache=True)
    hidden: Tensor = rest.last_hidden_state
    return hidden


def _can_share(module: nn.Module) -> bool:
    """Whether, on two short rows with a common prefix, the cache carries gradients and the hidden states are the same."""
    parameter = next(module.parameters())
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 6]], device=parameter.device)
    try:
        with torch.enable_grad(), evaluating(module):
            probe: Any = module(input_ids=ids[:1, :2], use_cache=True)
        layers = getattr(probe.past_key_values, "layers", None)
        if not layers or any(type(layer).__name__ != "DynamicLayer" for layer in layers):
            return False
        if any(p.requires_grad for p in module.parameters()) and not layers[-1].keys.requires_grad:
            return False
        with torch.no_grad(), evaluating(module):
            shared, plain = _run_shared(module, ids, 2), _run(module, ids)[:, 2:]
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # another kind of model: run it plainly
        return False
    return _alike(shared, plain)


def _alike(got: Tensor, want: Tensor, room: float = 1.0) -> bool:
    """Whether every token has the same hidden state within rounding.

    Compares norms of differences: in a wide and deep model single numbers differ widely while the vector hardly moves.
    """
    tolerance = room * (1e-4 if want.dtype == torch.float32 else 5e-2)
    got, want = got.float(), want.float()
    return bool(((got - want).norm(dim=-1) <= tolerance * want.norm(dim=-1)).all())
