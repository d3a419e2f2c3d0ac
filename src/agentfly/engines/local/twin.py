"""A second body for the same weights: what the engine runs, so that the learner's model is never touched.

In: a transformers causal LM. Out: a copy of its module tree that holds the very same parameters and buffers, in evaluation
mode, with its own config, whose attention is ours. Weights that change in place are seen by both; train mode, gradient
checkpointing and the attention of the one are unknown to the other. Refuses a model that it does not compute exactly like the
model itself: every new twin reads a few tokens in two pieces and compares.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from ...errors import ConfigError
from .attention import NAME, Plan, attention
from .batch import forward
from .cache import SlotCache

KINDS = {"full_attention", "sliding_attention"}


def make_twin(model: Any) -> Any:
    """The same weights with our attention."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = type(model).__name__
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or KINDS)
    if not kinds <= KINDS:
        raise ConfigError(
            f"the local engine serves full and sliding attention only; {name} also has {', '.join(sorted(kinds - KINDS))}"
        )
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    twin = copy.deepcopy(model, shared)
    try:
        twin.set_attn_implementation(NAME)
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"the local engine cannot serve {name}: {error}") from error
    if twin.config._attn_implementation != NAME:
        raise ConfigError(f"the local engine cannot serve {name}: its attention cannot be replaced")
    if getattr(twin, "is_gradient_checkpointing", False):
        twin.gradient_checkpointing_disable()
    return twin.eval()


def same_tensors(model: Any, twin: Any) -> bool:
    """Whether both still hold the same tensors (a model that was moved or rebuilt no longer does)."""
    ours, theirs = [*twin.parameters(), *twin.buffers()], [*model.parameters(), *model.buffers()]
    return len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))


@torch.no_grad()
def check_twin(model: Any, twin: Any, device: torch.device) -> int:
    """Compare a few tokens, read in two pieces, with the model's own forward. Returns the cache's bytes per token."""
    size = model.config.get_text_config().vocab_size
    ids = [(7 * i + 3) % size for i in range(8)]
    cache = SlotCache(2, 8)
    training = model.training
    model.eval()
    try:
        want = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0, -1].float()
        forward(twin, ids[:5] + ids[:2], Plan(cache, [(1, 0, 5), (0, 0, 2)], device), [4])
        got = forward(twin, [ids[2], *ids[5:]], Plan(cache, [(0, 2, 1), (1, 5, 3)], device), [3])[0].float()
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
        name = type(model).__name__
        raise ConfigError(
            f"the local engine cannot serve {name}: its log-probs differ from the model's own by {gap:.3g} nats{hint}"
        )
    return cache.bytes_per_token
