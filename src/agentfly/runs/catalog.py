"""The runs of a folder, each with what a list shows: state, model, world, algorithm, progress and results."""

from __future__ import annotations

import contextlib
import math
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import AgentFlyError
from .lock import RunState
from .query import RunReader

SPARK_POINTS = 60
"""Points of the reward curve in a summary."""
MAX_DEPTH = 3
"""Folders below the runs folder that are searched: a run may lie in a folder of its experiment."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run in a list. `name` is its path below the folder that was searched, with forward slashes.

    `success` are the first, the best and the last validation/success; `unscored` is the largest share of chains without a score
    in one validation. `spark` is the curve of reward/mean, thinned. `problem` says why a run cannot be read; the other values
    are then empty.
    """

    name: str
    path: Path
    state: RunState | None = None
    kind: str = "train"
    model: str | None = None
    world: str | None = None
    algorithm: str | None = None
    seed: int | None = None
    step: int | None = None
    total_steps: int | None = None
    chains: int = 0
    reward: float | None = None
    spark: list[float | None] = field(default_factory=list)
    first_validation: float | None = None
    best_validation: float | None = None
    last_validation: float | None = None
    unscored: float | None = None
    started: float | None = None
    updated: float | None = None
    error: str | None = None
    problem: str | None = None

    @property
    def age_s(self) -> float | None:
        """Seconds since the run last wrote."""
        return None if self.updated is None else max(0.0, time.time() - self.updated)


def find_runs(folder: str | Path) -> list[RunSummary]:
    """The runs below a folder, the one that wrote last first. A folder that does not exist has none."""
    summaries = [summarize(path, name) for name, path in run_folders(folder).items()]
    return sorted(summaries, key=lambda run: (-(run.updated or 0.0), run.name))


def run_folders(folder: str | Path) -> dict[str, Path]:
    """The folders of runs by name, without opening them. Links are not followed, so no run lies outside of the folder."""
    root = Path(folder)
    folders: dict[str, Path] = {}

    def look(path: Path, depth: int) -> None:
        if (path / "run.db").is_file() and not (path / "run.db").is_symlink():
            folders[path.relative_to(root).as_posix() if path != root else path.resolve().name] = path
            return
        if depth < MAX_DEPTH:
            with contextlib.suppress(OSError):
                for entry in sorted(path.iterdir()):
                    if entry.is_dir() and not entry.is_symlink() and not entry.name.startswith("."):
                        look(entry, depth + 1)

    if root.is_dir():
        look(root, 0)
    return folders


def summarize(path: str | Path, name: str | None = None) -> RunSummary:
    """The summary of the run in a folder. A run that cannot be read has a `problem`."""
    path = Path(path)
    name = name or path.resolve().name
    updated = _last_write(path)
    try:
        with RunReader(path) as reader:
            return _summarize(reader, path, name, updated)
    except (AgentFlyError, OSError) as error:
        return RunSummary(name, path, updated=updated, problem=str(error))


def _summarize(reader: RunReader, path: Path, name: str, updated: float | None) -> RunSummary:
    meta, config, step = reader.meta(), read_config(path), reader.last_step()
    described = describe_config(config, path.name)
    curves = reader.series(["reward/mean", "validation/success", "validation/scored", "validation/chains"])
    rewards = [value for _, _, value in curves["reward/mean"]]
    held = [value for _, _, value in curves["validation/success"] if value is not None]
    finite = [value for value in rewards if value is not None]
    chains = {at: count for at, _, count in curves["validation/chains"]}
    counts = [(scored, chains.get(at)) for at, _, scored in curves["validation/scored"]]
    return RunSummary(
        name,
        path,
        state=reader.state(),
        kind=str(meta.get("kind") or ("eval" if path.name.startswith("eval-") else "train")),
        model=meta.get("model") or described["model"],
        world=meta.get("world") or described["world"],
        algorithm=meta.get("algorithm") or described["algorithm"],
        seed=meta.get("seed", described["seed"]),
        step=step,
        total_steps=meta.get("total_steps") or described["total_steps"],
        chains=reader.num_chains(),
        reward=finite[-1] if finite else None,
        spark=thin(rewards, SPARK_POINTS),
        first_validation=held[0] if held else None,
        best_validation=max(held, default=None),
        last_validation=held[-1] if held else None,
        unscored=max((1.0 - scored / of for scored, of in counts if scored is not None and of), default=None),
        started=meta.get("started"),
        updated=updated,
        error=meta.get("error"),
    )


def describe_config(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Model, world, algorithm, seed and planned steps by a config.toml; the defaults of keys that it does not set."""
    agent, data = _table(config, "agent"), _table(config, "data")
    evaluates = name.startswith("eval-")
    return {
        "model": agent.get("model", "pocket") if config else None,
        "world": agent.get("env") or data.get("train") or None,
        "algorithm": None if evaluates or not config else str(config.get("algorithm", "grpo")),
        "seed": config.get("seed", 0) if config else None,
        "total_steps": None if evaluates or not config else _table(config, "train").get("steps", 100),
    }


def read_config(path: Path) -> dict[str, Any]:
    """The config.toml of a run's folder as plain values; empty if it is missing or broken."""
    with contextlib.suppress(OSError, ValueError):
        return tomllib.loads((path / "config.toml").read_text(encoding="utf-8"))
    return {}


def thin(values: list[float | None], most: int) -> list[float | None]:
    """At most `most` values: the means of equal parts of the list. A part without values is None."""
    if len(values) <= most:
        return values
    means: list[float | None] = []
    for part in range(most):
        part_values = [
            value for value in values[part * len(values) // most : (part + 1) * len(values) // most] if value is not None
        ]
        means.append(math.fsum(part_values) / len(part_values) if part_values else None)
    return means


def _table(config: dict[str, Any], name: str) -> dict[str, Any]:
    table = config.get(name)
    return table if isinstance(table, dict) else {}


def _last_write(path: Path) -> float | None:
    """When the store was last written to. A trainer's log (`-wal`) is newer than the file; a reader leaves an empty one."""
    times = []
    for name in ("run.db", "run.db-wal"):
        with contextlib.suppress(OSError):
            status = (path / name).stat()
            times += [status.st_mtime] if status.st_size else []
    return max(times, default=None)
