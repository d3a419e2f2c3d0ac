"""BM25 over a corpus: the library bm25s where it is installed, the same formula in NumPy where it is not.

The score of a word in a passage is worked out when the index is made (Lucene's variant; Robertson and Zaragoza 2009, and
arXiv:2407.03618 for the eager form), so a query only adds up columns. Both ways give the same ranking: equal scores are ordered
by place. The index of a file of passages is kept on disk and mapped into memory; that of a generated corpus is made in memory.
A title counts twice. Words of a query beyond the first 256 different ones are not looked at. JAX is never loaded, though bm25s
asks for it: see `open_library`.
"""

from __future__ import annotations

import builtins
import importlib.util
import json
import sys
import threading
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from ...errors import ConfigError, DataError
from ..stored import cache_root, key_of, stored
from .analysis import VERSION, words
from .corpus import CHECK_BYTES, WAIT_S, Corpus, FileCorpus, texts_of
from .retrieval import LocalRetriever, Passage, Ranking

K1, B = 1.2, 0.75
FORMAT = 1
MAX_WORDS = 256
PARTS = ("data", "indices", "indptr")
SELECTION = "bm25s.selection"
_opening = threading.Lock()


class Index(Protocol):
    """Scores of all passages for the words of a query."""

    def scores(self, query: Sequence[str]) -> Any: ...

    def save(self, folder: Path) -> None: ...


class Bm25(LocalRetriever):
    """Words that a query and a passage share. `library` is "bm25s", "numpy", or None for what is there."""

    name = "bm25"

    def __init__(self, corpus: Corpus, *, k1: float = K1, b: float = B, library: str | None = None) -> None:
        super().__init__(corpus)
        if not 0 < k1 < 100 or not 0 <= b <= 1:
            raise ConfigError(f"bm25: k1 must be above 0 and b from 0 to 1, not {k1} and {b}")
        kind = LIBRARIES.get(library or default_library())
        if kind is None:
            raise ConfigError(f"bm25: no library is called {library!r}; there are {', '.join(LIBRARIES)}")
        if library == "bm25s" and default_library() != "bm25s":
            from ...plugins import missing_extra

            raise missing_extra("this index", "bm25s")
        self.index: Index
        if isinstance(corpus, FileCorpus):
            key = key_of("bm25", FORMAT, VERSION, corpus.key, k1, b, kind.__name__)
            self.index = stored(
                cache_root() / "search" / f"bm25-{key}",
                lambda folder: kind.made(texts_of(corpus), k1, b).save(folder),
                kind.opened,
                wait_s=WAIT_S,
                check=len(corpus.lines) <= CHECK_BYTES,
            )
        else:
            self.index = kind.made(texts_of(corpus), k1, b)

    def rank(self, queries: Sequence[str], k: int) -> list[Ranking]:
        return [best(self.index.scores(list(dict.fromkeys(words(query)))[:MAX_WORDS]), k) for query in queries]


def best(scores: Any, k: int) -> Ranking:
    """The places of the k highest scores above 0, equal ones in the order of their places."""
    if len(scores) > k:
        bar = np.partition(scores, len(scores) - k)[len(scores) - k]
        places = np.flatnonzero(scores >= max(bar, np.finfo(np.float32).tiny))
    else:
        places = np.flatnonzero(scores > 0)
    order = np.argsort(-scores[places], kind="stable")[:k]
    return [(int(places[at]), float(scores[places[at]])) for at in order]


def default_library() -> str:
    return "bm25s" if importlib.util.find_spec("bm25s") is not None else "numpy"


def open_library() -> Any:
    """bm25s, whose search for the highest scores does without JAX.

    Where JAX is installed, bm25s calls it while it is imported, and JAX then takes three quarters of the GPU's memory: in the
    trainer and in each worker. We pick the highest scores ourselves. So the one module that asks for JAX is loaded first, and
    told that there is none; everyone else's JAX stays as it is.
    """
    with _opening:
        found = importlib.util.find_spec("bm25s")
        if found is not None and "bm25s" not in sys.modules:
            for folder in found.submodule_search_locations or ():
                module = ModuleType(SELECTION)
                vars(module)["__builtins__"] = {**vars(builtins), "__import__": _without_jax}
                SourceFileLoader(SELECTION, str(Path(folder) / "selection.py")).exec_module(module)
                sys.modules[SELECTION] = module
        import bm25s

        return bm25s


def _without_jax(name: str, *rest: Any) -> Any:
    if name.partition(".")[0] == "jax":
        raise ImportError("JAX is left alone here")
    return builtins.__import__(name, *rest)


def counted(passages: Iterable[Passage]) -> tuple[list[array[int]], dict[str, int]]:
    """Each passage as the numbers of its words, and the number of each word."""
    vocabulary: dict[str, int] = {}
    numbered = []
    for passage in passages:
        title = words(passage.title)
        every = (*title, *title, *words(passage.text))
        numbered.append(array("I", (vocabulary.setdefault(word, len(vocabulary)) for word in every)))
    if not vocabulary:
        raise DataError("no passage of the corpus holds a word that could be searched for")
    return numbered, vocabulary


class LibraryIndex:
    """The index as bm25s keeps it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @classmethod
    def made(cls, passages: Iterable[Passage], k1: float, b: float) -> LibraryIndex:
        bm25s = open_library()
        numbered, vocabulary = counted(passages)
        inner = bm25s.BM25(method="lucene", k1=k1, b=b)
        inner.index(bm25s.tokenization.Tokenized(ids=numbered, vocab=vocabulary), show_progress=False)
        return cls(inner)

    @classmethod
    def opened(cls, folder: Path) -> LibraryIndex:
        bm25s = open_library()
        return cls(bm25s.BM25.load(str(folder), mmap=True, load_corpus=False, show_progress=False))

    def save(self, folder: Path) -> None:
        self.inner.save(str(folder), show_progress=False)

    def scores(self, query: Sequence[str]) -> Any:
        known = [word for word in query if word in self.inner.vocab_dict]
        if not known:
            return np.zeros(int(self.inner.scores["num_docs"]), dtype=np.float32)
        return self.inner.get_scores(known)


class PlainIndex:
    """The same sums with NumPy alone: one column of scores per word."""

    def __init__(self, data: Any, indices: Any, indptr: Any, vocabulary: dict[str, int], size: int) -> None:
        self.data, self.indices, self.indptr = data, indices, indptr
        self.vocabulary, self.size = vocabulary, size

    @classmethod
    def made(cls, passages: Iterable[Passage], k1: float, b: float) -> PlainIndex:
        numbered, vocabulary = counted(passages)
        terms, places, counts = array("I"), array("I"), array("I")
        for place, passage in enumerate(numbered):
            for term, count in Counter(passage).items():
                terms.append(term)
                places.append(place)
                counts.append(count)
        which, where = np.frombuffer(terms, dtype=np.uint32), np.frombuffer(places, dtype=np.uint32)
        times = np.frombuffer(counts, dtype=np.uint32).astype(np.float64)
        lengths = np.array([len(passage) for passage in numbered], dtype=np.float64)
        size, held = len(numbered), np.bincount(which, minlength=len(vocabulary))
        rarity = np.log(1 + (size - held + 0.5) / (held + 0.5))
        data = rarity[which] * times / (k1 * (1 - b + b * lengths[where] / lengths.mean()) + times)
        order = np.argsort(which, kind="stable")
        indptr = np.concatenate([[0], np.cumsum(held)]).astype(np.int64)
        return cls(data[order].astype(np.float32), where[order].astype(np.int32), indptr, vocabulary, size)

    @classmethod
    def opened(cls, folder: Path) -> PlainIndex:
        data, indices, indptr = (np.load(folder / f"{part}.npy", mmap_mode="r") for part in PARTS)
        known = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))
        return cls(data, indices, indptr, known["words"], known["size"])

    def save(self, folder: Path) -> None:
        for part in PARTS:
            np.save(folder / f"{part}.npy", getattr(self, part))
        text = json.dumps({"words": self.vocabulary, "size": self.size}, ensure_ascii=False)
        (folder / "vocabulary.json").write_text(text, encoding="utf-8")

    def scores(self, query: Sequence[str]) -> Any:
        total = np.zeros(self.size, dtype=np.float32)
        for word in query:
            term = self.vocabulary.get(word)
            if term is not None:
                column = slice(int(self.indptr[term]), int(self.indptr[term + 1]))
                total[self.indices[column]] += self.data[column]
        return total


LIBRARIES: dict[str, Any] = {"bm25s": LibraryIndex, "numpy": PlainIndex}
