"""Web search through a provider: queries in, pages with their snippets out. Nothing but the provider is ever asked.

    serper  SERPER_API_KEY     tavily   TAVILY_API_KEY
    brave   BRAVE_API_KEY      searxng  SEARXNG_URL, a server of one's own

The key is read from the environment alone, so it is in no config file; it stands in no message, log or record, also where a
provider repeats it. Busy providers (429, 5xx) and broken connections are tried again within a deadline, then it is a
WorldError; a refused key is a ConfigError. Requests keep the provider's rate (`turns.py`): a query that would come too late is
refused at once. Answers that hold something are remembered (`web_cache.py`), and the same query asked by several chains at once
goes out once. `get` knows the pages that were found lately, as the provider gave them: pages themselves are not fetched.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from urllib.parse import quote, urlsplit

from ...errors import ConfigError, WorldError
from ...tools.text import clean
from ...tools.threads import run_in_thread
from .retrieval import Hit, Passage, check_deadline, check_k
from .turns import TooLate, Turns
from .web_cache import Cache, open_cache

log = logging.getLogger(__name__)
AGAIN = (408, 409, 425, 429, 500, 502, 503, 504, 529)
KEPT = 10_000
MAX_ANSWER = 4 << 20
SEEN, SHOWN = 8_192, 300
"""Of an answer that is of no use: bytes that are looked at, and characters that are told. The key is taken out in between."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")
_TAGS = re.compile(r"</?(?:b|strong|em|i|span|mark)[^>]{0,80}>")


@dataclass(frozen=True, slots=True)
class Provider:
    """How one is asked and read. `rate` is in requests per second, `longest` in characters of a query."""

    url: str
    key: str
    ask: Callable[[str, int, str], dict[str, Any]]
    read: Callable[[Any], list[dict[str, Any]]]
    text: tuple[str, ...]
    link: str = "url"
    rate: float = 10.0
    longest: int = 1_000
    method: str = "POST"


class _NoAnswer(Exception):
    """What came is JSON, but no list of results."""


def _at(answer: Any, *path: str) -> list[dict[str, Any]]:
    """The results; none where a provider left their field out. An empty answer that names a problem is no answer."""
    found = answer
    for name in path:
        if not isinstance(found, dict):
            raise _NoAnswer(f"something else than an object with {'.'.join(path)!r}")
        found = found.get(name)
        if found is None:
            break
    if not isinstance(found, list | None):
        raise _NoAnswer(f"{'.'.join(path)!r} is no list")
    for name in ("error", "errors", "unresponsive_engines") if not found else ():
        if answer.get(name):
            raise _NoAnswer(f"no results, but {name}: {json.dumps(answer[name])}")
    return [each for each in found or () if isinstance(each, dict)]


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
class _Flight:
    """A query on its way, for so many `users`; `sent` once the provider was asked."""

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
        self._local = address.hostname in LOOPBACK
        self._turns = Turns(rate or self._row.rate)
        self._timeout_s, self._deadline_s, self._retries, self._retry_s = timeout_s, deadline_s, retries, retry_s
        self._cache: Cache | None = open_cache(cache, ttl_s)
        self._flying: dict[str, _Flight] = {}
        self._known: OrderedDict[str, Passage] = OrderedDict()
        self._client: Any = None
        self.requests = self.remembered = 0

    def __repr__(self) -> str:
        return f"WebSearch({self.provider!r})"

    async def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        check_k(k)
        found = await asyncio.gather(*(self._shared(query, k) for query in queries))
        return [[Hit(passage, 1 / rank) for rank, passage in enumerate(passages, 1)] for passages in found]

    async def get(self, id: str) -> Passage | None:  # noqa: A002
        return self._known.get(id)

    async def close(self) -> None:
        tasks = [flight.task for flight in self._flying.values() if flight.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()
        if self._cache is not None:
            self._cache.close()

    async def _shared(self, query: str, k: int) -> list[Passage]:
        """One request for all who ask the same at the same time; one who leaves does not take it from the others.

        A query that everybody has left before it was sent is not sent; one that was sent is finished and remembered.
        """
        query = clean(query[: self._row.longest])
        key = sha256(json.dumps([self.provider, self._url, query, k]).encode()).hexdigest()
        flight = self._flying.get(key)
        if flight is None:
            flight = self._flying[key] = _Flight()
            flight.task = asyncio.create_task(self._found(flight, key, query, k))
            flight.task.add_done_callback(lambda done: self._landed(key, done))
        assert flight.task is not None
        flight.users += 1
        try:
            passages = await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            if flight.users == 1 and not flight.sent:
                self._flying.pop(key, None)
                flight.task.cancel()
            raise
        finally:
            flight.users -= 1
        for passage in passages:
            self._known[passage.id] = passage
            self._known.move_to_end(passage.id)
        while len(self._known) > KEPT:
            self._known.popitem(last=False)
        return passages

    def _landed(self, key: str, task: asyncio.Task[list[Passage]]) -> None:
        flight = self._flying.get(key)
        if flight is not None and flight.task is task:
            del self._flying[key]
        if not task.cancelled():
            task.exception()  # seen, also where everybody who asked has left

    async def _found(self, flight: _Flight, key: str, query: str, k: int) -> list[Passage]:
        if self._cache is not None and self._cache.usable:
            text = await run_in_thread(self._cache.get, key)
            if known := _passages(text):
                self.remembered += 1
                return known
        passages = self._read(await self._ask(flight, query, k), k)
        # Nothing found may be a provider's bad hour: it is asked again the next time.
        if passages and self._cache is not None and self._cache.usable:
            rows = json.dumps([[each.id, each.title, each.text] for each in passages], ensure_ascii=False)
            await run_in_thread(self._cache.put, key, rows)
        return passages

    async def _ask(self, flight: _Flight, query: str, k: int) -> list[dict[str, Any]]:
        last = ""
        # An answer takes time too: a turn in the last moments would be wasted.
        until = asyncio.get_running_loop().time() + self._deadline_s - min(self._timeout_s, self._deadline_s) / 4
        try:
            async with asyncio.timeout(self._deadline_s):
                for attempt in range(self._retries + 1):
                    await self._turns.take(until, again=attempt > 0)
                    flight.sent = True
                    answer, last, wait_s = await self._once(query, k)
                    if answer is not None:
                        return answer
                    if wait_s is not None:
                        # It said how long it wants to be left alone: that holds for everybody who asks it.
                        self._turns.rest(wait_s)
                    elif attempt < self._retries:
                        await asyncio.sleep(min(self._retry_s * 2**attempt, 20.0) * random.uniform(0.5, 1.0))
        except TooLate as late:
            why = f"its turn would come in {late.seconds:.1f} s, with {self._deadline_s:g} s for a query in all"
            raise WorldError(f"{self.provider} is not asked: {why}{last and f' (the last time: {last})'}") from None
        except TimeoutError:
            raise WorldError(f"{self.provider} gave no answer within {self._deadline_s:g} s ({last})") from None
        raise WorldError(f"{self.provider} failed {self._retries + 1} times, the last time: {last}")

    async def _once(self, query: str, k: int) -> tuple[list[dict[str, Any]] | None, str, float | None]:
        """The results; or None, why, and how long the provider wants to be left alone."""
        import httpx

        if self._client is None:
            self._client = httpx.AsyncClient(timeout=self._timeout_s, trust_env=not self._local, follow_redirects=False)
        self.requests += 1
        try:
            asked = self._row.ask(query, k, self._key)
            async with self._client.stream(self._row.method, self._url, **asked) as answer:
                body = b""
                async for chunk in answer.aiter_bytes():
                    body += chunk
                    if len(body) > MAX_ANSWER:
                        raise WorldError(f"{self.provider} answered with more than {MAX_ANSWER >> 20} MB")
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            return None, self._safe(f"{type(error).__name__}: {error}".rstrip(": ")), None
        text = self._safe(" ".join(body[:SEEN].decode("utf-8", "replace").split()))[:SHOWN]
        status = answer.status_code
        if status in (401, 403):
            own = "to answer: its JSON format may be disabled (search.formats in settings.yml)"
            what = f"the key in {self._row.key}" if self._row.key else own
            raise ConfigError(f"{self.provider} refused {what}: HTTP {status}: {text}")
        if status in AGAIN:
            return None, f"HTTP {status}: {text}", _seconds(answer.headers.get("retry-after"))
        if status != 200:
            raise WorldError(f"{self.provider} refused the query: HTTP {status}: {text}")
        try:
            return self._row.read(json.loads(body)), "", None
        except (ValueError, RecursionError):
            return None, f"the answer is not JSON: {text}", None
        except _NoAnswer as problem:
            return None, self._safe(f"the answer is of no use: {problem}")[:SHOWN], None

    def _read(self, rows: list[dict[str, Any]], k: int) -> list[Passage]:
        passages = []
        for row in rows[:k]:
            link, title = str(row.get(self._row.link) or ""), str(row.get("title") or "")
            parts = [part for name in self._row.text for part in _several(row.get(name))]
            if link and (title or parts):
                short = sha256(link.encode("utf-8", "replace")).hexdigest()[:8]
                text = f"{self._safe(_TAGS.sub('', ' '.join(parts)))} ({self._safe(link)})".strip()
                passages.append(Passage(short, clean(self._safe(_TAGS.sub("", title))), clean(text)))
        return passages

    def _safe(self, text: str) -> str:
        """Without the key, however it got there."""
        for form in {self._key, quote(self._key, safe="")} if self._key else ():
            text = text.replace(form, "***")
        return text


def _passages(text: str | None) -> list[Passage] | None:
    """What a cache gave; None where it gave nothing that can be read."""
    try:
        return None if text is None else [Passage(*map(str, row)) for row in json.loads(text)]
    except (ValueError, TypeError):
        return None


def _several(value: Any) -> list[str]:
    return [str(each) for each in value if each] if isinstance(value, list) else [str(value)] if value else []


def _seconds(header: str | None) -> float | None:
    try:
        return min(max(float(header), 0.0), 60.0) if header else None
    except ValueError:  # a date; our own pause will do
        return None
