"""Dense retrieval: passages and queries as vectors, ranked by inner product.

The encoder is the directory of an embedding model (through transformers, see `embeddings.py`), or "hashing", which needs no
model. Vectors are computed once, stored on disk and memory-mapped. FAISS searches them if it is installed, else NumPy in
blocks, with the same results. The search is exhaustive.
"""

from __future__ import annotations

import importlib.util
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .... import plugins
from ....errors import AgentFlyError, ConfigError
from ...stored import Damaged, cache_root, key_of, stored
from .analysis import VERSION, words
from .corpus import CHECK_BYTES, WAIT_S, FileCorpus
from .types import Corpus, LocalRetriever, Ranking

FORMAT = 1
BLOCK = 65_536
BATCH = 64
PASSAGE_CHARACTERS = 4_000
PROBE = ("one", "two words", "a long text " * 400)
"""Texts that a model must encode in one batch before it is used: of different lengths, one longer than every limit."""


class Encoder(Protocol):
    """Maps texts to unit vectors. `key` is a fingerprint of everything that the vectors depend on."""

    key: str
    size: int

    def encode(self, texts: Sequence[str], *, query: bool) -> Any: ...


class HashingEncoder:
    """Hashes words and their trigrams into a vector. It needs no model, and compares spelling only."""

    def __init__(self, size: int = 256) -> None:
        self.size, self.key = size, f"hashing-{size}-{VERSION}"

    def encode(self, texts: Sequence[str], *, query: bool) -> Any:
        vectors = np.zeros((len(texts), self.size), dtype=np.float32)
        for row, text in enumerate(texts):
            for word in words(text):
                spelled = f"<{word}>"
                pieces = [spelled[at : at + 3] for at in range(len(spelled) - 2)]
                for piece, weight in [(word, 1.0), *((piece, 0.5 / len(pieces)) for piece in pieces)]:
                    code = zlib.crc32(piece.encode("utf-8", "replace"))
                    vectors[row, code % self.size] += weight if code >> 31 else -weight
        return unit(vectors)


class Dense(LocalRetriever):
    """Ranks passages by inner product. `library` is "faiss", "numpy", or None for FAISS if it is installed."""

    name = "dense"

    def __init__(self, corpus: Corpus, encoder: Encoder, *, library: str | None = None) -> None:
        super().__init__(corpus)
        self.encoder = encoder
        self.library = library or default_library()
        if self.library not in ("faiss", "numpy"):
            raise ConfigError(f"dense: no library is called {library!r}; there are faiss and numpy")
        self.vectors: Any
        if isinstance(corpus, FileCorpus) or not isinstance(encoder, HashingEncoder):
            key = key_of("dense", FORMAT, corpus.key, encoder.key)
            self.vectors = stored(
                cache_root() / "search" / f"dense-{key}",
                self._write,
                self._read,
                wait_s=WAIT_S,
                check=len(corpus) * encoder.size * 4 <= CHECK_BYTES,
            )
        else:
            self.vectors = np.concatenate(list(self._batches()))
        self._faiss = self._in_faiss() if self.library == "faiss" else None

    def rank(self, queries: Sequence[str], k: int) -> list[Ranking]:
        asked = self.encoder.encode(queries, query=True)
        wanted = min(k, len(self.vectors))
        if self._faiss is not None:
            scores, places = self._faiss.search(np.ascontiguousarray(asked, dtype=np.float32), wanted)
        else:
            scores, places = nearest(self.vectors, asked, wanted)
        return [
            [(int(place), float(score)) for place, score in zip(*row, strict=True) if place >= 0]
            for row in zip(places, scores, strict=True)
        ]

    def _batches(self) -> Any:
        for start in range(0, len(self.corpus), BATCH):
            batch = [self.corpus[place] for place in range(start, min(start + BATCH, len(self.corpus)))]
            texts = [f"{each.title}\n{each.text}".strip()[:PASSAGE_CHARACTERS] for each in batch]
            yield self.encoder.encode(texts, query=False)

    def _write(self, folder: Path) -> None:
        shape = (len(self.corpus), self.encoder.size)
        out = np.lib.format.open_memmap(folder / "vectors.npy", mode="w+", dtype=np.float32, shape=shape)
        row = 0
        for vectors in self._batches():
            out[row : row + len(vectors)] = vectors
            row += len(vectors)
        out.flush()

    def _read(self, folder: Path) -> Any:
        vectors = np.load(folder / "vectors.npy", mmap_mode="r")
        if vectors.shape != (len(self.corpus), self.encoder.size):
            raise Damaged(f"it holds {vectors.shape} vectors, not {(len(self.corpus), self.encoder.size)}")
        return vectors

    def _in_faiss(self) -> Any:
        try:
            import faiss
        except ModuleNotFoundError as error:
            raise plugins.missing_extra("searching vectors with FAISS", "faiss") from error
        index = faiss.IndexFlatIP(self.encoder.size)
        for start in range(0, len(self.vectors), BLOCK):
            index.add(np.ascontiguousarray(self.vectors[start : start + BLOCK]))
        return index


def nearest(vectors: Any, queries: Any, k: int) -> tuple[Any, Any]:
    """The k largest inner products of each query, computed in blocks; equal ones are ordered by position."""
    scores = np.full((len(queries), 0), -np.inf, dtype=np.float32)
    places = np.zeros((len(queries), 0), dtype=np.int64)
    for start in range(0, len(vectors), BLOCK):
        block = queries @ vectors[start : start + BLOCK].T
        here = np.broadcast_to(np.arange(start, start + block.shape[1]), block.shape)
        scores, places = np.concatenate([scores, block], axis=1), np.concatenate([places, here], axis=1)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        scores, places = np.take_along_axis(scores, order, axis=1), np.take_along_axis(places, order, axis=1)
    return scores, places


def unit(vectors: Any) -> Any:
    """Each row scaled to length 1; rows of zeros stay zero."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)


def open_encoder(model: str | None, **options: object) -> Encoder:
    """The encoder "hashing", or the embedding model in a directory. Raises ConfigError if it cannot encode texts."""
    if not model:
        raise ConfigError("dense retrieval needs `model`: the directory of an embedding model, or 'hashing'")
    if model == "hashing":
        if options:
            raise ConfigError(f"the encoder 'hashing' has no option {next(iter(options))!r}")
        return HashingEncoder()
    kind = plugins.resolve("encoders", "transformers")
    try:
        made: Encoder = kind(model, **options)
        vectors = made.encode(PROBE, query=True)
    except AgentFlyError:
        raise
    except Exception as error:
        what = " ".join(str(error).split())[:300]
        raise ConfigError(f"{model} cannot be used as an embedding model: {type(error).__name__}: {what}") from error
    if np.shape(vectors) != (len(PROBE), made.size) or not np.isfinite(vectors).all():
        raise ConfigError(f"{model} cannot be used as an embedding model: its vectors are not {made.size} finite numbers each")
    return made


def default_library() -> str:
    return "faiss" if importlib.util.find_spec("faiss") is not None else "numpy"
