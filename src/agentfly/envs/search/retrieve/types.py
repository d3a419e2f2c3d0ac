"""The types of retrieval: passages, hits, and the interfaces of a corpus and a retriever.

`Retriever` is what the environment and the server call. `LocalRetriever` is the base class of retrievers that rank a corpus in
this process. A retriever accepts any text as a query; it raises WorldError if the server or provider behind it fails.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ....aio.threads import run_in_thread
from ....errors import ConfigError
from ....tools.text import clean

MAX_DEADLINE_S = 100.0
"""The longest deadline of a server's client or a provider, retries included. The timeout of the tools is longer."""
MAX_K = 100
"""The most passages per query."""
INLINE = 200_000
"""Queries times passages up to which ranking takes less time than a thread switch."""


@dataclass(frozen=True, slots=True)
class Passage:
    """One entry of a corpus, or one page that a provider found."""

    id: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage and its score. Higher is better; scores are comparable within one query only."""

    passage: Passage
    score: float


class Corpus(Protocol):
    """Passages by position. `key` is a fingerprint of the content; stored indexes are named by it."""

    key: str

    def __len__(self) -> int: ...

    def __getitem__(self, place: int) -> Passage: ...

    def place_of(self, id: str) -> int | None: ...  # noqa: A002


@runtime_checkable
class Retriever(Protocol):
    """`search` returns at most `k` hits per query, best first. `get` returns None for an unknown id."""

    name: str

    async def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]: ...

    async def get(self, id: str) -> Passage | None: ...  # noqa: A002 - the name that models read

    async def close(self) -> None: ...


Ranking = list[tuple[int, float]]
"""Positions in the corpus with their scores, best first."""


class LocalRetriever(ABC):
    """Ranks a corpus in this process. Subclasses implement `rank`."""

    name = "local"

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus

    @abstractmethod
    def rank(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """At most `k` different positions per query, best first."""

    def find(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The hits of each query. Blocks."""
        check_k(k)
        if not queries:
            return []
        rankings = self.rank([clean(query) for query in queries], k)
        return [[Hit(self.corpus[place], score) for place, score in ranking] for ranking in rankings]

    async def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        if len(queries) * len(self.corpus) <= INLINE:
            return self.find(queries, k)
        hits: list[list[Hit]] = await run_in_thread(self.find, queries, k)
        return hits

    async def get(self, id: str) -> Passage | None:  # noqa: A002
        place = self.corpus.place_of(id)
        return None if place is None else self.corpus[place]

    async def close(self) -> None:  # noqa: B027 - memory maps are closed with the corpus
        """Release what the retriever holds."""


def check_deadline(deadline_s: float, owner: str) -> None:
    """Raises ConfigError unless the deadline is above 0 and at most MAX_DEADLINE_S."""
    if not 0 < deadline_s <= MAX_DEADLINE_S:
        raise ConfigError(
            f"{owner}: deadline_s is above 0 and at most {MAX_DEADLINE_S:g}, not {deadline_s!r}: the tools wait no longer"
        )


def check_k(k: int) -> None:
    """Raises ConfigError unless `k` is a whole number from 1 to MAX_K."""
    if type(k) is not int or not 1 <= k <= MAX_K:
        raise ConfigError(f"the number of passages per query is from 1 to {MAX_K}, not {k!r}")
