"""The replica: a second module tree over the model's own parameters, which the engine runs instead of the model.

The replica shares every parameter and buffer with the learner's model, so weights updated in place are seen by both. It has its
own config, attention function and evaluation mode, so train mode, gradient checkpointing and the attention implementation of
the model do not reach it. Over pages on a GPU, `accelerate` also merges its linear layers and puts in fused kernels.

Every new replica is checked: it computes a few tokens in two pieces and must give the model's own log-probs. A model that
fails raises a ConfigError.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ...errors import ConfigError
from ...kernels import LayerKernels, layer_kernels
from ...kernels.merged_linear import merge_linears
from ...kernels.replace import replace_modules, restore
from ...kernels.replica import evaluating, share_tensors
from ...kernels.residual import fuse_residuals
from . import paged_attention, slot_attention
from .page_allocator import PAGE_SIZE
from .slot_attention import SlotCache, SlotMetadata, forward

KINDS = {"full_attention", "sliding_attention"}
_not_accelerated: weakref.WeakSet[Any] = weakref.WeakSet()


def make_replica(model: Any, *, on_pages: bool = False) -> Any:
    """A replica of the model whose attention reads the slot cache or, with `on_pages`, the paged cache."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = type(model).__name__
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or KINDS)
    if not kinds <= KINDS:
        raise ConfigError(
            f"the local engine serves full and sliding attention only; {name} also has {', '.join(sorted(kinds - KINDS))}"
        )
    ours = paged_attention if on_pages else slot_attention
    try:
        replica = share_tensors(model, ALL_ATTENTION_FUNCTIONS, ours.NAME, ours.attention)
    except (ConfigError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"the local engine cannot serve {name}: {error}") from error
    if getattr(replica, "is_gradient_checkpointing", False):
        replica.gradient_checkpointing_disable()
    kernels = layer_kernels(next(model.parameters()).device) if on_pages else None
    if kernels is not None:
        accelerate(model, replica, kernels, on_pages=True)
    return replica


@torch.no_grad()
def accelerate(model: Any, replica: Any, kernels: LayerKernels, *, on_pages: bool = False) -> dict[str, int]:
    """Merge linear layers and put in fused kernels. Returns how many of each kind; {} for a model that failed before.

    Of the model itself only the addresses of merged weights change. With gradients enabled, or for unsupported shapes, every
    replaced module runs its original forward. `on_pages`: the attention function rotates queries and keys.
    """
    if model in _not_accelerated:
        return {}
    merged = merge_linears(model, replica)
    replaced = replace_modules(replica, kernels, gradients=False, defers=on_pages)
    return {"merged": merged, **replaced, "residuals": fuse_residuals(replica)}


def restore_modules(model: torch.nn.Module, replica: torch.nn.Module) -> bool:
    """Undo `accelerate` and exclude the model from it. Returns False if there was nothing to undo."""
    _not_accelerated.add(model)
    restored = restore(replica)
    for module in restored:
        vars(module).pop("agentfly_merged", None)
    return bool(restored)


def same_tensors(model: torch.nn.Module, replica: torch.nn.Module) -> bool:
    """Whether both still hold the same tensors. Moving or rebuilding a model, or adding adapters, replaces tensors."""
    ours, theirs = [*replica.parameters(), *replica.buffers()], [*model.parameters(), *model.buffers()]
    return len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))


def addresses(model: torch.nn.Module) -> tuple[int, ...]:
    """The addresses of the weights, which CUDA graphs and merged linear layers depend on."""
    return tuple(tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()])


@torch.no_grad()
def check_replica(model: torch.nn.Module, replica: torch.nn.Module, device: torch.device) -> SlotCache:
    """Compare a few tokens, computed in two pieces, with the model's own forward. Returns the cache that was used."""
    cache = SlotCache(2, 8)

    def read(ids: list[int]) -> torch.Tensor:
        forward(replica, ids[:5] + ids[:2], SlotMetadata(cache, [(1, 0, 5), (0, 0, 2)], device), [4])
        return forward(replica, [ids[2], *ids[5:]], SlotMetadata(cache, [(0, 2, 1), (1, 5, 3)], device), [3])[0]

    _compare(model, read, device)
    return cache


@torch.no_grad()
def check_paged_replica(model: torch.nn.Module, replica: torch.nn.Module, like: SlotCache, device: torch.device) -> None:
    """The same for a replica over pages: two sequences are prefilled, one of them over two pages, and one token decoded.

    If the replica fails only because of its accelerated modules, they are restored, and the model is not accelerated again.
    """
    pools = paged_attention.KVPools(4, [like.layers[index] for index in sorted(like.layers)])

    def run(ids: list[int], positions: torch.Tensor, metadata: Any) -> torch.Tensor:
        line = torch.tensor([ids], device=device)
        out: torch.Tensor = replica(
            input_ids=line, position_ids=positions[None], use_cache=False, agentfly_metadata=metadata
        ).logits[0]
        return out

    def read(ids: list[int]) -> torch.Tensor:
        long = ids * 3
        for pages, text in (([3, 1], long[:-1]), ([2], ids[:2])):
            metadata = paged_attention.PrefillMetadata.of(pools, [(pages, 0, len(text))], device)
            run(text, metadata.positions, metadata)
        position = torch.tensor([len(long) - 1, 0], device=device)
        table = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32, device=device)
        places = torch.tensor([1 * PAGE_SIZE + (len(long) - 1) % PAGE_SIZE, 0], device=device)
        lengths = torch.tensor([len(long), 0], dtype=torch.int32, device=device)
        return run([long[-1], 0], position, paged_attention.DecodeMetadata(pools, table, places, lengths))[0]

    try:
        _compare(model, read, device, times=3)
    except ConfigError:
        if not restore_modules(model, replica):
            raise
        _compare(model, read, device, times=3)


def _compare(model: Any, read: Callable[[list[int]], torch.Tensor], device: torch.device, times: int = 1) -> None:
    """Compare the logits that `read` gives for the last of a few tokens with the model's own."""
    size = model.config.get_text_config().vocab_size
    ids = [(7 * i + 3) % size for i in range(8)]
    try:
        with evaluating(model):
            want = model(input_ids=torch.tensor([ids * times], device=device), use_cache=False).logits[0, -1].float()
            if not bool(want.isfinite().all()):
                half = next(model.parameters()).dtype == torch.float16
                hint = "float16 overflows above 65,504: use bfloat16" if half else "its weights are broken"
                raise ConfigError(f"{type(model).__name__} itself computes logits that are not finite: {hint}")
            got = read(ids).float()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"the local engine cannot serve {type(model).__name__}: {type(error).__name__}: {error}") from error
    exact = next(model.parameters()).dtype == torch.float32
    limit = 1e-3 if exact else 0.1
    gap = float((torch.log_softmax(got, -1) - torch.log_softmax(want, -1)).abs().max())
    if not gap <= limit * max(1.0, float(want.abs().max())):
        capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
        hint = "; load it with attn_implementation='eager'" if capped else ""
        name = type(model).__name__
        raise ConfigError(
            f"the local engine cannot serve {name}: its log-probs differ from the model's own by {gap:.3g} nats{hint}"
        )
