"""Things that are slow to build are built once and kept on disk: a path, a builder and a loader in, what the loader gives out.

A stored thing is a folder of files beside a manifest with the size and checksum of each. It is built in a temporary folder and
renamed into place, so nobody sees half of one. What is missing, incomplete, altered or refused by its loader is built again.
Two runs that want the same thing agree through a lock file: one builds, the other waits, within a deadline; a builder that
dies gives its lock back to the system. Nothing is pickled here, and a builder should not either.

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

from ..errors import ConfigError, DeadlineError, WorldError

log = logging.getLogger(__name__)
T = TypeVar("T")

MANIFEST = "manifest.json"
FORMAT = 1
WAIT_S = 1800.0
POLL_S = 0.05
SAY_S = 2.0
"""After so long a wait the log says what is waited for."""
_CHUNK = 1 << 20


class Damaged(Exception):
    """What is stored cannot be used: raised by a check or a loader, answered by building again."""


def cache_root() -> Path:
    """Where stored things live: `$AGENTFLY_CACHE`, or `agentfly` in the user's cache folder."""
    if given := os.environ.get("AGENTFLY_CACHE"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "agentfly"


def stored(
    path: Path,
    build: Callable[[Path], None],
    load: Callable[[Path], T],
    *,
    wait_s: float = WAIT_S,
    check: bool = True,
) -> T:
    """What `load(path)` gives, after `build(folder)` has filled the folder where that was needed.

    `wait_s` is for the run that waits while another builds. `check=False` compares sizes only: for what is too large to be read
    at every start. A loader says that it cannot use what it finds by raising Damaged, OSError, ValueError or KeyError; after a
    fresh build that is a WorldError.
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


def key_of(*parts: Any) -> str:
    """A short name for what something was built from: settings, file names with `stamp_of`, versions of a format."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:20]


def stamp_of(file: Path) -> list[Any]:
    """What tells a changed file from an unchanged one without reading it."""
    status = file.stat()
    return [str(file.resolve()), status.st_size, status.st_mtime_ns]


def _build(path: Path, build: Callable[[Path], None]) -> None:
    """Fill a temporary folder, write its manifest, put it where the old one was. The caller holds the lock."""
    for left in path.parent.glob(f".{path.name}.*"):  # of a builder that died
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
            # Readers that have files of it open keep them; the name is free for the new one.
            path.rename(path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}"))
        else:
            path.unlink(missing_ok=True)
        made.rename(path)
    finally:
        for left in path.parent.glob(f".{path.name}.*"):
            shutil.rmtree(left, ignore_errors=True)


def _verify(path: Path, check: bool) -> None:
    """Every file is there, with the size and (where asked for) the checksum that it was written with."""
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
    digest, size = hashlib.blake2b(digest_size=16), 0
    with open(file, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return {"size": size, "sum": digest.hexdigest()}


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@contextmanager
def _locked(file: Path, path: Path, wait_s: float) -> Iterator[None]:
    """Hold the lock file; the system lets go of it when the process ends, however it ends."""
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
        os.close(handle)  # closing gives the lock back


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
