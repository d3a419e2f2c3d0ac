"""The lock of a run folder: one trainer writes to a run at a time.

The trainer holds an advisory lock (`flock`) on `run.lock`, which names its process. The system releases the lock when the
process ends, also if it is killed, so a lock file that a killed trainer left behind locks nothing. The lock belongs to the
file and not to its path: it holds for a folder that was moved or is reached through a link.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError

LOCK = "run.lock"
RunState = Literal["running", "finished", "stopped", "dead"]
HEARTBEAT_LOST_S = 60.0
"""A run on another machine is dead if its last heartbeat is older."""
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_held: set[int] = set()


@contextmanager
def hold_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder while the body runs. Raises ConfigError if another trainer holds it."""
    path = folder / LOCK
    handle = _take(path, folder)
    _held.add(handle)
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(_owner()).encode(), 0)
    except OSError as error:
        _release(handle, path)
        raise ConfigError(f"the run folder {folder} cannot be written: {error.strerror}") from error
    try:
        yield
    finally:
        _release(handle, path)


def _take(path: Path, folder: Path) -> int:
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(f"the run folder {folder} cannot be written: {error.strerror}") from error
        try:
            if not _try_lock(handle, path):
                raise ConfigError(f"{folder} is in use by {_told(path)}: wait for its end, or choose another run.name")
            if _is_at(handle, path):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # the previous holder removed the file after this process had opened it: lock the new file


def process_mark() -> dict[str, Any]:
    """What names this process: pid, host, and `process`, which tells it from a later one with the same pid."""
    return {name: value for name, value in _owner().items() if name != "since"}


def state_of(folder: Path, meta: Mapping[str, Any], last_step: int | None) -> RunState:
    """The state of a run by what it recorded about itself (`RunReader.meta`); without that, by its lock and its last step."""
    status = meta.get("status")
    if status in ("finished", "stopped"):
        return "finished" if status == "finished" else "stopped"
    if status is not None:
        owner = dict(meta)
        if owner.get("host") == socket.gethostname():
            return "running" if _alive(owner) else "dead"
        beat = meta.get("heartbeat")  # of another machine: only its heartbeat can be seen
        return "running" if isinstance(beat, int | float) and time.time() - beat < HEARTBEAT_LOST_S else "dead"
    if (folder / LOCK).is_file():
        return "running" if _alive(_read(folder / LOCK)) else "dead"
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        config = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        planned = int(config.get("train", {}).get("steps", 100))
        if not folder.name.startswith("eval-") and (last_step or 0) < planned:
            return "stopped"
    return "finished"


def _try_lock(handle: int, path: Path) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows
        return not _alive(_read(path))
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return not _alive(_read(path))  # a file system without locks: the named process decides
    return True


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _release(handle: int, path: Path) -> None:
    _held.discard(handle)
    with contextlib.suppress(OSError):
        if _is_at(handle, path):  # not if the folder was moved and another run has its place
            path.unlink()
    os.close(handle)


def _owner() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "process": _process(os.getpid()),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _process(pid: int) -> str:
    """What tells a process from a later one with the same id: the time since boot at which it was started."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def _alive(owner: dict[str, Any]) -> bool:
    """Whether the process that a lock file names may be running. One on another machine cannot be asked."""
    pid = owner.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return False
    if owner.get("host") != socket.gethostname():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return bool(_process(pid) == owner.get("process", ""))


def _read(path: Path) -> dict[str, Any]:
    try:
        owner = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _told(path: Path) -> str:
    owner = _read(path)
    if "pid" not in owner:
        return "another trainer"  # which has not written its name yet
    return f"process {owner['pid']} on {owner.get('host')} (since {owner.get('since')})"


def _forget() -> None:
    """A forked child closes the trainer's handle: otherwise it would keep the lock after the trainer's end."""
    for handle in _held:
        with contextlib.suppress(OSError):
            os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
