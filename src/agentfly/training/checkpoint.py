"""Checkpoints: a folder that `from_pretrained` loads, with the trainer's state in it.

A checkpoint is written into a temporary folder, checksummed, flushed and then renamed, so a kill at any moment leaves the
previous one intact. A folder whose checksums do not match is not loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from ..errors import ConfigError

MANIFEST = "manifest.json"
STATE = "trainer.pt"
PREFIX = "step-"


def save_checkpoint(folder: Path, step: int, *, model: Any, tokenizer: Any, state: dict[str, Any], keep: int) -> Path:
    """Write `folder/step-N` and remove all but the newest `keep` checkpoints."""
    from ..learn.model.storage import save_checkpoint_model, save_state

    final = folder / f"{PREFIX}{step:06d}"
    temporary = folder / f".{final.name}.writing"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_checkpoint_model(model, tokenizer, temporary)
    save_state(temporary / STATE, state)
    sums = {path.relative_to(temporary).as_posix(): _sha256(path) for path in sorted(temporary.rglob("*")) if path.is_file()}
    (temporary / MANIFEST).write_text(json.dumps({"step": step, "sha256": sums}, indent=1))
    for path in temporary.rglob("*"):
        _flush(path)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    _flush(folder)
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns the finished checkpoints, oldest first."""
    return sorted(path for path in folder.glob(f"{PREFIX}*") if (path / MANIFEST).is_file())


def latest_checkpoint(run: Path) -> Path:
    """Returns the newest intact checkpoint of a run. Raises ConfigError if there is none."""
    if not run.is_dir():
        raise ConfigError(f"cannot resume: there is no run folder {run}")
    for path in reversed(list_checkpoints(run / "checkpoints")):
        if not broken_files(path):
            return path
    raise ConfigError(f"cannot resume: {run} holds no intact checkpoint")


def broken_files(checkpoint: Path) -> list[str]:
    """Returns the files that are missing or whose checksum does not match."""
    try:
        sums = json.loads((checkpoint / MANIFEST).read_text())["sha256"]
    except (OSError, ValueError, KeyError):
        return [MANIFEST]
    return [name for name, sum_ in sums.items() if not (checkpoint / name).is_file() or _sha256(checkpoint / name) != sum_]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
