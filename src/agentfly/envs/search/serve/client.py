"""A search server as a retriever, with retries within a deadline.

Broken connections and busy servers (429, 5xx) are tried again; after the last attempt the failure is a WorldError. A wrong
token is a ConfigError. The token is the option `token`, else `AGENTFLY_SEARCH_TOKEN`; no error repeats it. A client belongs to
one event loop. Queries that its environments ask at the same time travel in one request.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Sequence
from typing import Any

from ....errors import ConfigError, WorldError
from ....net.address import is_url
from ....net.client import HttpClient, OutOfAttempts, OutOfTime, Rejected, RetryPolicy, Transient, retry
from ....tools.text import clean
from ..retrieve.types import Hit, Passage, check_deadline, check_k
from ..view import MAX_QUERY
from .protocol import MAX_QUERIES, TOKEN_VARIABLE, PendingSearch, fail_batch, passage_from_json, resolve_batch, take_batch

MAX_SENDERS, MAX_TOGETHER = 4, 64
"""Concurrent requests, and queries that are joined in one of them."""


class ServerRetriever:
    """The retriever that `agentfly search-server` serves at `url`. `deadline_s` covers the first attempt and all `retries`."""

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
        if not is_url(url):
            raise ConfigError(
                "the address of a search server looks like http://host:port, without a user name or password in it"
            )
        if timeout_s <= 0 or retries < 0 or retry_s < 0:
            raise ConfigError("a search server's timeout_s is above 0, its retries and retry_s not below 0")
        check_deadline(deadline_s, "a search server")
        token = token if token is not None else os.environ.get(TOKEN_VARIABLE, "")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.url = url.rstrip("/")
        self._http = HttpClient(self.url, secret=token, headers=headers, timeout_s=timeout_s, max_connections=64)
        self._policy = RetryPolicy(retries=retries, pause_s=retry_s, max_pause_s=10.0, deadline_s=deadline_s)
        self._pending: deque[PendingSearch] = deque()
        self._senders: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"ServerRetriever({self.url!r})"

    async def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        check_k(k)
        if not queries:
            return []
        pending = PendingSearch([clean(query[:MAX_QUERY]) for query in queries], k, asyncio.get_running_loop().create_future())
        self._pending.append(pending)
        if len(self._senders) < MAX_SENDERS:
            sender = asyncio.create_task(self._send())
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)
        return await pending.result

    async def get(self, id: str) -> Passage | None:  # noqa: A002
        answer = await self._ask("/retrieve", {"ids": [id]})
        try:
            (passage,) = answer["passages"]
            return None if passage is None else passage_from_json(passage)
        except (KeyError, TypeError, ValueError) as error:
            raise self._unusable("a passage", error) from error

    async def close(self) -> None:
        senders = list(self._senders)
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)
        for each in self._pending:
            each.result.cancel()
        self._pending.clear()
        await self._http.close()

    async def _send(self) -> None:
        """Send batches of pending searches until none is left."""
        await asyncio.sleep(0)  # chains that search in the same tick of the loop join one batch
        while self._pending:
            batch = take_batch(self._pending, MAX_TOGETHER)
            try:
                queries = [query for each in batch for query in each.queries]
                resolve_batch(batch, await self._search(queries, max(each.k for each in batch)))
            except Exception as error:  # noqa: BLE001 - the searches of the batch fail with it
                fail_batch(batch, error)
            except asyncio.CancelledError:
                for each in batch:
                    each.result.cancel()
                raise

    async def _search(self, queries: list[str], k: int) -> list[list[Hit]]:
        results: list[list[Hit]] = []
        for start in range(0, len(queries), MAX_QUERIES):
            part = queries[start : start + MAX_QUERIES]
            answer = await self._ask("/search", {"queries": part, "k": k})
            try:
                hits = [[Hit(passage_from_json(hit), float(hit["score"])) for hit in hits] for hits in answer["results"]]
                if len(hits) != len(part):
                    raise ValueError(f"{len(hits)} answers to {len(part)} queries")
            except (KeyError, TypeError, ValueError) as error:
                raise self._unusable("results", error) from error
            results += hits
        return results

    async def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async def attempt() -> dict[str, Any]:
            answer = await self._http.send("POST", f"{self.url}{path}", json=body)
            try:
                decoded = answer.json()
            except ValueError as error:
                raise Transient(f"the answer is not JSON: {error}"[:200]) from None
            if not isinstance(decoded, dict):
                raise Transient("the answer is not a JSON object")
            return decoded

        who = f"the search server at {self.url}"
        try:
            return await retry(attempt, self._policy)
        except Rejected as refused:
            if refused.status == 401:
                raise ConfigError(f"{who} wants another token: set {TOKEN_VARIABLE}") from None
            raise WorldError(f"{who} refused the request: {refused}") from None
        except OutOfTime as last:
            raise WorldError(f"{who} gave no answer within {self._policy.deadline_s:g} s ({last})") from None
        except OutOfAttempts as last:
            raise WorldError(f"{who} failed {self._policy.retries + 1} times, the last time: {last}") from None

    def _unusable(self, wanted: str, error: Exception) -> WorldError:
        return WorldError(f"the search server at {self.url} answered something else than {wanted}: {error!r}"[:300])
