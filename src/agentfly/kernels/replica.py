"""Replicas: a second module tree over a model's own tensors, whose layers call another attention function.

The replica sees weights that are updated in place, and has its own config and evaluation mode. The local engine runs one over
its KV cache, the learner one over packed rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import ConfigError

_UNKNOWN = {"s_aux": "attention sinks", "position_bias": "position biases", "softcap": "soft caps of its attention scores"}


def share_tensors(module: Any, registry: Any, name: str, attention: Callable[..., Any]) -> Any:
    """A replica in evaluation mode whose attention is `attention`, registered as `name` in transformers' registry.

    Raises ConfigError if the attention of the module cannot be replaced.
    """
    registry.register(name, attention)
    replica = copy.deepcopy(module, {id(tensor): tensor for tensor in [*module.parameters(), *module.buffers()]})
    replica.set_attn_implementation(name)
    if replica.config._attn_implementation != name:
        raise ConfigError(f"the attention of {type(module).__name__} cannot be replaced")
    return replica.eval()


def check_attention(module: torch.nn.Module, metadata: object, options: Mapping[str, Any], refusal: str) -> None:
    """Raise a ConfigError if a layer passes no metadata, or options that its attention would compute wrongly."""
    unknown = [words for name, words in _UNKNOWN.items() if options.get(name) is not None]
    if metadata is None or unknown:
        why = f"has {unknown[0]}" if unknown else "does not pass its keyword arguments on to attention"
        raise ConfigError(f"{type(module).__name__} {why}: {refusal}")


@contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode inside the context, and the mode from before after it."""
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)
