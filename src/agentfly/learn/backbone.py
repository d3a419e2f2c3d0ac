"""The run of a model up to its last hidden states, with what rows have in common run once.

In: a micro batch. Out: hidden states at the positions that predict a sampled token. Rows of one batch mostly begin alike: the
system message with its tools, and between siblings the whole prompt. That prefix is run once, as one row, and the rest of every
row attends to its keys and values; gradients flow back through them, so values and gradients are those of the plain run.

    P P P A A        P P P            P P P run once
    P P P B B B  ->        A A .      A, B and C attend to it
    P P P C                B B B
                           C . .

Used only where a probe has shown, once per model, that the two runs agree: a model whose cache is not a plain list of keys and
values per layer (recurrent state, sliding windows) is run plainly. A batch that is packed (see `packed`) is read by a twin,
after a probe of its own, and on a GPU by a twin with faster parts (`faster`). Where activations are not kept (`checkpoints`),
each layer is run again in the backward pass; the layers' switch for that is one of training mode, so it is set around the run,
and dropout stays off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..engines.local.swap import restore
from ..errors import ConfigError
from .batching import MicroBatch
from .faster import find_kernels, quicken
from .packed import packed_twin, run_packed

# Sharing spares (rows - 1) x prefix tokens and costs a second, short run: not worth it below this share of the batch.
WORTH_SHARING = 0.1


class Backbone:
    """A transformer without its output head."""

    def __init__(self, module: nn.Module, *, shares: bool | None = None) -> None:
        """`shares` skips the probe, for a copy of a backbone that has passed or failed it."""
        self.module = module
        self.shares = _can_share(module) if shares is None else shares
        self.checkpoints = False
        self._twin: nn.Module | None = None

    @property
    def packs(self) -> bool:
        """Whether it is ready for packed batches."""
        return self._twin is not None

    def pack(self) -> bool:
        """Make ready for packed batches; False where this model cannot read them."""
        if self._twin is None:
            self._twin = _make_twin(self.module)
            if self._twin is not None and self.checkpoints:
                _enable_checkpoints(self._twin)
        return self._twin is not None

    def checkpoint(self) -> None:
        """From now on keep no activations inside layers. Refuses a model whose layers cannot be run again."""
        for module in filter(None, (self.module, self._twin)):
            _enable_checkpoints(module)
        self.checkpoints = True

    def __call__(self, batch: MicroBatch) -> Tensor:
        """Hidden states [sampled tokens, width]."""
        if batch.lengths is not None:
            assert self._twin is not None  # whoever packs has asked
            with self._layers_again(self._twin):
                return run_packed(self._twin, batch.input_ids, batch.lengths)[0][batch.where]
        if self.checkpoints and torch.is_grad_enabled():
            with self._layers_again(self.module):
                return _run(self.module, batch.input_ids).flatten(0, 1)[batch.where]
        rows, width = batch.input_ids.shape
        if self.shares and (rows - 1) * batch.prefix > WORTH_SHARING * rows * width:
            hidden = _run_shared(self.module, batch.input_ids, batch.prefix)
            where = batch.where - (batch.where // width + 1) * batch.prefix
        else:
            hidden, where = _run(self.module, batch.input_ids), batch.where
        return hidden.flatten(0, 1)[where]

    @contextmanager
    def _layers_again(self, module: nn.Module) -> Iterator[None]:
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
        raise ConfigError(f"{type(module).__name__} cannot run its layers again: remove train.gradient_checkpointing")
    enable: Any = module.gradient_checkpointing_enable
    enable(gradient_checkpointing_kwargs={"use_reentrant": False, "preserve_rng_state": False})


def _make_twin(module: nn.Module) -> nn.Module | None:
    """A twin for packed lines, faster where it can be (see `faster`); None where this model cannot be packed."""
    try:
        twin = packed_twin(module)
    except (AttributeError, ConfigError, RuntimeError, TypeError, ValueError):  # not this kind of model
        return None
    if not _reads_lines(module, twin):
        return None
    kernels = find_kernels(next(module.parameters()).device)
    if kernels is not None and any(quicken(twin, kernels).values()) and not _reads_lines(module, twin, room=2.0):
        restore(twin)
    return twin


def _reads_lines(module: nn.Module, twin: nn.Module, *, room: float = 1.0) -> bool:
    """On two short rows: does the twin, which reads them as one line, say what the model says of each?

    `room` widens what may be rounding: faster parts have each been proven, and together they round once more.
    """
    parameter = next(module.parameters())
    ids = torch.tensor([[1, 2, 3, 4, 5], [1, 6, 7, 0, 0]], device=parameter.device)
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            packed = run_packed(twin, torch.cat([ids[0], ids[1, :3]])[None], (5, 3))[0]
            plain = _run(module, ids)
    except (AttributeError, ConfigError, IndexError, RuntimeError, TypeError, ValueError):  # not this kind of model
        return False
    finally:
        module.train(was_training)
    return _alike(packed, torch.cat([plain[0], plain[1, :3]]), room)


def _run(module: nn.Module, input_ids: Tensor) -> Tensor:
    output: Any = module(input_ids=input_ids, use_cache=False)
    hidden: Tensor = output.last_hidden_state
    return hidden


def _run_shared(module: nn.Module, input_ids: Tensor, prefix: int) -> Tensor:
    """Hidden states of what follows the prefix."""
    first: Any = module(input_ids=input_ids[:1, :prefix], use_cache=True)
    cache = first.past_key_values
    cache.batch_repeat_interleave(len(input_ids))
    rest: Any = module(input_ids=input_ids[:, prefix:], past_key_values=cache, use_cache=True)
    hidden: Tensor = rest.last_hidden_state
    return hidden


def _can_share(module: nn.Module) -> bool:
    """On two short rows that begin alike: is the cache plain, does it carry gradients, and are the hidden states the same?"""
    parameter = next(module.parameters())
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 6]], device=parameter.device)
    was_training = module.training
    module.eval()
    try:
        with torch.enable_grad():
            probe: Any = module(input_ids=ids[:1, :2], use_cache=True)
        layers = getattr(probe.past_key_values, "layers", None)
        if not layers or any(type(layer).__name__ != "DynamicLayer" for layer in layers):
            return False
        if any(p.requires_grad for p in module.parameters()) and not layers[-1].keys.requires_grad:
            return False
        with torch.no_grad():
            shared, plain = _run_shared(module, ids, 2), _run(module, ids)[:, 2:]
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # not this kind of model: run it plainly
        return False
    finally:
        module.train(was_training)
    return _alike(shared, plain)


def _alike(got: Tensor, want: Tensor, room: float = 1.0) -> bool:
    """Whether every token has the same hidden state, as far as rounding allows: by its length, because in a wide and deep model
    single numbers stray far where the whole hardly moves."""
    tolerance = room * (1e-4 if want.dtype == torch.float32 else 5e-2)
    got, want = got.float(), want.float()
    return bool(((got - want).norm(dim=-1) <= tolerance * want.norm(dim=-1)).all())
