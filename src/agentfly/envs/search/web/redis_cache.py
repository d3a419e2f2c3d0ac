"""Redis as a cache of providers' answers. If Redis fails, searches are slower but do not fail.

A command has 0.2 s and is not retried. After a failure Redis is not asked for a while (`usable` is False). The address may
contain a password, so it appears in no message and no log.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from ....errors import ConfigError

log = logging.getLogger(__name__)
TIMEOUT_S = 0.2
REST_S = 30.0
PREFIX = "agentfly:search:"


class RedisCache:
    """`get` and `put` of texts. After a failure Redis is not asked for `rest_s`."""

    def __init__(self, url: str, ttl_s: float, *, timeout_s: float | None = None, rest_s: float = REST_S) -> None:
        limit_s = TIMEOUT_S if timeout_s is None else timeout_s
        try:
            self._client: Any = redis.Redis.from_url(
                url,
                socket_timeout=limit_s,
                socket_connect_timeout=limit_s,
                retry=Retry(NoBackoff(), 0),
                health_check_interval=0,
                max_connections=64,
                decode_responses=True,
                protocol=2,
            )
        except ValueError:
            raise ConfigError("REDIS_URL is not an address such as redis://localhost:6379/0") from None
        self._ttl_s, self._rest_s = max(1, int(ttl_s)), rest_s
        self._lock = threading.Lock()
        self._until = 0.0

    @property
    def usable(self) -> bool:
        return time.monotonic() >= self._until

    def get(self, key: str) -> str | None:
        value = self._do("get", PREFIX + key)
        return value if isinstance(value, str) else None

    def put(self, key: str, text: str) -> None:
        self._do("set", PREFIX + key, text, ex=self._ttl_s)

    def close(self) -> None:
        self._client.close()

    def _do(self, command: str, *args: object, **options: object) -> Any:
        if not self.usable:
            return None
        try:
            return getattr(self._client, command)(*args, **options)
        except (redis.RedisError, OSError, ValueError) as error:
            with self._lock:
                fresh, self._until = self.usable, time.monotonic() + self._rest_s
            if fresh:  # of several threads that fail together, one logs it
                log.warning("Redis does not answer (%s); it is not asked for %g s", type(error).__name__, self._rest_s)
            return None
