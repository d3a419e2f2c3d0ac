"""The runs of one folder, by name: a request names a run, never a path.

`ask` runs a function on a reader of the run in a thread. Each reader is one read-only connection; a run has as many as there
are requests at once (at most THREADS), so a slow search of one page does not hold up another.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from ..errors import ConfigError
from ..runs.catalog import RunSummary, run_folders, summarize
from ..runs.query import RunReader

THREADS = 6
MAX_IDLE = 24
"""Readers that are kept open for the next request."""
KNOWN_S = 2.0
"""Seconds for which the list of folders is used again."""

Stamp = tuple[int, int, int, int]
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
        self._folders: tuple[float, dict[str, Path]] = (-math.inf, {})
        self._summaries: dict[str, tuple[Stamp, RunSummary]] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="agentfly-view")
        self._closed = False

    def scan(self) -> dict[str, Path]:
        """The folder of each run, by name: its path below the runs folder. Symbolic links are not followed."""
        folders = run_folders(self._root)
        self._folders = time.monotonic(), folders
        return folders

    def find(self, name: str) -> Path:
        """The folder of a run. Raises NotFound."""
        at, folders = self._folders
        if name not in folders or time.monotonic() - at > KNOWN_S:
            folders = self.scan()
        if name not in folders:
            raise NotFound(f"there is no run {name[:200]!r} here")
        return folders[name]

    def summaries(self) -> list[RunSummary]:
        """All runs, the one that wrote last first. A run that has ended is read again only if its files have changed."""
        summaries = []
        for name, folder in self.scan().items():
            stamp = file_stamp(folder)
            cached = self._summaries.get(name)
            if cached is None or cached[0] != stamp or cached[1].state not in ("finished", "stopped"):
                cached = self._summaries[name] = stamp, summarize(folder, name)
            summaries.append(cached[1])
        return sorted(summaries, key=lambda run: (-(run.updated or 0.0), run.name))

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
        try:
            file = (name, (folder / "run.db").stat().st_ino)  # another file if the run was deleted and made again
        except OSError as error:
            raise NotFound(f"the run {name[:200]!r} is gone") from error
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


def file_stamp(folder: Path) -> Stamp:
    """Size and time of a run's database and of its log, which SQLite appends to with every commit. Zeros if absent.

    A reader creates an empty log: its time says nothing.
    """
    stamp: list[int] = []
    for name in ("run.db", "run.db-wal"):
        try:
            status = (folder / name).stat()
            stamp += [status.st_size, status.st_mtime_ns if status.st_size else 0]
        except OSError:
            stamp += [0, 0]
    return stamp[0], stamp[1], stamp[2], stamp[3]
