"""What a retriever is: queries in, passages with scores out; an id in, its passage out.

`Retriever` is the interface that the environment, the server and the hybrid know. `LocalRetriever` is the base of those that
rank a corpus in this process: they say how to rank, and it turns places into passages, off the event loop where the work is
long. A retriever never fails because of what a query holds; it raises WorldError where what stands behind it is gone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ...errors import ConfigError
from ...tools.text import clean
from ...tools.threads import run_in_thread

if TYPE_CHECKING:
    from .corpus import Corpus

MAX_DEADLINE_S = 100.0
"""The most that an answer of a server or provider may take with all its retries; the tool's own time is a little longer."""
MAX_K = 100
"""The most passages of one query."""
INLINE = 200_000
"""Queries times passages up to which ranking is quicker than handing it to a thread and back."""


@dataclass(frozen=True, slots=True)
class Passage:
    """One entry of a corpus, or one page that a provider found (its id is then the address)."""

    id: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage and how well it fits: higher is better, and comparable within one query only."""

    passage: Passage
    score: float


@runtime_checkable
class Retriever(Protocol):
    """`search` answers all queries together, each with at most `k` hits, the best first; `get` is None for an unknown id."""

    name: str

    async def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]: ...

    async def get(self, id: str) -> Passage | None: ...  # noqa: A002 - it is the word that models read

    async def close(self) -> None: ...


Ranking = list[tuple[int, float]]
"""Places in the corpus with their scores, the best first."""


class LocalRetriever(ABC):
    """Ranks a corpus that is here."""

    name = "local"

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus

    @abstractmethod
    def rank(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """The best places for each query, at most `k`, none of them twice."""

    def find(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The same as passages. Blocks."""
        check_k(k)
        if not queries:
            return []
        rankings = self.rank([clean(query) for query in queries], k)
        return [[Hit(self.corpus[place], score) for place, score in ranking] for ranking in rankings]

    async def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        if len(queries) * len(self.corpus) <= INLINE:
            return self.find(queries, k)
        found: list[list[Hit]] = await run_in_thread(self.find, queries, k)
        return found

    async def get(self, id: str) -> Passage | None:  # noqa: A002
        place = self.corpus.place_of(id)
        return None if place is None else self.corpus[place]

    async def close(self) -> None:  # noqa: B027 - most hold nothing: what is mapped is given back with the corpus
        """Give back what it holds."""


def check_deadline(deadline_s: float, whose: str) -> None:
    if not 0 < deadline_s <= MAX_DEADLINE_S:
        raise ConfigError(
            f"{whose}: deadline_s is above 0 and at most {MAX_DEADLINE_S:g}, not {deadline_s!r}: a tool waits no longer"
        )


def check_k(k: int) -> None:
    if type(k) is not int or not 1 <= k <= MAX_K:
        raise ConfigError(f"the number of passages of a query is from 1 to {MAX_K}, not {k!r}")
