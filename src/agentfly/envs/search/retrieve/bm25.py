"""BM25 over a corpus, in NumPy.

The index holds the score of every word in every passage (Lucene's variant; Robertson and Zaragoza 2009; computed at indexing
time as in arXiv:2407.03618), so a query only adds columns. Passages with equal scores are ordered by position. The index of a
file is stored on disk and memory-mapped; the index of a generated corpus is built in memory. A title counts twice.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ....errors import ConfigError, DataError
from ...stored import cache_root, key_of, stored
from .analysis import VERSION, words
from .corpus import CHECK_BYTES, WAIT_S, FileCorpus, texts_of
from .types import Corpus, LocalRetriever, Passage, Ranking

K1, B = 1.2, 0.75
FORMAT = 2
MAX_WORDS = 256
"""Distinct words of a query that are searched for; further words are ignored."""
PARTS = ("data", "indices", "indptr")


class Bm25(LocalRetriever):
    """Ranks passages by the words that they share with the query."""

    name = "bm25"

    def __init__(self, corpus: Corpus, *, k1: float = K1, b: float = B) -> None:
        super().__init__(corpus)
        if not 0 < k1 < 100 or not 0 <= b <= 1:
            raise ConfigError(f"bm25: k1 must be above 0 and b from 0 to 1, not {k1} and {b}")
        self.index: Bm25Index
        if isinstance(corpus, FileCorpus):
            key = key_of("bm25", FORMAT, VERSION, corpus.key, k1, b)
            self.index = stored(
                cache_root() / "search" / f"bm25-{key}",
                lambda folder: Bm25Index.build(texts_of(corpus), k1, b).save(folder),
                Bm25Index.load,
                wait_s=WAIT_S,
                check=len(corpus.lines) <= CHECK_BYTES,
            )
        else:
            self.index = Bm25Index.build(texts_of(corpus), k1, b)

    def rank(self, queries: Sequence[str], k: int) -> list[Ranking]:
        return [best(self.index.scores(list(dict.fromkeys(words(query)))[:MAX_WORDS]), k) for query in queries]


class Bm25Index:
    """A sparse matrix of scores, one column per word: `indptr` bounds the column of a word in `indices` and `data`."""

    def __init__(self, data: Any, indices: Any, indptr: Any, vocabulary: dict[str, int], size: int) -> None:
        self.data, self.indices, self.indptr = data, indices, indptr
        self.vocabulary, self.size = vocabulary, size

    @classmethod
    def build(cls, passages: Iterable[Passage], k1: float, b: float) -> Bm25Index:
        """Raises DataError if no passage contains a word."""
        vocabulary: dict[str, int] = {}
        terms, places, counts, sizes = array("I"), array("I"), array("I"), array("I")
        for place, passage in enumerate(passages):
            title = words(passage.title)
            every = (*title, *title, *words(passage.text))
            for word, count in Counter(every).items():
                terms.append(vocabulary.setdefault(word, len(vocabulary)))
                places.append(place)
                counts.append(count)
            sizes.append(len(every))
        if not vocabulary:
            raise DataError("no passage of the corpus contains a searchable word")
        which, where = np.frombuffer(terms, dtype=np.uint32), np.frombuffer(places, dtype=np.uint32)
        times = np.frombuffer(counts, dtype=np.uint32).astype(np.float64)
        lengths = np.frombuffer(sizes, dtype=np.uint32).astype(np.float64)
        frequency = np.bincount(which, minlength=len(vocabulary))
        rarity = np.log(1 + (len(lengths) - frequency + 0.5) / (frequency + 0.5))
        data = rarity[which] * times / (k1 * (1 - b + b * lengths[where] / lengths.mean()) + times)
        order = np.argsort(which, kind="stable")
        indptr = np.concatenate([[0], np.cumsum(frequency)]).astype(np.int64)
        return cls(data[order].astype(np.float32), where[order].astype(np.int32), indptr, vocabulary, len(lengths))

    @classmethod
    def load(cls, folder: Path) -> Bm25Index:
        data, indices, indptr = (np.load(folder / f"{part}.npy", mmap_mode="r") for part in PARTS)
        vocabulary = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))
        return cls(data, indices, indptr, vocabulary["words"], vocabulary["size"])

    def save(self, folder: Path) -> None:
        for part, array_ in zip(PARTS, (self.data, self.indices, self.indptr), strict=True):
            np.save(folder / f"{part}.npy", array_)
        text = json.dumps({"words": self.vocabulary, "size": self.size}, ensure_ascii=False)
        (folder / "vocabulary.json").write_text(text, encoding="utf-8")

    def scores(self, query: Sequence[str]) -> Any:
        """The score of every passage for the distinct words of a query."""
        total = np.zeros(self.size, dtype=np.float32)
        for word in query:
            term = self.vocabulary.get(word)
            if term is not None:
                column = slice(int(self.indptr[term]), int(self.indptr[term + 1]))
                total[self.indices[column]] += self.data[column]
        return total


def best(scores: Any, k: int) -> Ranking:
    """The positions of the k highest scores above 0; equal scores are ordered by position."""
    if len(scores) > k:
        bar = np.partition(scores, len(scores) - k)[len(scores) - k]
        places = np.flatnonzero(scores >= max(bar, np.finfo(np.float32).tiny))
    else:
        places = np.flatnonzero(scores > 0)
    order = np.argsort(-scores[places], kind="stable")[:k]
    return [(int(places[at]), float(scores[places[at]])) for at in order]
