"""What the search server and its client agree on: addresses, limits, and passages as JSON.

    POST /search     {"queries": ["..."], "k": 3}    -> {"results": [[{"id", "title", "text", "score"}, ...], ...]}
    POST /retrieve   {"ids": ["276"]}                -> {"passages": [{"id", "title", "text"} or null]}
    GET  /health                                     -> {"status": "ok", "retriever": "bm25", "passages": 32940, ...}

Errors are {"error": "a sentence"}. 503 has a Retry-After header.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..retrieve.types import Hit, Passage

TOKEN_VARIABLE = "AGENTFLY_SEARCH_TOKEN"
DEFAULT_PORT = 8901
MAX_QUERIES = 256
"""Queries, or ids, of one request."""


@dataclass(slots=True)
class PendingSearch:
    """The queries of one caller, and the future of their hits."""

    queries: list[str]
    k: int
    result: asyncio.Future[list[list[Hit]]]


def take_batch(pending: deque[PendingSearch], max_queries: int) -> list[PendingSearch]:
    """Removes and returns searches from the front: at least one, then as many as fit into `max_queries`."""
    batch = [pending.popleft()]
    size = len(batch[0].queries)
    while pending and size + len(pending[0].queries) <= max_queries:
        batch.append(pending.popleft())
        size += len(batch[-1].queries)
    return batch


def resolve_batch(batch: list[PendingSearch], found: list[list[Hit]]) -> None:
    """Gives each search of a batch its share of the hits. The batch was ranked with the largest `k` in it."""
    rest = iter(found)
    for each in batch:
        hits = [next(rest)[: each.k] for _ in each.queries]
        if not each.result.done():  # done: its caller was cancelled
            each.result.set_result(hits)


def fail_batch(batch: list[PendingSearch], error: Exception) -> None:
    """Ends each search of a batch with an error."""
    for each in batch:
        if not each.result.done():
            each.result.set_exception(error)


def passage_to_json(passage: Passage) -> dict[str, str]:
    return {"id": passage.id, "title": passage.title, "text": passage.text}


def passage_from_json(found: Any) -> Passage:
    """Raises KeyError or TypeError if `found` is not a passage."""
    from ..retrieve.types import Passage

    return Passage(str(found["id"]), str(found["title"]), str(found["text"]))
