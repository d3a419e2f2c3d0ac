"""Checkpoints: folders that `from_pretrained` loads, with the trainer's state in them.

    .step-000020.writing     being written: temporary, then checksummed, flushed and renamed to
    .step-000020.5e1f.ranks  shards that other ranks of the learner have written, until they are moved there
    step-000020              finished: its manifest names every file with size and checksum
    .step-000020.replaced    the former step-000020 while a new one takes its name; counts as step-000020 if that is missing
    .step-000010.removing    an old one while it is removed
    step-000020.broken       did not match its manifest when a run was resumed
    best                     a link to the checkpoint with the best validation (`train.keep_best`), which is never removed

Renaming a folder is atomic, so a kill at any moment leaves the newest finished checkpoint intact. `sweep` removes what a
killed process left behind. A checkpoint that does not match its manifest is not loaded.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ConfigError, StorageError
from .directory import CHECKPOINT

MANIFEST = "manifest.json"
STATE = "trainer.pt"
SHARDS = "shards"
"""The folder with one file per rank, if the learner was sharded."""
PREFIX = "step-"
BEST = "best"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_checkpoint(folder: Path, step: int, write: Callable[[Path], None], keep: int, best: bool = False) -> Path:
    """Let `write` fill `folder/step-N`, and remove all but the newest `keep` checkpoints and the best. Raises StorageError.

    An older checkpoint of the same step stays until the new one is complete. `best`: it is the best one from now on.
    """
    final = folder / f"{PREFIX}{step:06d}"
    temporary = folder / f".{final.name}.writing"
    with _storage_errors(folder, f"the checkpoint of step {step}"):
        try:
            folder.mkdir(exist_ok=True)  # without parents: if the run's folder was moved, none is made in its place
            _remove(temporary)
            temporary.mkdir()
            write(temporary)
            _seal(temporary, step)
            _put(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        if best:
            mark_best(folder, step)
        _rotate(folder, step, keep)
    return final


def mark_best(folder: Path, step: int) -> None:
    """Let the link `best` name the checkpoint of this step. Raises StorageError."""
    link, temporary = folder / BEST, folder / f".{BEST}.writing"
    with _storage_errors(folder, "the link to the best checkpoint"):
        _remove(temporary)
        temporary.symlink_to(f"{PREFIX}{step:06d}")
        if not link.is_symlink():  # a copy of the run's folder may hold a copy of the checkpoint
            _remove(link)
        os.replace(temporary, link)


def best_checkpoint(folder: Path) -> Path | None:
    """Returns the checkpoint that the link `best` names; None if there is none."""
    link = folder / BEST
    path = folder / os.readlink(link) if link.is_symlink() else link
    return path if CHECKPOINT.fullmatch(path.name) and path.is_dir() else None


def step_of(checkpoint: Path) -> int:
    """Returns the step of a checkpoint that `list_checkpoints` or `best_checkpoint` returns."""
    return int(checkpoint.name.rpartition("-")[2].split(".")[0])


def staging_folder(folder: Path, step: int) -> Path:
    """Where the ranks of a sharded learner write their shards of a checkpoint.

    Its name is used once: a rank of a node that was frozen may write its shard when the node thaws, after the ranks have been
    started elsewhere.
    """
    staging = folder / f".{PREFIX}{step:06d}.{secrets.token_hex(4)}.ranks"
    with _storage_errors(folder, f"the checkpoint of step {step}"):
        staging.mkdir(parents=True)
    return staging


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns the finished checkpoints, oldest first."""
    paths: dict[int, Path] = {}
    for path in folder.glob(f".{PREFIX}*.replaced"):
        if name := CHECKPOINT.fullmatch(path.name.removeprefix(".").removesuffix(".replaced")):
            paths[int(name[1])] = path
    for path in folder.glob(f"{PREFIX}*"):
        if name := CHECKPOINT.fullmatch(path.name):
            paths[int(name[1])] = path
    return [path for _, path in sorted(paths.items()) if path.is_dir()]


def latest_checkpoint(run: str | Path) -> Path:
    """Returns the newest intact checkpoint of a run. Raises ConfigError if there is none."""
    if not Path(run).is_dir():
        raise ConfigError(f"there is no run folder {run}")
    newest, broken = find_checkpoint(Path(run) / "checkpoints")
    if newest is None:
        why = f"; {why_broken(broken)}" if broken else ""
        raise ConfigError(f"{run} holds no intact checkpoint{why}")
    return newest


def newest_of(model: str) -> str:
    """Returns the newest checkpoint of a run's folder, and the name of any other model as it is. Raises ConfigError."""
    return str(latest_checkpoint(model)) if (Path(model) / "checkpoints").is_dir() else model


def export_model(source: str | Path, target: Path) -> Path:
    """Copy the model of a checkpoint, or of a run's newest one, into a new folder that `from_pretrained` loads.

    The trainer's state and the shards of ranks are left out. Returns the checkpoint. Raises ConfigError or StorageError.
    """
    checkpoint = Path(source) if (Path(source) / MANIFEST).is_file() else latest_checkpoint(source)
    if files := broken_files(checkpoint):
        raise ConfigError(f"cannot export: {why_broken({checkpoint: files})}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is not empty: choose another folder")
    temporary = target.with_name(f".{target.name}.writing")
    with _storage_errors(target.parent, f"the model {target.name}"):
        try:
            _remove(temporary)
            shutil.copytree(checkpoint, temporary, ignore=shutil.ignore_patterns(MANIFEST, STATE, SHARDS))
            if target.exists():
                target.rmdir()
            os.replace(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return checkpoint


def find_checkpoint(folder: Path) -> tuple[Path | None, dict[Path, list[str]]]:
    """Returns the newest intact checkpoint, and the newer ones that are not intact with the files at fault."""
    broken: dict[Path, list[str]] = {}
    for path in reversed(list_checkpoints(folder)):
        if not (files := broken_files(path)):
            return path, broken
        broken[path] = files
    return None, broken


def why_broken(broken: dict[Path, list[str]]) -> str:
    """Returns which checkpoints are broken and why, as a clause."""
    return ", ".join(
        f"{path.name} is broken ({files[0]}{f' and {len(files) - 1} more files' if len(files) > 1 else ''} missing or altered)"
        for path, files in broken.items()
    )


def broken_files(checkpoint: Path) -> list[str]:
    """Returns the files that are missing or do not match the manifest; the manifest if it is none of a checkpoint."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        sums, sizes = manifest["sha256"], manifest.get("bytes", {})
        shaped = STATE in sums and all(isinstance(item, str) for pair in sums.items() for item in pair)
        sizes = {name: int(sizes.get(name, -1)) for name in sums}  # -1: older manifests have no sizes
        own_name = CHECKPOINT.fullmatch(checkpoint.name)
        shaped = shaped and (own_name is None or int(own_name[1]) == manifest["step"])  # else it was renamed
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [MANIFEST]
    if not shaped:
        return [MANIFEST]
    return [name for name, sum_ in sums.items() if not _matches(checkpoint / name, sizes[name], sum_)]


def sweep(folder: Path) -> None:
    """Remove what a killed process left behind. The caller holds the run's lock."""
    with _storage_errors(folder, "the remains of a checkpoint"):
        for path in folder.glob(f".{PREFIX}*"):
            final = folder / path.name.removeprefix(".").removesuffix(".replaced")
            if path.name.endswith(".replaced") and not final.exists():
                os.replace(path, final)
            elif path.suffix in (".writing", ".ranks", ".replaced", ".removing"):
                _remove(path)


def set_aside(checkpoint: Path) -> Path:
    """Rename a broken checkpoint, so that it neither counts as one nor is removed. Returns its new path."""
    aside = checkpoint.with_name(f"{checkpoint.name.removeprefix('.').removesuffix('.replaced')}.broken")
    with _storage_errors(checkpoint.parent, aside.name):
        _remove(aside)
        os.replace(checkpoint, aside)
    return aside


def discard(checkpoint: Path) -> None:
    """Remove a checkpoint."""
    with _storage_errors(checkpoint.parent, "the removal of a checkpoint"):
        leaving = checkpoint.with_name(f".{checkpoint.name}.removing")
        _remove(leaving)
        os.rename(checkpoint, leaving)  # a kill while the files are removed leaves no half of a checkpoint under its name
        _remove(leaving)


# ---- writing -------------------------------------------------------------------------------------------------------------


def _seal(temporary: Path, step: int) -> None:
    """Write the manifest and flush everything to the disk."""
    files = {path.relative_to(temporary).as_posix(): path for path in sorted(temporary.rglob("*")) if path.is_file()}
    manifest = {
        "step": step,
        "sha256": {name: _sha256(path) for name, path in files.items()},
        "bytes": {name: path.stat().st_size for name, path in files.items()},
    }
    (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in (*temporary.rglob("*"), temporary):
        _flush(path)


def _put(temporary: Path, final: Path) -> None:
    """Give a complete checkpoint its name. One that has the name keeps existing until the new one is in place."""
    old = final.with_name(f".{final.name}.replaced")
    if final.exists():
        _remove(old)
        os.rename(final, old)
        try:
            os.replace(temporary, final)
        except BaseException:
            os.rename(old, final)
            raise
    else:
        os.replace(temporary, final)
    _flush(final.parent)
    _remove(old)


def _rotate(folder: Path, step: int, keep: int) -> None:
    """Remove all but the best and the newest `keep` checkpoints up to this step. One of a later step is not counted as new."""
    finished = [path for path in list_checkpoints(folder) if step_of(path) <= step]
    best = best_checkpoint(folder)
    for old in finished[:-keep]:
        if old != best:
            discard(old)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _matches(path: Path, size: int, sum_: str) -> bool:
    try:
        return path.is_file() and size in (-1, path.stat().st_size) and _sha256(path) == sum_
    except OSError:  # a file that cannot be read is as good as missing
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _storage_errors(folder: Path, what: str) -> Iterator[None]:
    """Raises an OSError of the body as StorageError, with the newest checkpoint that is kept."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno in FULL:
            with contextlib.suppress(OSError):
                why += f" (without it, {shutil.disk_usage(folder).free / 1e6:,.1f} MB are free)"
        checkpoints = list_checkpoints(folder)
        newest = f"the newest checkpoint is {checkpoints[-1]}" if checkpoints else "there is no checkpoint yet"
        raise StorageError(f"{what} cannot be written to {folder}: {why}; {newest}") from error
