"""The runs of one folder, by name: a request names a run, never a path.

`ask` runs a function on a reader of the run in a thread. Each reader is one read-only connection; a run has as many as there
are requests at once (at most THREADS), so a slow search of one page does not hold up another.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from ..errors import ConfigError
from ..runs.query import RunReader

THREADS = 6
MAX_IDLE = 24
"""Readers that are kept open for the next request."""

T = TypeVar("T")


class NotFound(ConfigError):
    """There is no run, chain or session of this name."""


class Library:
    """The runs in `folder`, or the one run that the folder itself is. Raises ConfigError if there is no such folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ConfigError(f"there is no folder {folder}: give the folder of the runs")
        self._root = self.folder.resolve()
        self._idle: OrderedDict[RunReader, tuple[str, int]] = OrderedDict()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="agentfly-view")
        self._closed = False

    def scan(self) -> dict[str, Path]:
        """The folder of each run, by name. A run that is reached through a symbolic link is left out."""
        if is_run(self._root):
            return {self._root.name: self._root}
        try:
            return {path.name: path for path in sorted(self._root.iterdir()) if is_run(path)}
        except OSError:
            return {}

    def find(self, name: str) -> Path:
        """The folder of a run. Raises NotFound."""
        if not name or name in (".", "..") or any(sign in name for sign in "/\\\0"):
            raise NotFound("there is no such run")
        folder = self._root if is_run(self._root) else self._root / name
        if folder.name != name or not is_run(folder):
            raise NotFound(f"there is no run {name!r} in {self.folder}")
        return folder

    async def ask(self, name: str, question: Callable[[RunReader], T]) -> T:
        """What `question` returns, run in a thread. Raises NotFound, or what `question` raises."""
        return await self.call(lambda: self._with_reader(name, question))

    async def call(self, function: Callable[[], T]) -> T:
        """What `function` returns, run in a thread of the library."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    def close(self) -> None:
        """Close all readers. A request that is being answered closes its own."""
        with self._lock:
            self._closed = True
            readers = list(self._idle)
            self._idle.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for reader in readers:
            reader.close()

    def _with_reader(self, name: str, question: Callable[[RunReader], T]) -> T:
        folder = self.find(name)
        file = (name, (folder / "run.db").stat().st_ino)  # another file if the run was deleted and made again
        with self._lock:
            reader = next((each for each, of in reversed(self._idle.items()) if of == file), None)
            if reader is not None:
                del self._idle[reader]
        if reader is None:
            reader = RunReader(folder)
        try:
            return question(reader)
        finally:
            with self._lock:
                dropped = [reader] if self._closed else []
                if not self._closed:
                    self._idle[reader] = file
                while len(self._idle) > MAX_IDLE:
                    dropped.append(self._idle.popitem(last=False)[0])
            for each in dropped:
                each.close()


def is_run(folder: Path) -> bool:
    """Whether a folder holds the store of a run, and neither is a symbolic link."""
    database = folder / "run.db"
    try:
        return not folder.is_symlink() and database.is_file() and not database.is_symlink()
    except OSError:
        return False
