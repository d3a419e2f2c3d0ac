"""The way to a server and back: JSON posted with retries, deadlines and bounds, and a key that nobody gets to read.

In: an address, a key, a path and a body. Out: the answer's JSON. Busy servers (408, 429, 5xx) and broken connections are tried
again, with growing pauses, until a total deadline. Every failure is an `EngineError` of one sentence. The key comes from the
option or the environment, and never appears in a sentence, a representation or a log. Refuses answers of unreasonable size.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ..errors import ConfigError, EngineError

DEFAULT_URL = "https://api.openai.com/v1"
RETRY = {408, 409, 425, 429, 500, 502, 503, 504, 529}
LOOPBACK = {"localhost", "127.0.0.1", "::1"}
MAX_BODY = 64 << 20

T = TypeVar("T")


class Again(Exception):
    """Not an error yet: worth another try, after `wait_s` where the server said so."""

    def __init__(self, why: str, wait_s: float | None = None) -> None:
        super().__init__(why)
        self.wait_s = wait_s


class Server:
    """One server. `timeout_s` is how long it may be silent, `deadline_s` how long one answer may take with all its retries.

    `connected` is when a connection was last made for `post`, in seconds of `time.monotonic`.
    """

    def __init__(
        self,
        model: str,
        base_url: str | None,
        *,
        api_key: str | None = None,
        timeout_s: float = 120.0,
        deadline_s: float = 600.0,
        max_retries: int = 8,
        retry_s: float = 0.5,
        max_connections: int = 256,
    ) -> None:
        self.base_url = (base_url or os.environ.get("OPENAI_BASE_URL") or DEFAULT_URL).rstrip("/")
        if not is_address(self.base_url):
            raise ConfigError("base_url must look like http://host:port/v1, without a user name or password in it")
        for name, number in [("timeout_s", timeout_s), ("deadline_s", deadline_s), ("max_connections", max_connections)]:
            if not number > 0:
                raise ConfigError(f"{name} must be more than 0, not {number}")
        for name, number in [("max_retries", max_retries), ("retry_s", retry_s)]:
            if not number >= 0:
                raise ConfigError(f"{name} must be at least 0, not {number}")
        self.who = f"{model} at {self.base_url}"
        self.deadline_s = deadline_s
        self.connected = -math.inf
        self._local = urlsplit(self.base_url).hostname in LOOPBACK
        self._key = api_key if api_key is not None else os.environ.get("OPENAI_API_KEY", "")
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._retry_s = retry_s
        self._max_connections = max_connections
        # A client belongs to the event loop it was made in.
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"Server({self.base_url!r})"

    @property
    def root(self) -> str:
        """Where the endpoints live that OpenAI's API does not know."""
        return self.base_url.removesuffix("/v1")

    async def retry(self, once: Callable[[], Awaitable[T]]) -> T:
        """Do it until it works, the tries are used up, or the deadline has passed."""
        last = ""
        try:
            async with asyncio.timeout(self.deadline_s):
                for attempt in range(self._max_retries + 1):
                    try:
                        return await once()
                    except Again as again:
                        last = str(again)
                        if attempt < self._max_retries:
                            await asyncio.sleep(again.wait_s or self._pause(attempt))
        except TimeoutError:
            why = f" ({last})" if last else ""
            raise EngineError(f"{self.who} gave no reply within {self.deadline_s:g} s{why}") from None
        raise EngineError(f"{self.who} failed {self._max_retries + 1} times, the last time: {last}")

    async def post(self, url: str, body: Mapping[str, Any]) -> Any:
        """One try of one request; `Again` where another could help."""
        import httpx

        try:
            async with self.client().stream("POST", url, json=body, extensions={"trace": self._trace}) as response:
                text = await read(response)
                self.refuse(response.status_code, text, response.headers.get("retry-after"))
        except httpx.HTTPError as error:
            raise Again(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        return self._parse(text)

    def call(self, method: str, url: str, body: Mapping[str, Any] | None = None, *, timeout_s: float) -> Any:
        """One request from a thread without an event loop, tried once: for the server's own controls."""
        import httpx

        try:
            with (
                httpx.Client(headers=self._headers(), timeout=timeout_s, trust_env=not self._local) as client,
                client.stream(method, url, json=body) as response,
            ):
                parts, size, deadline = [], 0, time.monotonic() + timeout_s
                for part in response.iter_bytes():
                    if time.monotonic() > deadline:
                        raise EngineError(f"{self.who} was not done with {urlsplit(url).path} within {timeout_s:g} s")
                    parts.append(part)
                    size += len(part)
                    if size > MAX_BODY:
                        raise EngineError(f"{self.who} sent an answer of more than {MAX_BODY >> 20} MiB")
                text = b"".join(parts).decode("utf-8", "replace")
                self.refuse(response.status_code, text, None)
        except httpx.HTTPError as error:
            raise EngineError(f"{self.who} did not answer {urlsplit(url).path}: {type(error).__name__}") from error
        except Again as again:
            raise EngineError(f"{self.who} failed at {urlsplit(url).path}: {again}") from again
        return self._parse(text) if text.strip() else {}

    def refuse(self, status: int, text: str, retry_after: str | None) -> None:
        """Pass over a good answer; raise for any other."""
        if status == 200:
            return
        why = self.hide(reason(text))
        if status in RETRY:
            raise Again(f"HTTP {status}: {why}", _seconds(retry_after))
        raise Refused(status, f"{self.who} refused the request: HTTP {status}: {why}")

    def hide(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text

    def client(self) -> Any:
        import httpx

        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            client = self._clients[loop] = httpx.AsyncClient(
                headers=self._headers(),
                timeout=httpx.Timeout(self._timeout_s, connect=min(10.0, self._timeout_s), pool=self.deadline_s),
                limits=httpx.Limits(max_connections=self._max_connections, max_keepalive_connections=self._max_connections),
                trust_env=not self._local,  # a proxy of the machine must not catch what is meant for the machine itself
            )
        return client

    async def close(self) -> None:
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    async def _trace(self, event: str, info: Mapping[str, Any]) -> None:
        """What httpx tells of the request's way, also where its pool connects again without a word."""
        if event.endswith("connect_tcp.complete"):
            self.connected = time.monotonic()

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    def _parse(self, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise EngineError(f"{self.who} answered with something that is not JSON") from error

    def _pause(self, attempt: int) -> float:
        return float(min(self._retry_s * 2**attempt, 30.0) * random.uniform(0.5, 1.0))


class Refused(EngineError):
    """The server said no, and another try would not change its mind."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def is_address(text: str) -> bool:
    """Whether this is a server's address, with nothing secret in it."""
    try:
        parts = urlsplit(text)
        named = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        return named and not (parts.username or parts.password)
    except ValueError:  # such as a port that is not a number
        return False


async def read(response: Any) -> str:
    """The whole answer, within bounds."""
    parts: list[bytes] = []
    size = 0
    async for part in response.aiter_bytes():
        parts.append(part)
        size += len(part)
        if size > MAX_BODY:
            raise EngineError(f"the server sent an answer of more than {MAX_BODY >> 20} MiB")
    return b"".join(parts).decode("utf-8", "replace")


def reason(text: str) -> str:
    """Why a server said no, in its own words, as one line."""
    try:
        return reason_in(json.loads(text))
    except (ValueError, RecursionError):
        return " ".join(text.split())[:300] or "no reason given"


def reason_in(answer: Any) -> str:
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    found = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(found).split())[:300]


def _seconds(header: str | None) -> float | None:
    try:
        return min(max(float(header), 0.0), 60.0) if header else None
    except ValueError:  # a date; our own pause will do
        return None
