"""The search server: one retriever for many trainers, over HTTP, with batching. `protocol.py` lists the requests.

Queries that arrive while a batch is ranked are ranked together in the next batch. The server listens on loopback; another host
needs a token. Bodies, batches, connections and waiting queries are bounded. Queries are neither stored nor logged.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ....errors import ConfigError
from ....net.guard import Guard
from ....net.server import WebServer
from ....plugins import missing_extra
from ..retrieve.passages import MAX_ID
from ..retrieve.types import MAX_K, LocalRetriever
from ..view import MAX_QUERY
from .protocol import (
    DEFAULT_PORT,
    MAX_QUERIES,
    TOKEN_VARIABLE,
    PendingSearch,
    fail_batch,
    passage_to_json,
    resolve_batch,
    take_batch,
)

RETRY_AFTER_S = 1
STOPPING = "the server is stopping"


class BadRequest(Exception):
    """A request that is answered with 400 and this sentence."""


class Unavailable(Exception):
    """A request that is answered with 503 and this sentence."""


class SearchServer:
    """Serves one retriever: `async with SearchServer(retriever) as server: server.url`.

    Raises ConfigError if `host` is not loopback and there is no token, MissingExtra without `agentfly[serve]`.
    """

    def __init__(
        self,
        retriever: LocalRetriever,
        *,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        token: str | None = None,
        max_batch: int = 64,
        max_waiting: int = 4096,
        max_connections: int = 1024,
        max_body: int = 1 << 20,
    ) -> None:
        for name, value in (("max_batch", max_batch), ("max_waiting", max_waiting), ("max_connections", max_connections)):
            if value < 1:
                raise ConfigError(f"search-server: {name} must be at least 1, not {value}")
        guard = Guard(host, token, cure=f"set {TOKEN_VARIABLE}")
        self.retriever = retriever
        self.requests = self.queries = self.batches = 0
        self.num_waiting = 0
        self._max_batch, self._max_waiting = max_batch, max_waiting
        self._pending: deque[PendingSearch] = deque()
        self._arrived = asyncio.Event()
        self._batcher: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "search-server")
        self.web = WebServer(self._app(), guard, host=host, port=port, max_connections=max_connections, max_body=max_body)

    @property
    def url(self) -> str:
        return self.web.url

    @property
    def port(self) -> int:
        return self.web.port

    async def start(self) -> SearchServer:
        """Listen. Raises ConfigError if the address cannot be bound."""
        self._batcher = asyncio.create_task(self._work())
        try:
            await self.web.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Stop listening, end every request and connection, and wait for the batch that is being ranked. Idempotent."""
        batcher, self._batcher = self._batcher, None
        if batcher is not None:
            batcher.cancel()
            await asyncio.wait([batcher])
        # Requests that wait for hits would keep their connections open until the server's closing deadline.
        fail_batch(list(self._pending), Unavailable(STOPPING))
        self._pending.clear()
        await self.web.close()
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def __aenter__(self) -> SearchServer:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- requests

    def _app(self) -> Any:
        try:
            from starlette.applications import Starlette
            from starlette.requests import Request
            from starlette.responses import JSONResponse, Response
            from starlette.routing import Route
        except ModuleNotFoundError as error:
            raise missing_extra("the search server", "starlette") from error

        def endpoint(handle: Any) -> Any:
            async def answer(request: Request) -> Response:
                self.requests += 1
                try:
                    return JSONResponse(await handle(_body(await request.body())))
                except BadRequest as error:
                    return JSONResponse({"error": str(error)}, 400)
                except Unavailable as error:
                    return JSONResponse({"error": str(error)}, 503, {"Retry-After": str(RETRY_AFTER_S)})

            return answer

        async def health(request: Request) -> Response:
            self.requests += 1
            counts = {"requests": self.requests, "queries": self.queries, "batches": self.batches}
            identity = {"retriever": self.retriever.name, "passages": len(self.retriever.corpus)}
            return JSONResponse({"status": "ok", **identity, **counts})

        routes = [
            Route("/health", health, methods=["GET"]),
            Route("/search", endpoint(self._search), methods=["POST"]),
            Route("/retrieve", endpoint(self._retrieve), methods=["POST"]),
        ]
        paths = ", ".join(route.path for route in routes)
        methods = {route.path: "GET" if route.path == "/health" else "POST" for route in routes}

        async def not_found(request: Request, _: Exception) -> Response:
            return JSONResponse({"error": f"there is no {request.url.path[:80]!r}; there are {paths}"}, 404)

        async def wrong_method(request: Request, _: Exception) -> Response:
            path = request.url.path
            return JSONResponse({"error": f"{path} is asked with {methods[path]}"}, 405, {"Allow": methods[path]})

        async def failed(request: Request, _: Exception) -> Response:
            return JSONResponse({"error": "the search server failed; its log says how"}, 500)

        app = Starlette(routes=routes, exception_handlers={404: not_found, 405: wrong_method, 500: failed})
        app.router.redirect_slashes = False
        return app

    async def _search(self, body: dict[str, Any]) -> dict[str, Any]:
        queries, k = _texts(body, "queries", MAX_QUERY), body.get("k", 3)
        if type(k) is not int or not 1 <= k <= MAX_K:
            raise BadRequest(f"'k' must be a whole number from 1 to {MAX_K}")
        if self._batcher is None:  # `close` has ended it: this search would wait until its connection is aborted
            raise Unavailable(STOPPING)
        if self.num_waiting + len(queries) > self._max_waiting:
            raise Unavailable("too many queries are waiting; try again")
        pending = PendingSearch(queries, k, asyncio.get_running_loop().create_future())
        self._pending.append(pending)
        self.num_waiting += len(queries)
        self._arrived.set()
        results = await pending.result
        return {"results": [[{**passage_to_json(hit.passage), "score": hit.score} for hit in hits] for hits in results]}

    async def _retrieve(self, body: dict[str, Any]) -> dict[str, Any]:
        passages = [await self.retriever.get(each) for each in _texts(body, "ids", MAX_ID)]
        return {"passages": [None if passage is None else passage_to_json(passage) for passage in passages]}

    # ---- batches

    async def _work(self) -> None:
        """Rank batches of waiting queries, one batch at a time."""
        while True:
            await self._arrived.wait()
            batch = take_batch(self._pending, self._max_batch)
            self.num_waiting -= sum(len(each.queries) for each in batch)
            if not self._pending:
                self._arrived.clear()
            try:
                error = await self._rank(batch)
                for each in batch if error is not None else ():
                    # One search of the batch may be the cause, so each is ranked alone before it fails.
                    alone = await self._rank([each]) if len(batch) > 1 else error
                    if alone is not None:
                        fail_batch([each], alone)
            finally:
                fail_batch(batch, Unavailable(STOPPING))  # has an effect only if `close` cancelled this task

    async def _rank(self, batch: list[PendingSearch]) -> Exception | None:
        """Rank a batch and answer it. Returns the error if that failed."""
        queries = [query for each in batch for query in each.queries]
        k = max(each.k for each in batch)
        try:
            results = await asyncio.get_running_loop().run_in_executor(self._thread, self.retriever.find, queries, k)
        except Exception as error:  # noqa: BLE001 - the requests of the batch fail with it
            return error
        self.batches += 1
        self.queries += len(queries)
        resolve_batch(batch, results)
        return None


def _body(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {str(error)[:100]}") from None
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object")
    return value


def _texts(body: dict[str, Any], name: str, longest: int) -> list[str]:
    texts = body.get(name)
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise BadRequest(f"{name!r} must be a list of strings")
    if not 1 <= len(texts) <= MAX_QUERIES:
        raise BadRequest(f"{name!r} holds from 1 to {MAX_QUERIES} texts, not {len(texts)}")
    if any(len(each) > longest for each in texts):
        raise BadRequest(f"a text of {name!r} has at most {longest} characters")
    return texts
