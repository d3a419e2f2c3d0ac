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
fused kernels; it shares the beginnings of any rows. `path` says what is in use and why. With `checkpoints`, each layer is
recomputed in the backward pass; transformers enables that in training mode only, so the layers are switched to training mode
around the run, and dropout stays off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ...engines.local.families.miniature import make_miniature, one_thread
from ...engines.local.families.support import PROVEN
from ...errors import ConfigError
from ...kernels import LayerKernels, layer_kernels, torch_layers
from ...kernels.replace import replace_modules, restore
from ...kernels.replica import evaluating
from ...kernels.rope import fix_rope
from ..batching import MicroBatch, Shape
from ..packed import PackedLayout, packed_replica, run_packed
from .graphs import MAX_TOKENS, Graphs

# Sharing saves (rows - 1) x prefix tokens and costs a second, short run: not worth it below this fraction of the batch.
WORTH_SHARING = 0.1
GRAPHS = "CUDA graphs"
_KINDS = {"norms": "RMSNorm", "gates": "gated MLP", "rotary": "rotary"}
_OTHER_MODEL = (AttributeError, ConfigError, IndexError, RuntimeError, TypeError, ValueError)
"""What a model of another kind raises in a probe."""


class Backbone:
    """A transformer without its output head."""

    def __init__(self, module: nn.Module, *, shares: bool | None = None) -> None:
        """`shares` skips the probe: for a copy of a backbone whose result is known."""
        fix_rope(module, None)
        self.module = module
        self.shares = _can_share(module) if shares is None else shares
        self.checkpoints = False
        self._replica: nn.Module | None = None
        self._graphs: Graphs | None = None
        self._shape: Shape = "padded"
        self._notes = ["padded rows", "common prefix computed once" if self.shares else "every row computed alone"]

    @property
    def packs(self) -> bool:
        """Whether packed batches can be run."""
        return self._replica is not None

    @property
    def path(self) -> str:
        """How batches are run, and why not faster."""
        return "; ".join([*self._notes, *(["layers recomputed"] if self.checkpoints else [])])

    @property
    def best_tokens(self) -> int | None:
        """The tokens of the longest line that runs as a CUDA graph; None if there are no graphs."""
        return MAX_TOKENS if self._graphs is not None and self._graphs.usable else None

    def settle(self, settled: bool) -> None:
        """Say whether lines have the sizes that they will have from now on. Graphs are captured only then."""
        if self._graphs is not None:
            self._graphs.settled = settled

    def pack(self) -> Shape:
        """Prepare for packed batches. Returns the best shape of batches that this model can run."""
        if self._replica is None:
            self._make_replica()
        return self._shape

    def _make_replica(self) -> None:
        """Make the replica for packed batches, with fused kernels if they pass; none if this model cannot be packed."""
        try:
            replica = packed_replica(self.module)
            probe = _Probe(self.module)
        except _OTHER_MODEL as error:
            self._notes.append(f"rows cannot be packed: {_first_line(error)}")
            return
        if probe.leaks(replica):
            self._notes.append("rows cannot be packed: a layer carries state from one row into the next")
            return
        if (away := _gap_of_family(self.module)) > 1e-3:
            self._notes.append(f"rows cannot be packed: a miniature with short windows differs by {away:.1e}")
            return
        gap = probe.gap(replica)
        if not gap <= probe.tolerance:
            self._notes.append(f"rows cannot be packed: {probe.reason(gap)}")
            return
        attention = probe.line.attention
        shared = probe.gap(replica, share=True)
        self._replica, self._shape = replica, "shared" if shared <= probe.tolerance else "packed"
        alone = "prompts shared" if self._shape == "shared" else f"prompts not shared: {probe.reason(shared)}"
        self._notes = ["packed rows", alone, f"attention: {attention}", _fuse(probe, replica)]
        if self.checkpoints:
            _enable_checkpoints(replica)
        elif attention == "torch flash":
            self._graphs = Graphs(replica)
            if self._graphs.usable:
                self._notes.append(f"{GRAPHS} for lines of up to {MAX_TOKENS:,} tokens")

    def keep_one_tree(self, owner: nn.Module, name: str, *, packed: bool) -> None:
        """Run the module or its replica only; `owner.name` becomes it. A sharded model swaps the tensors of one tree.

        Without packing every row is computed alone: FSDP's hooks see outputs, not the keys and values of a shared prefix.
        There are no graphs, which would bypass these hooks.
        """
        self._graphs = None
        self._notes = [note for note in self._notes if not note.startswith(GRAPHS)]
        if packed:
            assert self._replica is not None
            setattr(owner, name, self._replica)
            self.module = self._replica
        self.shares = False

    @property
    def can_checkpoint(self) -> bool:
        return bool(_layers(self.module))

    def checkpoint(self) -> None:
        """Keep no activations inside layers from now on. Raises ConfigError if the model does not support that."""
        for module in filter(None, (self.module, self._replica)):
            _enable_checkpoints(module)
        self.checkpoints, self._graphs = True, None

    def __call__(self, batch: MicroBatch) -> Tensor:
        """Hidden states [sampled tokens, width]."""
        if batch.layout is not None:
            assert self._replica is not None  # the caller packs only what `pack` allowed
            if self._graphs is not None and (hidden := self._graphs.run(batch.input_ids, batch.layout)) is not None:
                return hidden[0][batch.where]
            with self._recomputed(self._replica):
                return run_packed(self._replica, batch.input_ids, batch.layout)[0][batch.where]
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


def _fuse(probe: _Probe, replica: nn.Module) -> str:
    """Put fused kernels into the replica if they pass. Returns what is in use, or why not."""
    kernels = layer_kernels(probe.device)
    if kernels is None and probe.device.type == "cpu" and probe.want.dtype == torch.float32:
        kernels = cast(LayerKernels, torch_layers)  # without GATES it needs no `gated`
    if kernels is None:
        why = "Triton is not installed" if probe.device.type == "cuda" else f"on {probe.device.type}"
        return f"fused layers: off ({why})"
    calls = probe.record(replica)
    failed: dict[str, str] = {}
    done = replace_modules(replica, kernels, gradients=True, failed=failed)
    missing = set() if kernels.GATES else {"gates"}
    notes = [f"{_KINDS[kind]} off ({why})" for kind, why in failed.items() if not done[kind] and kind not in missing]
    if any(done.values()):
        whole, layer = probe.gap(replica), probe.layer_gap(calls)
        # Modules were probed one by one, and together they round once more. In a deep model in half precision the rounding of
        # early layers can grow to any size, so layers that agree on the same inputs are enough.
        if whole <= 2.0 * probe.tolerance or layer <= probe.layer_tolerance:
            names = ", ".join(_KINDS[kind] for kind, count in done.items() if count)
            return "; ".join([f"fused layers: {names}", *notes])
        restore(replica)
        notes = [f"together they differ by {whole:.1e} (limit {2.0 * probe.tolerance:.0e}), one layer by {layer:.1e}"]
    return f"fused layers: off ({'; '.join(notes) or 'none of a known kind'})"


@one_thread()
def _gap_of_family(module: object) -> float:
    """The probe's difference on a miniature whose windows are shorter than the probe; 0 if there is none or no need for it."""
    config = getattr(module, "config", None)
    if config is None or config.get_text_config().model_type in PROVEN:
        return 0.0
    try:
        small = make_miniature(config).base_model
        fix_rope(small, None)
        return _Probe(small).gap(packed_replica(small))
    except _OTHER_MODEL:
        return 0.0  # the probe of the model itself is left


class _Probe:
    """Two short rows with a common beginning, and the hidden states that the model computes for them."""

    def __init__(self, module: nn.Module) -> None:
        embeddings: Any = module.get_input_embeddings()  # type: ignore[operator]
        self.device = next(module.parameters()).device
        # Ids from all over the vocabulary: the first ones are special tokens, which training hardly moves in some models.
        ids = (1 + 7919 * torch.arange(9)) % embeddings.weight.shape[0]
        self.rows = torch.stack([ids[:6], torch.cat([ids[:3], ids[6:]])]).to(self.device)
        self.line = PackedLayout((6, 6), self.device)
        with torch.no_grad(), evaluating(module):
            self.want = _run(module, self.rows)
        self.tolerance, self.layer_tolerance, self.error = 1e-4, 1e-4, ""
        if self.want.dtype != torch.float32:
            # Rounding grows from layer to layer, in some models beyond any fixed limit: measure how a unit in the last place of
            # the embeddings moves the hidden states.
            self.tolerance, self.layer_tolerance = min(0.3, max(5e-2, 4.0 * self._rounding(module, embeddings))), 2e-2

    def _rounding(self, module: nn.Module, embeddings: nn.Module) -> float:
        try:
            with torch.no_grad(), evaluating(module):
                inputs = embeddings(self.rows)
                signs = 1.0 - 2.0 * (torch.arange(inputs.numel(), device=self.device).view_as(inputs) % 3 == 0)
                moved: Any = module(inputs_embeds=(inputs * (1.0 + 2.0**-8 * signs)).to(inputs.dtype), use_cache=False)
                return _difference(moved.last_hidden_state, self.want)
        except _OTHER_MODEL:
            return 0.0

    def gap(self, replica: nn.Module, *, share: bool = False) -> float:
        """The largest relative difference of a token's hidden state; infinite if the replica fails."""
        keys = [np.arange(6), np.array([0, 1, 2, 6, 7, 8])] if share else None
        layout = PackedLayout((6, 3), self.device, keys) if share else self.line
        line = torch.cat([self.rows[0], self.rows[1, 3:]]) if share else self.rows.flatten()
        want = torch.cat([self.want[0], self.want[1, 3:]]) if share else self.want.flatten(0, 1)
        try:
            with torch.no_grad():
                return _difference(run_packed(replica, line[None], layout)[0], want)
        except _OTHER_MODEL as error:
            self.error = _first_line(error)
            return float("inf")

    def leaks(self, replica: nn.Module) -> bool:
        """Whether a row of a packed line depends on the row before it, as with convolutions and recurrent state.

        Decided by the gradient, which is exactly zero without a path: a leak may be smaller than rounding in half precision.
        """
        inputs: list[Tensor] = []

        def embed(embeddings: nn.Module, args: object, out: Tensor) -> Tensor:
            inputs.append(out.detach().requires_grad_())
            return inputs[-1]

        hook = replica.get_input_embeddings().register_forward_hook(embed)  # type: ignore[operator]
        try:
            with torch.enable_grad():
                second = run_packed(replica, self.rows.flatten()[None], self.line)[0, 6:]
                push = torch.linspace(-1.0, 1.0, second.numel(), device=self.device).to(second.dtype).view_as(second)
                [pulled] = torch.autograd.grad(second, inputs[0], push)
        except _OTHER_MODEL as error:
            self.error = _first_line(error)
            return False  # the comparison that follows fails, too
        finally:
            hook.remove()
        return bool(pulled[0, :6].any())

    def reason(self, gap: float) -> str:
        return f"the probe differs by {gap:.1e} (limit {self.tolerance:.0e})" if gap < float("inf") else self.error

    def record(self, replica: nn.Module) -> list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Tensor]]:
        """Run the replica. Returns each of its layers with the arguments it got and what it returned."""
        calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Tensor]] = []

        def keep(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            calls.append((layer, args, kwargs, out[0] if isinstance(out, tuple) else out))

        hooks = [layer.register_forward_hook(keep, with_kwargs=True) for layer in _layers(replica)]
        try:
            self.gap(replica)
        finally:
            for hook in hooks:
                hook.remove()
        return calls

    def layer_gap(self, calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Tensor]]) -> float:
        """The largest relative difference of a layer's output, each layer run on the input that was recorded."""
        gaps = [float("inf")] if not calls else []
        try:
            with torch.no_grad():
                for layer, args, kwargs, want in calls:
                    out = layer(*args, **kwargs)
                    gaps.append(_difference(out[0] if isinstance(out, tuple) else out, want))
        except _OTHER_MODEL as error:
            self.error = _first_line(error)
            return float("inf")
        return max(gaps)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else type(error).__name__


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


def _alike(got: Tensor, want: Tensor) -> bool:
    """Whether every token has the same hidden state within rounding."""
    return _difference(got, want) <= (1e-4 if want.dtype == torch.float32 else 5e-2)


def _difference(got: Tensor, want: Tensor) -> float:
    """The largest relative difference of a token's hidden state.

    Compares norms of differences: in a wide and deep model single numbers differ widely while the vector hardly moves.
    """
    got, want = got.float(), want.float()
    relative = (got - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-30)
    return float(relative.nan_to_num(nan=float("inf")).max())
