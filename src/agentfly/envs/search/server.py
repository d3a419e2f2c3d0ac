"""`agentfly search-server`: one retriever for many trainers, over HTTP, with batching.

    POST /search     {"queries": ["..."], "k": 3}    -> {"results": [[{"id", "title", "text", "score"}, ...], ...]}
    POST /retrieve   {"ids": ["276"]}                -> {"passages": [{"id", "title", "text"} or null]}
    GET  /health                                     -> {"status": "ok", "retriever": "bm25", "passages": 32940, ...}

Queries that arrive while a batch is being ranked are ranked together in the next one. Listens on loopback unless told
otherwise, and then only with a token (`AGENTFLY_SEARCH_TOKEN`). Bodies, batches, connections and waiting queries are bounded;
beyond them the answer is 413 or 503. `close` ends every connection, task and thread. Nothing of a query is kept or logged.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError
from .command import DEFAULT_PORT, TOKEN_VARIABLE
from .http import MAX_HEAD, HttpError, HttpRequest, answer, read_request
from .retrieval import MAX_K, Hit, LocalRetriever
from .view import MAX_QUERY

log = logging.getLogger(__name__)
LOOPBACK = ("127.0.0.1", "::1", "localhost")
MAX_QUERIES = 256
IDLE_S, READ_S = 300.0, 30.0


@dataclass(slots=True)
class _Waiting:
    queries: list[str]
    k: int
    result: asyncio.Future[list[list[Hit]]]


class SearchServer:
    """Serves one retriever. `await start()`, then `url`; `await close()`."""

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
        if host not in LOOPBACK and not token:
            raise ConfigError(f"a server that others can reach ({host}) needs a token: set {TOKEN_VARIABLE}")
        for name, value in (("max_batch", max_batch), ("max_waiting", max_waiting), ("max_connections", max_connections)):
            if value < 1:
                raise ConfigError(f"search-server: {name} must be at least 1, not {value}")
        self.retriever, self.host, self.port = retriever, host, port
        self.max_batch, self.max_waiting, self.max_connections, self.max_body = (
            max_batch,
            max_waiting,
            max_connections,
            max_body,
        )
        self.requests = self.queries = self.batches = 0
        self._token = (token or "").encode()
        self._waiting: list[_Waiting] = []
        self._num_waiting = 0
        self._arrived = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._batcher: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[Any]] = set()
        self._thread = ThreadPoolExecutor(1, "search-server")

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    async def start(self) -> SearchServer:
        try:
            self._server = await asyncio.start_server(self._connected, self.host, self.port, limit=MAX_HEAD)
        except OSError as error:
            self._thread.shutdown()
            raise ConfigError(f"cannot listen on {self.host}:{self.port}: {error.strerror or error}") from error
        self.port = self._server.sockets[0].getsockname()[1]
        self._batcher = asyncio.create_task(self._work())
        return self

    async def close(self) -> None:
        """Stop listening, end what is open, wait for the one batch that may be running."""
        if self._server is not None:
            self._server.close()
        tasks = [*self._connections, *([self._batcher] if self._batcher else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for each in self._waiting:
            each.result.cancel()
        self._waiting, self._server, self._batcher = [], None, None
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def __aenter__(self) -> SearchServer:
        return await self.start()

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # ---- connections

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= self.max_connections:
            writer.write(answer(503, {"error": "too many connections"}, keep=False))
            writer.close()
            return
        self._connections.add(task)
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, TimeoutError, asyncio.CancelledError):
            log.debug("a connection of the search server has ended")
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; whether the connection stays."""
        keep = True
        try:
            request = await read_request(reader, idle_s=IDLE_S, read_s=READ_S, max_body=self.max_body)
            if request is None:
                return False
            keep = request.keep
            self.requests += 1
            status, body = 200, await self._route(request)
        except HttpError as error:
            keep = keep and not error.ends
            status, body = error.status, {"error": str(error)}
        except Exception:
            log.exception("the search server failed on a request")
            status, body = 500, {"error": "the search server failed; its log says how"}
        writer.write(answer(status, body, keep=keep))
        async with asyncio.timeout(READ_S):
            await writer.drain()
        return keep

    async def _route(self, request: HttpRequest) -> dict[str, Any]:
        routes: dict[str, tuple[str, Callable[[HttpRequest], Any]]] = {
            "/health": ("GET", self._health),
            "/search": ("POST", self._search),
            "/retrieve": ("POST", self._retrieve),
        }
        if request.path not in routes:
            raise HttpError(404, f"there is no {request.path[:80]!r}; there are {', '.join(routes)}")
        method, handle = routes[request.path]
        if request.method != method:
            raise HttpError(405, f"{request.path} is asked with {method}")
        if self._token:
            given = request.headers.get("authorization", "").removeprefix("Bearer ").encode("utf-8", "replace")
            if not hmac.compare_digest(given, self._token):
                raise HttpError(401, f"the token is missing or wrong: set {TOKEN_VARIABLE} to the server's")
        found: dict[str, Any] = await handle(request)
        return found

    async def _health(self, request: HttpRequest) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in ("requests", "queries", "batches")}
        return {"status": "ok", "retriever": self.retriever.name, "passages": len(self.retriever.corpus), **counts}

    async def _search(self, request: HttpRequest) -> dict[str, Any]:
        asked = request.json()
        queries, k = _texts(asked, "queries", MAX_QUERY), asked.get("k", 3)
        if type(k) is not int or not 1 <= k <= MAX_K:
            raise HttpError(400, f"'k' must be a whole number from 1 to {MAX_K}")
        if self._num_waiting + len(queries) > self.max_waiting:
            raise HttpError(503, "too many queries are waiting; try again")
        waiting = _Waiting(queries, k, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._num_waiting += len(queries)
        self._arrived.set()
        found = await waiting.result
        return {"results": [[{**_shown(hit.passage), "score": hit.score} for hit in hits] for hits in found]}

    async def _retrieve(self, request: HttpRequest) -> dict[str, Any]:
        found = [await self.retriever.get(each) for each in _texts(request.json(), "ids", 2_000)]
        return {"passages": [None if passage is None else _shown(passage) for passage in found]}

    # ---- batches

    async def _work(self) -> None:
        """Rank what is waiting, as much together as fits in a batch; meanwhile more arrives."""
        while True:
            await self._arrived.wait()
            batch = self._take()
            error = await self._rank(batch)
            for each in batch if error is not None else ():
                # One request's query may be to blame: each has a try of its own before it is told.
                alone = await self._rank([each]) if len(batch) > 1 else error
                if alone is not None and not each.result.done():
                    each.result.set_exception(alone)

    async def _rank(self, batch: list[_Waiting]) -> Exception | None:
        """Answer a batch, or say why it cannot be."""
        queries = [query for each in batch for query in each.queries]
        k = max(each.k for each in batch)
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._thread, self.retriever.find, queries, k)
        except Exception as error:  # noqa: BLE001 - it belongs to those who asked
            return error
        self.batches += 1
        self.queries += len(queries)
        rest = iter(found)
        for each in batch:
            hits = [next(rest)[: each.k] for _ in each.queries]
            if not each.result.done():
                each.result.set_result(hits)
        return None

    def _take(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        size = 0
        while self._waiting and (not batch or size + len(self._waiting[0].queries) <= self.max_batch):
            batch.append(self._waiting.pop(0))
            size += len(batch[-1].queries)
        self._num_waiting -= size
        if not self._waiting:
            self._arrived.clear()
        return batch


def _shown(passage: Any) -> dict[str, str]:
    return {"id": passage.id, "title": passage.title, "text": passage.text}


def _texts(asked: dict[str, Any], name: str, longest: int) -> list[str]:
    found = asked.get(name)
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise HttpError(400, f"{name!r} must be a list of texts")
    if not 1 <= len(found) <= MAX_QUERIES:
        raise HttpError(400, f"{name!r} holds from 1 to {MAX_QUERIES} texts, not {len(found)}")
    if any(len(each) > longest for each in found):
        raise HttpError(400, f"a text of {name!r} has at most {longest} characters")
    return found
