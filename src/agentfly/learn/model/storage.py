"""Saves and loads models and trainer state. State files hold tensors and plain values; loading runs no code from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ...engines.local.load import save_model
from ...errors import ConfigError
from .lora import FOLDER, is_adapted, load_adapter, save_adapter


def save_state(path: Path, state: dict[str, Any]) -> None:
    torch.save(state, path)


def load_state(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConfigError(f"{path} is not a readable trainer state: {error}") from error
    assert isinstance(state, dict)
    return state


def save_checkpoint_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a folder that `from_pretrained` loads, with adapters merged, and the adapters alone in a subfolder."""
    save_model(model, tokenizer, folder)
    if is_adapted(model):
        save_adapter(model, folder / FOLDER)


def load_weights(model: torch.nn.Module, checkpoint: Path) -> None:
    """Copy a checkpoint's weights into a model in place, so that an engine that shares the model sees them."""
    from safetensors.torch import load_file

    if is_adapted(model):
        load_adapter(model, checkpoint / FOLDER)
        return
    shards = sorted(checkpoint.glob("*.safetensors"))
    if not shards:
        raise ConfigError(f"{checkpoint} holds no .safetensors weights")
    weights: dict[str, torch.Tensor] = {}
    for shard in shards:
        weights.update(load_file(shard))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    if unexpected or set(missing) - tied:
        raise ConfigError(
            f"{checkpoint} does not fit the model: missing {sorted(set(missing) - tied)[:3]}, extra {unexpected[:3]}"
        )


def random_state() -> torch.Tensor:
    return torch.get_rng_state()


def restore_random_state(state: torch.Tensor) -> None:
    torch.set_rng_state(state)


def set_threads(count: int | None) -> None:
    """Set the number of torch threads; None keeps torch's choice."""
    if count is not None:
        torch.set_num_threads(count)


def seed_torch(seed: int, threads: int | None) -> None:
    """Seed torch and set its number of threads."""
    set_threads(threads)
    torch.manual_seed(seed)
