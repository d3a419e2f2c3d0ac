"""/api/changes: tells browsers which run has new rows. It carries no data; a page then asks for what is new (`after=`).

One task looks at the files of all runs every LOOK_S seconds while a page listens. SQLite appends to `run.db-wal` with every
commit, so size and time of the two files are enough: no connection stays open, and an idle dashboard makes a few `stat` calls.

    data: {"run": "grpo-pocket", "version": 3}        `version` grows with every change that this server has seen
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path

from .library import Library, Stamp, file_stamp

LOOK_S = 0.5
SCAN_S = 2.0
"""Seconds between two searches of the folder for new runs."""
BEAT_S = 15.0
"""Seconds of silence after which a comment is sent, so that a closed connection is noticed."""
MAX_LISTENERS = 64


class LibraryWatcher:
    """The watcher of one library. `listen` gives the events of one browser."""

    def __init__(self, library: Library, *, look_s: float = LOOK_S) -> None:
        self._library, self._look_s = library, look_s
        self._stamps: dict[str, Stamp] = {}
        self._versions: dict[str, int] = {}
        self._listeners: set[asyncio.Queue[bytes | None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def is_full(self) -> bool:
        return self._closed or len(self._listeners) >= MAX_LISTENERS

    async def listen(self) -> AsyncGenerator[bytes, None]:
        """Events for one listener, until it disconnects or the server closes."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=256)
        self._listeners.add(queue)
        if self._task is None or self._task.done():
            self._stamps = self._look(self._library.scan())
            self._task = asyncio.create_task(self._watch())
        try:
            yield b"retry: 1000\n\n"
            while not self._closed:
                try:
                    async with asyncio.timeout(BEAT_S):
                        event = await queue.get()
                except TimeoutError:
                    event = b": still here\n\n"
                if event is None:
                    return
                yield event
        finally:
            self._listeners.discard(queue)

    def close(self) -> None:
        """End all streams. Idempotent."""
        self._closed = True
        for queue in self._listeners:
            while queue.full():
                queue.get_nowait()
            queue.put_nowait(None)
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        """Look while a page listens."""
        loop = asyncio.get_running_loop()
        scanned, folders = loop.time(), self._library.scan()
        while self._listeners:
            await asyncio.sleep(self._look_s)
            if loop.time() - scanned >= SCAN_S:
                scanned, folders = loop.time(), await asyncio.to_thread(self._library.scan)
            stamps = self._look(folders)
            changed = [name for name in stamps.keys() | self._stamps.keys() if stamps.get(name) != self._stamps.get(name)]
            self._stamps = stamps
            for name in sorted(changed):
                self._tell(name)

    def _tell(self, name: str) -> None:
        version = self._versions[name] = self._versions.get(name, 0) + 1
        event = f"data: {json.dumps({'run': name, 'version': version})}\n\n".encode()
        for queue in self._listeners:
            if not queue.full():  # a listener that reads nothing misses events; the next one it reads is enough
                queue.put_nowait(event)

    def _look(self, folders: dict[str, Path]) -> dict[str, Stamp]:
        return {name: file_stamp(folder) for name, folder in folders.items()}
