"""Saves and loads models and trainer state. State files hold tensors and plain values; loading runs no code from them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...engines.local.load import merged_weights, save_model
from ...errors import ConfigError
from .lora import FOLDER, adapter_weights, is_adapted, load_adapter, save_adapter


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write a state. Raises OSError if the file cannot be written."""
    with path.open("wb") as file, _os_errors():
        torch.save(state, file)


def load_state(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    """Read a state. With `mapped`, tensors are read when they are used."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{path} is not a readable trainer state: {reason}") from error
    if not isinstance(state, dict):
        raise ConfigError(f"{path} is not a trainer state but a {type(state).__name__}")
    return state


def checkpoint_weights(model: Any) -> dict[str, Any]:
    """Returns what `save_checkpoint_model` writes of a model's weights. The tensors are the model's own, not copies."""
    return {"model": merged_weights(model), "adapter": adapter_weights(model) if is_adapted(model) else {}}


def save_checkpoint_model(model: Any, tokenizer: object, folder: Path, weights: Mapping[str, Any] | None = None) -> None:
    """Write a folder that `from_pretrained` loads, with adapters merged, and the adapters alone in a subfolder.

    `weights` are those of `checkpoint_weights`, by default of the model as it is. Without a tokenizer, none is written.
    Raises OSError if a file cannot be written.
    """
    weights = checkpoint_weights(model) if weights is None else weights
    with _os_errors():
        save_model(model, tokenizer, folder, weights["model"])
        if weights["adapter"]:
            save_adapter(model, folder / FOLDER, weights["adapter"])


MAX_BUCKET = 2**30
"""Bytes of the weights that are handed over at a time."""


def in_buckets(sizes: list[tuple[str, int]]) -> list[list[str]]:
    """Divide names in order, so that the sizes of each part add up to at most MAX_BUCKET, or it is one name."""
    parts: list[list[str]] = []
    total = 0
    for name, size in sizes:
        if not parts or total + size > MAX_BUCKET:
            parts.append([])
            total = 0
        parts[-1].append(name)
        total += size
    return parts


def load_learner_state(checkpoint: Path, state: Mapping[str, Any], modules: Mapping[str, torch.nn.Module]) -> Mapping[str, Any]:
    """Returns the learner's state for one process. If several ranks saved it, their shards are joined.

    `modules` are those with an optimizer, by the path of their parameters in the shards.
    """
    from .shard_files import FOLDER as SHARDS
    from .shard_files import ShardFiles, fill

    if not state.get("ranks"):
        return state
    files = ShardFiles(checkpoint / SHARDS)
    tree = dict(fill(state, lambda path: files.rows(path)))
    for optimizer, names in (("optimizer", ("policy", "modules/value_head")), ("critic_optimizer", ("modules/critic",))):
        if tree[optimizer] is not None:  # ranks keep float32 parameters, one process float32 masters of shorter ones
            paths = [f"{name}/{path}" for name in names if name in modules for path in _half_parameters(modules[name])]
            tree[optimizer] = {**tree[optimizer], "masters": [files.rows(path) for path in paths]}
    return tree


def _half_parameters(module: torch.nn.Module) -> list[str]:
    return [name for name, p in module.named_parameters() if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)]


@torch.no_grad()
def copy_to_memory(tree: object, copies: dict[Any, torch.Tensor] | None = None) -> Any:
    """Returns nested dicts and lists with their tensors copied to the CPU's memory. Tied tensors stay tied."""
    copies = {} if copies is None else copies
    if isinstance(tree, torch.Tensor):
        key = (tree.device, tree.data_ptr(), tree.dtype, tree.shape, tree.stride())
        if key not in copies or tree.numel() == 0:
            copies[key] = tree.detach().to("cpu", copy=True)
        return copies[key]
    if isinstance(tree, Mapping):
        return {name: copy_to_memory(item, copies) for name, item in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([copy_to_memory(item, copies) for item in tree])
    return tree


def num_bytes(tree: object) -> int:
    """Returns the size of all tensors in nested dicts and lists."""
    if isinstance(tree, torch.Tensor):
        return tree.numel() * tree.element_size()
    items = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list | tuple) else ()
    return sum(map(num_bytes, items))


@contextmanager
def _os_errors() -> Iterator[None]:
    """Raise what safetensors and torch raise on a full disk as the OSError that caused it."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if match := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(match[1]), os.strerror(int(match[1]))) from error
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


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
    try:
        missing, unexpected = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:  # a tensor of another shape
        reason = str(error).splitlines()[-1].strip()
        raise ConfigError(f"{checkpoint} does not fit the model: {reason}") from error
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


def computes_in_full(model: Any) -> bool:
    """Whether the weights are float32 and matrices are multiplied in float32, too."""
    return next(model.parameters()).dtype.itemsize >= 4 and torch.get_float32_matmul_precision() == "highest"


def seed_torch(seed: int, threads: int | None) -> int:
    """Seed torch and set its number of threads. Returns the number."""
    set_threads(threads)
    torch.manual_seed(seed)
    return torch.get_num_threads()
