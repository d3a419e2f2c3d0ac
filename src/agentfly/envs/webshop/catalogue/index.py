"""BM25 over a catalogue.

k1 0.9, b 0.4, and the inverse document frequency and rounded document lengths of Lucene, which the original shop uses; equal
scores keep the order of documents. The index is three arrays and a list of words. Stored in a folder, its arrays are mapped
into memory, so that processes share them.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...stored import Damaged

K1, B = 0.9, 0.4
FORMAT = 1
ARRAYS = ("starts", "documents", "weights")


class ProductIndex:
    """`weights[i]` is added to the score of `documents[i]`; term t has the entries from starts[t] to starts[t+1]."""

    def __init__(self, words: Sequence[str], num_documents: int, arrays: dict[str, NDArray[Any]]) -> None:
        self.numbers = {word: number for number, word in enumerate(words)}
        self.num_documents = num_documents
        self.starts, self.documents, self.weights = (arrays[name] for name in ARRAYS)
        whole = len(self.documents) == len(self.weights) == self.starts[-1]
        if len(self.starts) != len(self.numbers) + 1 or not whole:
            raise Damaged("the arrays of the index do not fit together")

    @classmethod
    def build(cls, documents: Iterable[Sequence[str]]) -> ProductIndex:
        """From the terms of each document, in order."""
        numbers: dict[str, int] = {}
        terms, owners, counts, lengths = array("i"), array("i"), array("i"), array("i")
        for owner, words in enumerate(documents):
            lengths.append(len(words))
            for word, count in Counter(words).items():
                terms.append(numbers.setdefault(word, len(numbers)))
                owners.append(owner)
                counts.append(count)
        num = len(lengths)
        term = np.frombuffer(terms, dtype=np.int32) if terms else np.zeros(0, np.int32)
        owner_of = np.frombuffer(owners, dtype=np.int32) if owners else np.zeros(0, np.int32)
        count_of = np.frombuffer(counts, dtype=np.int32) if counts else np.zeros(0, np.int32)
        order = np.argsort(term, kind="stable")
        df = np.bincount(term, minlength=len(numbers)).astype(np.float64)
        starts = np.concatenate([[0], np.cumsum(df)]).astype(np.int64)
        idf = np.log(1 + (num - df + 0.5) / (df + 0.5)).astype(np.float32)
        rounded = np.array([rounded_length(length) for length in lengths], dtype=np.float32)
        mean = np.float32(sum(lengths) / num) if num and sum(lengths) else np.float32(1)
        one = np.float32(1)
        norm = one / (np.float32(K1) * ((one - np.float32(B)) + np.float32(B) * rounded / mean))
        gain, freq = idf[term[order]], count_of[order].astype(np.float32)
        weights = gain - gain / (one + freq * norm[owner_of[order]])
        made: dict[str, NDArray[Any]] = {
            "starts": starts,
            "documents": owner_of[order].astype(np.int32),
            "weights": weights.astype(np.float32),
        }
        return cls(list(numbers), num, made)

    def search(self, terms: Sequence[str], limit: int) -> list[int]:
        """The best documents that hold at least one term, at most `limit`."""
        counts = Counter(number for term in terms if (number := self.numbers.get(term)) is not None)
        if not counts:
            return []
        slices = [(slice(int(self.starts[n]), int(self.starts[n + 1])), count) for n, count in counts.items()]
        if sum(part.stop - part.start for part, _ in slices) < self.num_documents // 8:
            return self._few(slices, limit)
        scores = np.zeros(self.num_documents, dtype=np.float64)
        for part, count in slices:
            scores[self.documents[part]] += self.weights[part] * np.float32(count)
        return _best(scores.astype(np.float32), None, limit)

    def _few(self, slices: list[tuple[slice, int]], limit: int) -> list[int]:
        """The same for rare terms, without an array of the size of the catalogue."""
        documents = np.concatenate([self.documents[part] for part, _ in slices])
        gains = np.concatenate([self.weights[part] * np.float32(count) for part, count in slices])
        names, places = np.unique(documents, return_inverse=True)
        scores = np.bincount(places, weights=gains, minlength=len(names))
        return _best(scores.astype(np.float32), names, limit)

    def save(self, folder: Path) -> None:
        for name in ARRAYS:
            np.save(folder / f"{name}.npy", getattr(self, name), allow_pickle=False)
        about = {"format": FORMAT, "documents": self.num_documents, "words": list(self.numbers)}
        (folder / "index.json").write_text(json.dumps(about, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def open(cls, folder: Path) -> ProductIndex:
        about = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        if about["format"] != FORMAT:
            raise Damaged(f"the index has the format {about['format']!r}, not {FORMAT}")
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ARRAYS}
        return cls(about["words"], about["documents"], arrays)


def _best(scores: NDArray[np.float32], names: NDArray[np.int32] | None, limit: int) -> list[int]:
    """Highest score first, equal scores in document order. `names` maps places in `scores` to documents."""
    if len(scores) > 4 * limit:
        least = np.partition(scores, -limit)[-limit]
        places = np.flatnonzero((scores >= least) & (scores > 0))
    else:
        places = np.flatnonzero(scores > 0)
    places = places[np.argsort(-scores[places], kind="stable")][:limit]
    return [int(place) for place in (places if names is None else names[places])]


def rounded_length(length: int) -> int:
    """A document's length as Lucene stores it in one byte: exact below 40, then with four significant bits."""
    free = 24
    if length < free:
        return length
    rest = length - free
    shift = max(0, rest.bit_length() - 4)
    return free + ((rest >> shift) << shift)
