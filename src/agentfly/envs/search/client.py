"""A search server as a retriever: queries in, its answers out, tried again while it is busy or gone, within a deadline.

A broken connection, a silent server and a busy one (429, 5xx) are worth another try, with growing pauses; after the last it
is a WorldError, and the chain that asked has no reward and no blame. A wrong token is a ConfigError. The token comes from the
option or `AGENTFLY_SEARCH_TOKEN` and stands in no message. One client belongs to one event loop;
queries that its environments ask at the same time travel together.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ...errors import ConfigError, WorldError
from ...tools.text import clean
from .command import TOKEN_VARIABLE
from .retrieval import Hit, Passage, check_deadline, check_k
from .view import MAX_QUERY

AGAIN = (408, 429, 500, 502, 503, 504)
MAX_SENDERS, MAX_TOGETHER, MAX_QUERIES = 4, 64, 256
"""Requests at the same time, queries of one, and the most that a server takes in one."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(slots=True)
class _Waiting:
    queries: list[str]
    k: int
    result: asyncio.Future[list[list[Hit]]]


class ServerRetriever:
    """What `agentfly search-server` serves at `url`. `retries` follow the first try; `deadline_s` is for all of them."""

    name = "server"

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_s: float = 15.0,
        deadline_s: float = 90.0,
        retries: int = 5,
        retry_s: float = 0.2,
    ) -> None:
        address = urlsplit(url)
        if address.scheme not in ("http", "https") or not address.hostname or address.username or address.password:
            raise ConfigError(
                "the address of a search server looks like http://host:port, without a user name or password in it"
            )
        if timeout_s <= 0 or retries < 0 or retry_s < 0:
            raise ConfigError("a search server's timeout_s is above 0, its retries and retry_s not below 0")
        check_deadline(deadline_s, "a search server")
        self.url = url.rstrip("/")
        self._local = address.hostname in LOOPBACK
        self._token = token if token is not None else os.environ.get(TOKEN_VARIABLE, "")
        self._timeout_s, self._deadline_s, self._retries, self._retry_s = timeout_s, deadline_s, retries, retry_s
        self._client: Any = None
        self._waiting: deque[_Waiting] = deque()
        self._senders: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"ServerRetriever({self.url!r})"

    async def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        check_k(k)
        if not queries:
            return []
        waiting = _Waiting([clean(query[:MAX_QUERY]) for query in queries], k, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if len(self._senders) < MAX_SENDERS:
            sender = asyncio.create_task(self._send())
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)
        return await waiting.result

    async def _send(self) -> None:
        """Ask for what is waiting, as much as one request holds, until nothing is."""
        await asyncio.sleep(0)  # chains that ask in the same turn of the loop go together
        while self._waiting:
            batch = [self._waiting.popleft()]
            size = len(batch[0].queries)
            while self._waiting and size + len(self._waiting[0].queries) <= MAX_TOGETHER:
                batch.append(self._waiting.popleft())
                size += len(batch[-1].queries)
            try:
                found = await self._search([query for each in batch for query in each.queries], max(each.k for each in batch))
            except Exception as error:  # noqa: BLE001 - it belongs to those who asked
                for each in batch:
                    if not each.result.done():
                        each.result.set_exception(error)
                continue
            except asyncio.CancelledError:
                for each in batch:
                    each.result.cancel()
                raise
            rest = iter(found)
            for each in batch:
                hits = [next(rest)[: each.k] for _ in each.queries]
                if not each.result.done():
                    each.result.set_result(hits)

    async def _search(self, queries: list[str], k: int) -> list[list[Hit]]:
        found: list[list[Hit]] = []
        for start in range(0, len(queries), MAX_QUERIES):
            part = queries[start : start + MAX_QUERIES]
            said = await self._ask("/search", {"queries": part, "k": k})
            try:
                hits = [[Hit(_passage(hit), float(hit["score"])) for hit in hits] for hits in said["results"]]
                if len(hits) != len(part):
                    raise ValueError(f"{len(hits)} answers to {len(part)} queries")
            except (KeyError, TypeError, ValueError) as error:
                what = f"the search server at {self.url} answered something else than results: {error!r}"
                raise WorldError(what[:300]) from error
            found += hits
        return found

    async def get(self, id: str) -> Passage | None:  # noqa: A002
        said = await self._ask("/retrieve", {"ids": [id]})
        try:
            (found,) = said["passages"]
            return None if found is None else _passage(found)
        except (KeyError, TypeError, ValueError) as error:
            raise WorldError(
                f"the search server at {self.url} answered something else than a passage: {error!r}"[:300]
            ) from error

    async def close(self) -> None:
        senders = list(self._senders)
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)
        for each in self._waiting:
            each.result.cancel()
        self._waiting.clear()
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        last = ""
        try:
            async with asyncio.timeout(self._deadline_s):
                for attempt in range(self._retries + 1):
                    if attempt:
                        await asyncio.sleep(min(self._retry_s * 2 ** (attempt - 1), 10.0) * random.uniform(0.5, 1.0))
                    found, last = await self._once(path, body)
                    if found is not None:
                        return found
        except TimeoutError:
            raise WorldError(f"the search server at {self.url} gave no answer within {self._deadline_s:g} s ({last})") from None
        raise WorldError(f"the search server at {self.url} failed {self._retries + 1} times, the last time: {last}")

    async def _once(self, path: str, body: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
        """The answer, or why there is none and another try is worth it."""
        import httpx

        if self._client is None:
            self._client = httpx.AsyncClient(
                headers={"Authorization": f"Bearer {self._token}"} if self._token else {},
                timeout=self._timeout_s,
                limits=httpx.Limits(max_connections=64, max_keepalive_connections=64),
                trust_env=not self._local,  # a proxy of the machine must not catch what is meant for the machine itself
            )
        try:
            answer = await self._client.post(f"{self.url}{path}", json=body)
            said = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            return None, f"{type(error).__name__}: {error}".rstrip(": ")[:200]
        why = str(said.get("error", "") if isinstance(said, dict) else "")[:200]
        if answer.status_code == 200 and isinstance(said, dict):
            return said, ""
        if answer.status_code == 401:
            raise ConfigError(f"the search server at {self.url} wants another token: set {TOKEN_VARIABLE}")
        if answer.status_code in AGAIN:
            return None, f"HTTP {answer.status_code}: {why}"
        raise WorldError(f"the search server at {self.url} refused the request: HTTP {answer.status_code}: {why}")


def _passage(found: Any) -> Passage:
    return Passage(str(found["id"]), str(found["title"]), str(found["text"]))
