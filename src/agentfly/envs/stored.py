"""Data that is slow to build, built once and kept on disk.

A stored item is a folder of files and a manifest with the size and checksum of each. It is built in a temporary folder and
renamed into place, so readers never see a partial one. An item that is missing, incomplete, altered or refused by its loader is
built again. Two processes that want the same item use a lock file: one builds, the other waits within a deadline; the system
releases the lock of a process that dies. Nothing is pickled.

    index = stored(cache_root() / "webshop" / key, build=write_files, load=open_files)
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ..cache import cache_root as cache_root
from ..errors import ConfigError, DeadlineError, WorldError

log = logging.getLogger(__name__)
T = TypeVar("T")

MANIFEST = "manifest.json"
FORMAT = 1
WAIT_S = 1800.0
POLL_S = 0.05
SAY_S = 2.0
"""After this wait the log says what the process waits for."""


class Damaged(Exception):
    """A stored item cannot be used. Raised by a check or a loader; the item is then built again."""


def stored(
    path: Path,
    build: Callable[[Path], None],
    load: Callable[[Path], T],
    *,
    wait_s: float = WAIT_S,
    check: bool = True,
) -> T:
    """Return `load(path)`; if the item is missing or damaged, `build(folder)` makes it first.

    `wait_s` limits the wait for another process that builds. `check=False` compares sizes only, for items too large to be read
    at every start. A loader refuses an item by raising Damaged, OSError, ValueError or KeyError. Raises WorldError if a freshly
    built item cannot be loaded, DeadlineError after `wait_s`, ConfigError if the folder cannot be written.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(f"{path.name}.lock"), path, wait_s):
            if path.exists():
                try:
                    _verify(path, check)
                    return load(path)
                except (Damaged, OSError, ValueError, KeyError) as error:
                    log.warning("%s cannot be used (%s): it is built again", path, error)
            _build(path, build)
            try:
                return load(path)
            except (Damaged, ValueError, KeyError) as error:
                raise WorldError(f"{path} was built, but cannot be read: {type(error).__name__}: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be stored ({error}): set AGENTFLY_CACHE to a folder that can be written") from error


def key_of(*parts: object) -> str:
    """A short hash of what an item is built from: settings, `stamp_of` of files, format versions."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:20]


def stamp_of(file: Path) -> list[Any]:
    """Path, size and modification time of a file: differs if the file has changed."""
    status = file.stat()
    return [str(file.resolve()), status.st_size, status.st_mtime_ns]


def _build(path: Path, build: Callable[[Path], None]) -> None:
    """Build into a temporary folder, write its manifest, replace the old item. The caller holds the lock."""
    for left in path.parent.glob(f".{path.name}.*"):  # left by a process that died
        shutil.rmtree(left, ignore_errors=True)
    made = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    made.mkdir()
    try:
        build(made)
        files = {file.relative_to(made).as_posix(): _sum(file) for file in sorted(made.rglob("*")) if file.is_file()}
        text = json.dumps({"format": FORMAT, "files": files})
        with open(made / MANIFEST, "w", encoding="utf-8") as manifest:
            manifest.write(json.dumps({"sum": _digest(text.encode()), "content": text}))
            manifest.flush()
            os.fsync(manifest.fileno())
        if path.is_dir() and not path.is_symlink():
            # Processes that have its files open keep them; the name is free for the new item.
            path.rename(path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}"))
        else:
            path.unlink(missing_ok=True)
        made.rename(path)
    finally:
        for left in path.parent.glob(f".{path.name}.*"):
            shutil.rmtree(left, ignore_errors=True)


def _verify(path: Path, check: bool) -> None:
    """Raise Damaged unless every file has the size and, with `check`, the checksum of the manifest."""
    try:
        outer = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        text = outer["content"]
        if _digest(text.encode()) != outer["sum"]:
            raise Damaged("its manifest was altered")
        content = json.loads(text)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"its manifest cannot be read: {error}") from error
    if content.get("format") != FORMAT:
        raise Damaged(f"it has the format {content.get('format')!r}, not {FORMAT}")
    for name, wanted in content["files"].items():
        file = path / name
        if not file.is_file():
            raise Damaged(f"{name} is missing")
        if file.stat().st_size != wanted["size"]:
            raise Damaged(f"{name} has {file.stat().st_size:,} bytes, not {wanted['size']:,}")
        if check and _sum(file)["sum"] != wanted["sum"]:
            raise Damaged(f"{name} does not have the checksum that it was written with")


def _sum(file: Path) -> dict[str, Any]:
    with open(file, "rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16))
    return {"size": file.stat().st_size, "sum": digest.hexdigest()}


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@contextmanager
def _locked(file: Path, path: Path, wait_s: float) -> Iterator[None]:
    """Hold the lock file. The system releases it when the process ends, also if it is killed."""
    begun = time.monotonic()
    deadline, said = begun + wait_s, False
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        while not _try_lock(handle):
            if time.monotonic() >= deadline:
                raise DeadlineError(f"another run has held {file.name} for more than {wait_s:g} s while building {path}")
            if not said and time.monotonic() >= begun + SAY_S:
                log.warning("another run is building %s: waiting for it, at most %g s", path, wait_s)
                said = True
            time.sleep(POLL_S)
        yield
    finally:
        os.close(handle)  # closing releases the lock


if sys.platform == "win32":
    import msvcrt

    def _try_lock(handle: int) -> bool:
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _try_lock(handle: int) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
