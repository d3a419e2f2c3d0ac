"""Running out of a device's memory, as one sentence that names the keys that help."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import ConfigError

ROOM = (
    "set agent.engine.kv_gib to less (the engine's cache takes 40 % of the free memory by default), "
    "train.gradient_checkpointing = true, train.max_tokens_per_batch to less, or lora.rank = 32 "
    "(`agentfly plan` computes what fits)"
)
"""What makes room on a device; the end of a sentence."""


@contextmanager
def naming_memory(what: str) -> Iterator[None]:
    """Turn an OutOfMemoryError of the body into a ConfigError that says what helps."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(out_of_memory(what, error)) from error


def out_of_memory(what: str, error: torch.OutOfMemoryError) -> str:
    return f"the device ran out of memory in {what}: {ROOM}. PyTorch said: {str(error).splitlines()[0][:200]}"
