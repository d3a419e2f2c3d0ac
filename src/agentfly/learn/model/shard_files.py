"""Shards on disk: each rank writes one safetensors file, any number of ranks reads them.

    shards/rank-0-of-2.safetensors     rows 0 to 3 of every sharded tensor, and the place of these rows in its header
    shards/rank-1-of-2.safetensors     rows 4 to 7

A tensor is named by its path in the learner's state ("optimizer/adam/state/3/exp_avg"); the state itself, in the trainer's
file, has {"shard": path} in its place. Reading takes only the rows that are wanted, and runs no code from the files.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import ConfigError

FOLDER, STATE = "shards", "trainer.pt"
"""The names in a checkpoint of the folder with the shards and of the trainer's state."""
POLL_S = 0.05
_NAME = re.compile(r"rank-(\d+)-of-(\d+)\.safetensors")


class Shard(NamedTuple):
    """The rows of a tensor that one rank holds, from row `first` on."""

    rows: Tensor
    first: int
    shape: tuple[int, ...]


def file_name(rank: int, size: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank}-of-{size}.safetensors"


def write_shards(path: Path, shards: Mapping[str, Shard]) -> None:
    """Write one rank's file; it has its name only when it is complete. Raises OSError."""
    from safetensors.torch import save_file

    places = {name: [shard.first, *shard.shape] for name, shard in shards.items()}
    partial = path.with_suffix(".writing")
    tensors = {name: shard.rows.contiguous() for name, shard in shards.items() if shard.rows.numel()}
    save_file(tensors, partial, metadata={"places": json.dumps(places)})
    os.replace(partial, path)


def write_for_rank_0(folder: Path, rank: int, size: int, shards: Mapping[str, Shard]) -> None:
    """Write a rank's file where rank 0 collects it. If that fails, the reason takes the place of the file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_shards(folder / file_name(rank, size), shards)
    except Exception as error:  # noqa: BLE001  reported by rank 0
        reason = folder / f"{file_name(rank, size)}.error"
        try:
            reason.write_text(f"rank {rank}: {error}", encoding="utf-8")
        except OSError:
            return  # rank 0 waits until its time limit and reports that


def collect_shards(source: Path, folder: Path, size: int, timeout_s: float) -> None:
    """On rank 0: move the files of the other ranks into a checkpoint. Raises OSError if one does not come."""
    deadline = time.monotonic() + timeout_s
    for rank in range(1, size):
        name = file_name(rank, size)
        while not (source / name).exists():
            if (failed := source / f"{name}.error").exists():
                raise OSError(failed.read_text(encoding="utf-8"))
            if time.monotonic() > deadline:
                raise OSError(
                    f"the shard of rank {rank} did not appear in {source} within {timeout_s:g} s: the run's folder must be "
                    "shared by all machines"
                )
            time.sleep(POLL_S)
        os.replace(source / name, folder / name)


class ShardFiles:
    """The files of all ranks of one checkpoint. Raises ConfigError if one is missing."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        matches = {path: _NAME.fullmatch(path.name) for path in sorted(folder.glob("*.safetensors"))}
        sizes = {int(name[2]) for name in matches.values() if name is not None}
        if len(sizes) != 1 or len(matches) != max(sizes):
            raise ConfigError(f"{folder} does not hold one file for each rank: the checkpoint is not complete")
        self._files: list[Any] = []
        self._parts: dict[str, list[tuple[int, int, int]]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for number, path in enumerate(matches):
            file: Any = safe_open(path, framework="pt")
            self._files.append(file)
            held = set(file.keys())
            for name, (first, *shape) in json.loads(file.metadata()["places"]).items():
                self._shapes[name] = tuple(shape)
                if name in held:
                    count = int(file.get_slice(name).get_shape()[0])
                    self._parts.setdefault(name, []).append((first, first + count, number))

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the whole tensor. Raises ConfigError if there is no such tensor."""
        if name not in self._shapes:
            raise ConfigError(f"the checkpoint lacks {name}")
        return self._shapes[name]

    def rows(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Returns rows of a tensor, by default all."""
        shape = self.shape(name)
        last = shape[0] if last is None else last
        pieces = [
            self._files[file].get_slice(name)[max(first, a) - a : min(last, b) - a]
            for a, b, file in sorted(self._parts.get(name, []))
            if a < last and b > first
        ]
        if not pieces:
            return torch.zeros(0, *shape[1:])
        tensor = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        if len(tensor) != last - first:
            raise ConfigError(f"the checkpoint holds {len(tensor)} of the {last - first} rows of {name}")
        return tensor


def mark(tree: object, path: str = "") -> Any:
    """Returns a nested state with {"shard": path} for every sharded tensor."""
    if hasattr(tree, "to_local"):
        return {"shard": path}
    if isinstance(tree, Mapping):
        return {name: mark(item, f"{path}/{name}" if path else str(name)) for name, item in tree.items()}
    if isinstance(tree, list):
        return [mark(item, f"{path}/{place}") for place, item in enumerate(tree)]
    return tree


def sharded(tree: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the sharded tensors of a nested state with their paths."""
    if hasattr(tree, "to_local"):
        yield path, tree
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    for name, item in items:
        yield from sharded(item, f"{path}/{name}" if path else str(name))


def fill(tree: object, read: Callable[[str], Any]) -> Any:
    """Returns a state of `mark` with `read(path)` for every sharded tensor."""
    if isinstance(tree, Mapping):
        if set(tree) == {"shard"}:
            return read(tree["shard"])
        return {name: fill(item, read) for name, item in tree.items()}
    if isinstance(tree, list):
        return [fill(item, read) for item in tree]
    return tree


class PlainFiles:
    """The safetensors files that one process has saved: rows of whole tensors. Raises ConfigError if there are none."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        files: list[Any] = [safe_open(path, framework="pt") for path in sorted(folder.glob("*.safetensors"))]
        if not files:
            raise ConfigError(f"{folder} holds no .safetensors weights: resume it with the [lora] it was saved with")
        self._folder = folder
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118  a safetensors file

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ConfigError if there is no such tensor of this shape."""
        if name not in self._files:
            raise ConfigError(f"{self._folder} does not fit the model: {name} is missing")
        saved = tuple(self._files[name].get_slice(name).get_shape())
        if saved != shape:
            raise ConfigError(f"{self._folder} does not fit the model: {name} has the shape {saved} instead of {shape}")

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Returns rows of a tensor."""
        tensor: Tensor = self._files[name].get_slice(name)[first:last]
        return tensor
