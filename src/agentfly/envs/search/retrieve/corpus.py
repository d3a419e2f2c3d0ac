"""A corpus: passages by position, and positions by id. Generated passages are in memory, files are memory-mapped.

A file is converted once and cached: one line per passage, the offset of each line, and a sorted table of hashed ids. A corpus
of millions of passages therefore takes little memory. A malformed row or a repeated id raises DataError with its line number. A
file that has changed is converted again.
"""

from __future__ import annotations

import json
import mmap
from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from ....errors import DataError
from ...stored import Damaged, cache_root, key_of, stamp_of, stored
from .passages import read_passages
from .types import Corpus, Passage

FORMAT = 2
CHECK_BYTES = 2 << 30
"""Up to this size a stored corpus or index is checked by its hashes when it is opened; above it by file sizes."""
WAIT_S = 86_400.0
"""How long a process waits for another that builds the same: vectors of millions of passages take hours."""


class MemoryCorpus:
    """Passages in memory."""

    def __init__(self, passages: Sequence[Passage], key: str = "") -> None:
        if not passages:
            raise DataError("a corpus needs at least one passage")
        self.passages = list(passages)
        self.key = key or key_of("memory", [[each.id, each.title, each.text] for each in self.passages])
        self._places: dict[str, int] = {}
        for place, passage in enumerate(self.passages):
            if self._places.setdefault(passage.id, place) != place:
                raise DataError(f"two passages have the id {passage.id!r}: {self._places[passage.id]} and {place}")

    def __len__(self) -> int:
        return len(self.passages)

    def __getitem__(self, place: int) -> Passage:
        return self.passages[place]

    def place_of(self, id: str) -> int | None:  # noqa: A002
        return self._places.get(id)


class FileCorpus:
    """A folder that `_write` created, memory-mapped."""

    def __init__(self, folder: Path, key: str) -> None:
        self.key = key
        self.starts: Any = np.load(folder / "starts.npy", mmap_mode="r")
        self.hashes: Any = np.load(folder / "hashes.npy", mmap_mode="r")
        self.places: Any = np.load(folder / "places.npy", mmap_mode="r")
        with open(folder / "passages.jsonl", "rb") as stream:
            self.lines = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        if len(self.starts) < 2 or int(self.starts[-1]) != len(self.lines):
            raise Damaged("its table of lines does not match its lines")

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, place: int) -> Passage:
        if not 0 <= place < len(self):
            raise IndexError(f"there are {len(self)} passages, and no place {place}")
        fields = json.loads(self.lines[int(self.starts[place]) : int(self.starts[place + 1])])
        return Passage(*fields)

    def place_of(self, id: str) -> int | None:  # noqa: A002
        wanted = _hash(id)
        at = int(np.searchsorted(self.hashes, np.uint64(wanted)))
        while at < len(self.hashes) and int(self.hashes[at]) == wanted:
            place = int(self.places[at])
            if self[place].id == id:
                return place
            at += 1
        return None


def open_corpus(path: str | Path) -> FileCorpus:
    """The corpus of a file of passages, converted once and cached. Raises DataError for a malformed file."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(f"{path}: no such file of passages")
    key = key_of("corpus", FORMAT, stamp_of(path))
    return stored(
        cache_root() / "search" / f"corpus-{key}",
        lambda folder: _write(path, folder),
        lambda folder: FileCorpus(folder, key),
        wait_s=WAIT_S,
        check=path.stat().st_size <= CHECK_BYTES,
    )


def texts_of(corpus: Corpus) -> Iterator[Passage]:
    return (corpus[place] for place in range(len(corpus)))


def _write(path: Path, folder: Path) -> None:
    starts, hashes, lines = array("Q", [0]), array("Q"), array("Q")
    with open(folder / "passages.jsonl", "wb") as out:
        for number, passage in read_passages(path):
            out.write(json.dumps([passage.id, passage.title, passage.text], ensure_ascii=False).encode() + b"\n")
            starts.append(out.tell())
            hashes.append(_hash(passage.id))
            lines.append(number)
    hashed = np.frombuffer(hashes, dtype=np.uint64)
    order = np.argsort(hashed, kind="stable")
    np.save(folder / "starts.npy", np.frombuffer(starts, dtype=np.uint64))
    np.save(folder / "hashes.npy", hashed[order])
    np.save(folder / "places.npy", order.astype(np.uint32 if len(order) < 1 << 32 else np.uint64))
    _refuse_duplicates(FileCorpus(folder, ""), lines, path)


def _refuse_duplicates(corpus: FileCorpus, lines: array[int], path: Path) -> None:
    same = np.flatnonzero(corpus.hashes[1:] == corpus.hashes[:-1])
    for at in same:
        one, other = (int(corpus.places[at + step]) for step in (0, 1))
        if corpus[one].id == corpus[other].id:
            raise DataError(f"{path}: lines {lines[one]} and {lines[other]} have the same id {corpus[one].id!r}")


def _hash(id: str) -> int:  # noqa: A002
    return int.from_bytes(blake2b(id.encode("utf-8", "replace"), digest_size=8).digest(), "little")
