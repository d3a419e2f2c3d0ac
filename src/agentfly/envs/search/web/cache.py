"""A cache of providers' answers: on disk (SQLite), or in Redis before the disk if `REDIS_URL` is set.

Keys are digests, so they do not contain queries. A cache does not fail its caller: an entry that cannot be read is a miss, one
that cannot be written is dropped, and a warning is logged once. Expired entries are not returned, and are deleted from time to
time.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from .... import plugins
from ....errors import ConfigError, MissingExtra
from ...stored import cache_root

log = logging.getLogger(__name__)
KINDS = ("auto", "disk", "redis", "none")
BUSY_S = 2.0
SWEEP_EVERY = 500
MAX_ROWS = 1_000_000


class Cache(Protocol):
    """Blocking and thread-safe; its methods do not raise. `usable`: whether it is worth asking now."""

    @property
    def usable(self) -> bool: ...

    def get(self, key: str) -> str | None: ...

    def put(self, key: str, text: str) -> None: ...

    def close(self) -> None: ...


class DiskCache:
    """One SQLite file, shared by all processes of the user."""

    def __init__(self, ttl_s: float, path: Path | None = None) -> None:
        self.path, self.ttl_s = path or cache_root() / "search" / "web.sqlite", ttl_s
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._failed = self._said = False
        self._puts = 0

    @property
    def usable(self) -> bool:
        return not self._failed

    def get(self, key: str) -> str | None:
        row = self._do("SELECT text FROM said WHERE key = ? AND made > ?", (key, time.time() - self.ttl_s))
        return None if row is None else str(row[0])

    def put(self, key: str, text: str) -> None:
        self._do("INSERT OR REPLACE INTO said VALUES (?, ?, ?)", (key, text, time.time()))
        self._puts += 1
        if self._puts % SWEEP_EVERY == 1:
            self._do("DELETE FROM said WHERE made <= ?", (time.time() - self.ttl_s,))
            newest = "SELECT key FROM said ORDER BY made DESC LIMIT -1 OFFSET ?"
            self._do(f"DELETE FROM said WHERE key IN ({newest})", (MAX_ROWS,))

    def close(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    def _do(self, statement: str, values: tuple[Any, ...]) -> Any:
        with self._lock:
            if self._failed:
                return None
            try:
                return self._connected().execute(statement, values).fetchone()
            except sqlite3.OperationalError as error:  # locked, or the disk is full: this may pass
                if not self._said:
                    log.warning("the cache %s cannot be used now (%s): searches are asked again", self.path, error)
                self._said = True
            except (sqlite3.Error, OSError) as error:
                self._failed = not self._replace(error)
        return None

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            made = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            try:
                made.execute("PRAGMA journal_mode = WAL")
                made.execute("PRAGMA synchronous = NORMAL")
                made.execute("CREATE TABLE IF NOT EXISTS said (key TEXT PRIMARY KEY, text TEXT NOT NULL, made REAL NOT NULL)")
            except BaseException:
                made.close()
                raise
            self._connection = made
        return self._connection

    def _replace(self, error: Exception) -> bool:
        """Move a damaged file aside and start an empty one. Returns False if that failed too, which disables the cache."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        aside = self.path.with_suffix(".damaged")
        try:
            self.path.replace(aside)
            for end in ("-wal", "-shm"):
                self.path.with_name(self.path.name + end).unlink(missing_ok=True)
            self._connected()
        except (sqlite3.Error, OSError) as again:
            log.warning("the cache %s cannot be used (%s); searches are not remembered", self.path, again)
            return False
        log.warning("the cache %s was damaged (%s) and begins anew; the old file is %s", self.path, error, aside.name)
        return True


class Layered:
    """Caches in order: reads ask each usable one until one knows the key, writes go to the first that accepts them."""

    def __init__(self, *caches: Cache) -> None:
        self.caches = caches

    @property
    def usable(self) -> bool:
        return any(cache.usable for cache in self.caches)

    def get(self, key: str) -> str | None:
        for cache in self.caches:
            if cache.usable and (text := cache.get(key)) is not None:
                return text
        return None

    def put(self, key: str, text: str) -> None:
        for cache in self.caches:
            if cache.usable:
                cache.put(key, text)
                if cache.usable:  # a cache that failed to write is not usable any more
                    return

    def close(self) -> None:
        for cache in self.caches:
            cache.close()


def open_cache(kind: str = "auto", ttl_s: float = 7 * 86_400.0) -> Cache | None:
    """The cache of a kind; None for "none". "auto" is Redis before the disk if REDIS_URL is set, else the disk."""
    if kind not in KINDS:
        raise ConfigError(f"no cache is called {kind!r}; there are {', '.join(KINDS)}")
    if not ttl_s > 0:
        raise ConfigError(f"a cache's ttl_s must be above 0, not {ttl_s}")
    if kind == "none":
        return None
    url = os.environ.get("REDIS_URL", "")
    if kind == "redis" and not url:
        raise ConfigError("the cache 'redis' needs REDIS_URL to be set")
    disk = DiskCache(ttl_s)
    if kind == "disk" or not url:
        return disk
    try:
        return Layered(plugins.resolve("caches", "redis")(url, ttl_s), disk)
    except MissingExtra as error:
        if kind == "redis":
            raise
        log.warning("REDIS_URL is set, but %s; searches are remembered on disk", error)
        return disk
