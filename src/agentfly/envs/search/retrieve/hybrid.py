"""Hybrid retrieval: reciprocal rank fusion of several retrievers (Cormack, Clarke and Buettcher, SIGIR 2009).

A passage scores 1 / (60 + rank) in each ranking that contains it, so scores of different scales are never compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....errors import ConfigError
from .types import MAX_K, LocalRetriever, Ranking

SMOOTHING = 60
DEPTH = 4
"""Each retriever is asked for this many times more passages than are wanted."""


class Hybrid(LocalRetriever):
    """The fused ranking of retrievers over one corpus."""

    name = "hybrid"

    def __init__(self, *retrievers: LocalRetriever) -> None:
        if len(retrievers) < 2:
            raise ConfigError("a hybrid fuses at least two retrievers")
        if len({retriever.corpus.key for retriever in retrievers}) > 1:
            raise ConfigError("the retrievers of a hybrid must search the same corpus")
        super().__init__(retrievers[0].corpus)
        self.retrievers = retrievers

    def rank(self, queries: Sequence[str], k: int) -> list[Ranking]:
        rankings = [retriever.rank(queries, min(DEPTH * k, MAX_K)) for retriever in self.retrievers]
        return [fuse(each, k) for each in zip(*rankings, strict=True)]


def fuse(rankings: Sequence[Ranking], k: int) -> Ranking:
    """The best k of all rankings together; equal scores are ordered by position."""
    earned: dict[int, float] = {}
    for ranking in rankings:
        for rank, (place, _) in enumerate(ranking, 1):
            earned[place] = earned.get(place, 0.0) + 1 / (SMOOTHING + rank)
    return sorted(earned.items(), key=lambda pair: (-pair[1], pair[0]))[:k]
