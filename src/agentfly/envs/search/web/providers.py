"""Web search through a provider: queries in, pages with their snippets out.

    serper  SERPER_API_KEY     tavily   TAVILY_API_KEY
    brave   BRAVE_API_KEY      searxng  SEARXNG_URL, the address of a SearXNG server

The key is read from the environment only. It appears in no error, log or passage, also if a provider repeats it. Transient
failures are retried within a deadline and then raise WorldError; a refused key is a ConfigError. Requests keep the provider's
rate (`rate_limit.py`). Answers with results are cached (`cache.py`). Pages are not fetched: `get` returns what a search found.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from urllib.parse import urlsplit

from ....aio.threads import run_in_thread
from ....errors import ConfigError, WorldError
from ....net.client import MAX_REASON, HttpClient, OutOfAttempts, OutOfTime, Rejected, RetryPolicy, Transient, retry
from ....tools.text import clean
from ..retrieve.types import Hit, Passage, check_deadline, check_k
from .cache import Cache, open_cache
from .rate_limit import RateLimit, TooLate

MAX_KNOWN = 10_000
"""Pages that `get` remembers."""
MAX_ANSWER = 4 << 20
_TAGS = re.compile(r"</?(?:b|strong|em|i|span|mark)[^>]{0,80}>")


@dataclass(frozen=True, slots=True)
class Provider:
    """The request and answer format of a provider. `rate` is requests per second, `longest` the characters of a query."""

    url: str
    key: str
    ask: Callable[[str, int, str], dict[str, Any]]
    read: Callable[[Any], list[dict[str, Any]]]
    text: tuple[str, ...]
    link: str = "url"
    rate: float = 10.0
    longest: int = 1_000
    method: str = "POST"


class _NoResults(Exception):
    """The answer is JSON without a list of results."""


def _at(answer: Any, *path: str) -> list[dict[str, Any]]:
    """The results under `path`; none if the field is missing. Raises _NoResults if an empty answer names an error."""
    value = answer
    for name in path:
        if not isinstance(value, dict):
            raise _NoResults(f"something else than an object with {'.'.join(path)!r}")
        value = value.get(name)
        if value is None:
            break
    if not isinstance(value, list | None):
        raise _NoResults(f"{'.'.join(path)!r} is no list")
    for name in ("error", "errors", "unresponsive_engines") if not value else ():
        if answer.get(name):
            raise _NoResults(f"no results, but {name}: {json.dumps(answer[name])}")
    return [each for each in value or () if isinstance(each, dict)]


PROVIDERS = {
    "serper": Provider(
        "https://google.serper.dev/search",
        "SERPER_API_KEY",
        lambda query, k, key: {"json": {"q": query, "num": k}, "headers": {"X-API-KEY": key}},
        lambda answer: _at(answer, "organic"),
        ("snippet",),
        link="link",
    ),
    "tavily": Provider(
        "https://api.tavily.com/search",
        "TAVILY_API_KEY",
        lambda query, k, key: {
            "json": {"query": query, "max_results": min(k, 20)},
            "headers": {"Authorization": f"Bearer {key}"},
        },
        lambda answer: _at(answer, "results"),
        ("content",),
        longest=400,
    ),
    "brave": Provider(
        "https://api.search.brave.com/res/v1/web/search",
        "BRAVE_API_KEY",
        lambda query, k, key: {"params": {"q": query, "count": min(k, 20)}, "headers": {"X-Subscription-Token": key}},
        lambda answer: _at(answer, "web", "results"),
        ("description", "extra_snippets"),
        rate=1.0,
        longest=400,
        method="GET",
    ),
    "searxng": Provider(
        "",
        "",
        lambda query, k, key: {"params": {"q": query, "format": "json"}},
        lambda answer: _at(answer, "results"),
        ("content",),
        rate=5.0,
        method="GET",
    ),
}


@dataclass(slots=True)
class SharedRequest:
    """One query on its way to the provider, for `users` callers. `sent`: the provider was asked."""

    task: asyncio.Task[list[Passage]] | None = None
    users: int = 0
    sent: bool = False


class WebSearch:
    """One provider. `url` replaces its address, `rate` its requests per second; `cache` is auto, disk, redis or none."""

    name = "web"

    def __init__(
        self,
        provider: str,
        *,
        url: str | None = None,
        rate: float | None = None,
        timeout_s: float = 10.0,
        deadline_s: float = 60.0,
        retries: int = 4,
        retry_s: float = 0.5,
        cache: str = "auto",
        ttl_s: float = 7 * 86_400.0,
    ) -> None:
        if provider not in PROVIDERS:
            raise ConfigError(f"no web search is called {provider!r}; there are {', '.join(PROVIDERS)}")
        self.provider, self._row = provider, PROVIDERS[provider]
        self._key = os.environ.get(self._row.key, "").strip() if self._row.key else ""
        if self._row.key and not self._key:
            raise ConfigError(f"web search by {provider} needs a key: set {self._row.key}")
        base = url or self._row.url or os.environ.get("SEARXNG_URL", "")
        if not base:
            raise ConfigError(f"web search by {provider} needs the address of a server: set SEARXNG_URL")
        address = urlsplit(base)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ConfigError(f"the address of {provider} must look like https://host")
        if timeout_s <= 0 or retries < 0 or retry_s < 0 or (rate is not None and not rate > 0):
            raise ConfigError("web search: timeout_s and rate are above 0, retries and retry_s not below 0")
        check_deadline(deadline_s, "web search")
        self._url = base if provider != "searxng" or base.endswith("/search") else f"{base.rstrip('/')}/search"
        self._http = HttpClient(self._url, secret=self._key, timeout_s=timeout_s, max_body=MAX_ANSWER, max_connections=100)
        self._policy = RetryPolicy(retries=retries, pause_s=retry_s, max_pause_s=20.0, deadline_s=deadline_s)
        # The answer takes time too: a turn in the last moments before the deadline would be wasted.
        self._latest_turn_s = deadline_s - min(timeout_s, deadline_s) / 4
        self._limit = RateLimit(rate or self._row.rate)
        self._cache: Cache | None = open_cache(cache, ttl_s)
        self._in_flight: dict[str, SharedRequest] = {}
        self._by_id: OrderedDict[str, Passage] = OrderedDict()
        self.requests = self.remembered = 0

    def __repr__(self) -> str:
        return f"WebSearch({self.provider!r})"

    async def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        check_k(k)
        results = await asyncio.gather(*(self._shared(query, k) for query in queries))
        return [[Hit(passage, 1 / rank) for rank, passage in enumerate(passages, 1)] for passages in results]

    async def get(self, id: str) -> Passage | None:  # noqa: A002
        return self._by_id.get(id)

    async def close(self) -> None:
        tasks = [request.task for request in self._in_flight.values() if request.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.close()
        if self._cache is not None:
            self._cache.close()

    async def _shared(self, query: str, k: int) -> list[Passage]:
        """The passages of a query. Callers that ask the same query at the same time share one request.

        The request is cancelled if all its callers are cancelled before it is sent. Once sent it is finished, and cached.
        """
        query = clean(query[: self._row.longest])
        key = sha256(json.dumps([self.provider, self._url, query, k]).encode()).hexdigest()
        request = self._in_flight.get(key)
        if request is None:
            request = self._in_flight[key] = SharedRequest()
            request.task = asyncio.create_task(self._found(request, key, query, k))
            request.task.add_done_callback(lambda done: self._finished(key, done))
        assert request.task is not None
        request.users += 1
        try:
            passages = await asyncio.shield(request.task)
        except asyncio.CancelledError:
            if request.users == 1 and not request.sent:
                self._in_flight.pop(key, None)
                request.task.cancel()
            raise
        finally:
            request.users -= 1
        for passage in passages:
            self._by_id[passage.id] = passage
            self._by_id.move_to_end(passage.id)
        while len(self._by_id) > MAX_KNOWN:
            self._by_id.popitem(last=False)
        return passages

    def _finished(self, key: str, task: asyncio.Task[list[Passage]]) -> None:
        request = self._in_flight.get(key)
        if request is not None and request.task is task:
            del self._in_flight[key]
        if not task.cancelled():
            task.exception()  # retrieved, or asyncio logs it if every caller was cancelled

    async def _found(self, request: SharedRequest, key: str, query: str, k: int) -> list[Passage]:
        if self._cache is not None and self._cache.usable:
            text = await run_in_thread(self._cache.get, key)
            if known := _passages(text):
                self.remembered += 1
                return known
        passages = self._read(await self._ask(request, query, k), k)
        # An empty answer may be a temporary failure of the provider, so it is not cached.
        if passages and self._cache is not None and self._cache.usable:
            rows = json.dumps([[each.id, each.title, each.text] for each in passages], ensure_ascii=False)
            await run_in_thread(self._cache.put, key, rows)
        return passages

    async def _ask(self, request: SharedRequest, query: str, k: int) -> list[dict[str, Any]]:
        """The results, after as many attempts as the retry policy allows."""
        last = ""
        until = asyncio.get_running_loop().time() + self._latest_turn_s

        async def attempt() -> list[dict[str, Any]]:
            nonlocal last
            await self._limit.take(until, again=request.sent)
            request.sent = True
            try:
                return await self._send(query, k)
            except Transient as failure:
                last = str(failure)
                if failure.wait_s is None:
                    raise
                # Retry-After holds for every chain, so the rate limit keeps it instead of this retry.
                self._limit.pause(failure.wait_s)
                raise Transient(last, 0.0) from None

        deadline_s = self._policy.deadline_s
        try:
            return await retry(attempt, self._policy)
        except TooLate as late:
            why = f"its turn would come in {late.seconds:.1f} s, with {deadline_s:g} s for a query in all"
            raise WorldError(f"{self.provider} is not asked: {why}{last and f' (the last time: {last})'}") from None
        except OutOfTime:
            raise WorldError(f"{self.provider} gave no answer within {deadline_s:g} s ({last})") from None
        except OutOfAttempts:
            raise WorldError(f"{self.provider} failed {self._policy.retries + 1} times, the last time: {last}") from None
        except Rejected as refused:
            if refused.status in (401, 403):
                settings = "to answer: its JSON format may be disabled (search.formats in settings.yml)"
                what = f"the key in {self._row.key}" if self._row.key else settings
                raise ConfigError(f"{self.provider} refused {what}: {refused}") from None
            raise WorldError(f"{self.provider} refused the query: {refused}") from None

    async def _send(self, query: str, k: int) -> list[dict[str, Any]]:
        """One attempt. Raises Transient or Rejected."""
        self.requests += 1
        answer = await self._http.send(self._row.method, self._url, **self._row.ask(query, k, self._key))
        try:
            return self._row.read(answer.json())
        except ValueError:
            raise Transient(f"the answer is not JSON: {self._http.reason(answer)}") from None
        except _NoResults as problem:
            raise Transient(self._http.hide(f"the answer is of no use: {problem}")[:MAX_REASON]) from None

    def _read(self, rows: list[dict[str, Any]], k: int) -> list[Passage]:
        passages = []
        for row in rows[:k]:
            link, title = str(row.get(self._row.link) or ""), str(row.get("title") or "")
            parts = [part for name in self._row.text for part in _several(row.get(name))]
            if link and (title or parts):
                short = sha256(link.encode("utf-8", "replace")).hexdigest()[:8]
                text = f"{self._http.hide(_TAGS.sub('', ' '.join(parts)))} ({self._http.hide(link)})".strip()
                passages.append(Passage(short, clean(self._http.hide(_TAGS.sub("", title))), clean(text)))
        return passages


def _passages(text: str | None) -> list[Passage] | None:
    """Passages from a cached text; None if it cannot be read."""
    try:
        return None if text is None else [Passage(*map(str, row)) for row in json.loads(text)]
    except (ValueError, TypeError):
        return None


def _several(value: object) -> list[str]:
    return [str(each) for each in value if each] if isinstance(value, list) else [str(value)] if value else []
