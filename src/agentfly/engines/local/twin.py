"""A second body for the same weights: what the engine runs, so that the learner's model is never touched.

In: a transformers causal LM. Out: a copy of its module tree that holds the very same parameters and buffers, in evaluation
mode, with its own config, whose attention is ours; over pages on a GPU, other parts of it are faster kernels too (`fuse`).
Weights that change in place are seen by both; train mode, gradient checkpointing and the attention of the one are unknown to
the other. Refuses a model that it does not compute exactly like the model itself: every new twin reads a few tokens in two
pieces and compares.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch

from ...errors import ConfigError
from . import attention, paged
from .attention import Plan
from .batch import forward
from .cache import SlotCache
from .fuse import fuse, unfuse
from .pages import PAGE

KINDS = {"full_attention", "sliding_attention"}


def make_twin(model: Any, *, on_pages: bool = False) -> Any:
    """The same weights with our attention, over slots or over pages."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = type(model).__name__
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or KINDS)
    if not kinds <= KINDS:
        raise ConfigError(
            f"the local engine serves full and sliding attention only; {name} also has {', '.join(sorted(kinds - KINDS))}"
        )
    ours = paged if on_pages else attention
    ALL_ATTENTION_FUNCTIONS.register(ours.NAME, ours.attention)
    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    twin = copy.deepcopy(model, shared)
    try:
        twin.set_attn_implementation(ours.NAME)
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"the local engine cannot serve {name}: {error}") from error
    if twin.config._attn_implementation != ours.NAME:
        raise ConfigError(f"the local engine cannot serve {name}: its attention cannot be replaced")
    if getattr(twin, "is_gradient_checkpointing", False):
        twin.gradient_checkpointing_disable()
    twin.eval()
    kernels = paged.fused_kernels(next(model.parameters()).device) if on_pages else None
    if kernels is not None:
        fuse(model, twin, kernels)
    return twin


def same_tensors(model: Any, twin: Any) -> bool:
    """Whether both still hold the same tensors (a model that was moved or rebuilt no longer does)."""
    ours, theirs = [*twin.parameters(), *twin.buffers()], [*model.parameters(), *model.buffers()]
    return len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))


def addresses(model: Any) -> tuple[int, ...]:
    """Where the weights lie: CUDA graphs, and products made one, hold on to it."""
    return tuple(tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()])


@torch.no_grad()
def check_twin(model: Any, twin: Any, device: torch.device) -> SlotCache:
    """Compare a few tokens, read in two pieces, with the model's own forward. Returns the cache they were read into."""
    cache = SlotCache(2, 8)

    def read(ids: list[int]) -> torch.Tensor:
        forward(twin, ids[:5] + ids[:2], Plan(cache, [(1, 0, 5), (0, 0, 2)], device), [4])
        return forward(twin, [ids[2], *ids[5:]], Plan(cache, [(0, 2, 1), (1, 5, 3)], device), [3])[0]

    _compare(model, read, device)
    return cache


@torch.no_grad()
def check_paged_twin(model: Any, twin: Any, like: SlotCache, device: torch.device) -> None:
    """The same for a twin over pages: two rows read, the one across two pages, and its last token decoded.

    A twin that only its faster parts keep from passing loses them, for good.
    """
    pools = paged.Pools(4, [like.layers[index] for index in sorted(like.layers)])

    def run(ids: list[int], positions: torch.Tensor, plan: Any) -> torch.Tensor:
        line = torch.tensor([ids], device=device)
        out: torch.Tensor = twin(input_ids=line, position_ids=positions[None], use_cache=False, agentfly_plan=plan).logits[0]
        return out

    def read(ids: list[int]) -> torch.Tensor:
        long = ids * 3
        for pages, text in (([3, 1], long[:-1]), ([2], ids[:2])):
            plan = paged.Reading.of(pools, [(pages, 0, len(text))], device)
            run(text, plan.positions, plan)
        position = torch.tensor([len(long) - 1, 0], device=device)
        table = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32, device=device)
        places = torch.tensor([1 * PAGE + (len(long) - 1) % PAGE, 0], device=device)
        lengths = torch.tensor([len(long), 0], dtype=torch.int32, device=device)
        return run([long[-1], 0], position, paged.Decoding(pools, table, places, lengths))[0]

    try:
        _compare(model, read, device, times=3)
    except ConfigError:
        if not unfuse(model, twin):
            raise
        _compare(model, read, device, times=3)


def _compare(model: Any, read: Callable[[list[int]], torch.Tensor], device: torch.device, times: int = 1) -> None:
    """What `read` says of the last of a few tokens against the model's own logits."""
    size = model.config.get_text_config().vocab_size
    ids = [(7 * i + 3) % size for i in range(8)]
    training = model.training
    model.eval()
    try:
        want = model(input_ids=torch.tensor([ids * times], device=device), use_cache=False).logits[0, -1].float()
        got = read(ids).float()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"the local engine cannot serve {type(model).__name__}: {type(error).__name__}: {error}") from error
    finally:
        model.train(training)
    exact = next(model.parameters()).dtype == torch.float32
    limit = 1e-3 if exact else 0.1
    gap = float((torch.log_softmax(got, -1) - torch.log_softmax(want, -1)).abs().max())
    if not gap <= limit * max(1.0, float(want.abs().max())):
        capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
        hint = "; load it with attn_implementation='eager'" if capped else ""
        if next(model.parameters()).dtype == torch.float16 and not math.isfinite(gap):
            hint = "; a float16 holds nothing above 65,504: take bfloat16"
        name = type(model).__name__
        raise ConfigError(
            f"the local engine cannot serve {name}: its log-probs differ from the model's own by {gap:.3g} nats{hint}"
        )
