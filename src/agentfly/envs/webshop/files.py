"""The published files of WebShop, read as a stream: a path in, records with their lines out.

    items_shuffle_1000.json, items_shuffle.json   a list of products as they were collected (the second has 5 GB)
    items_ins_v2_1000.json, items_ins_v2.json     per product: attributes and an instruction
    items_human_ins.json                          per product: instructions that people wrote
    documents.jsonl, products_1000.jsonl          a product a line, as the search engine is fed: {"id", "contents", "product"}
    title_nouns.json                              per product: the nouns of its name (optional; see nouns.py)

Each may be gzipped (`.gz`). A list or an object is never held whole, so the large file needs no more memory than the products
that are wanted of it. What cannot be read is refused with the file, the line and the number of the record.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ...errors import DataError

ITEMS = ("items_shuffle_1000.json", "items_shuffle.json", "products_1000.jsonl", "documents.jsonl")
EXTRAS = ("items_ins_v2_1000.json", "items_ins_v2.json")
HUMAN = ("items_human_ins.json",)
NOUNS = ("title_nouns.json",)
_CHUNK = 1 << 20
_MAX_RECORD = 64 << 20
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Files:
    """The files of one catalogue; `limit` is for the first so many records, as the original's `num_products`."""

    items: Path
    extras: Path | None
    human: Path | None
    nouns: Path | None
    limit: int | None = None

    @property
    def all(self) -> list[Path]:
        return [path for path in (self.items, self.extras, self.human, self.nouns) if path is not None]


def locate(where: str) -> Files:
    """`FOLDER` (or one with a folder `data`), `FILE` of products, or either with `#100000` for the first 100,000 records.

    Companions lie beside the file of products.
    """
    path_text, _, limit_text = where.partition("#")
    if limit_text and not (limit_text.isdigit() and int(limit_text)):
        raise DataError(f"{where}: after # comes the number of products to read, not {limit_text!r}")
    path = Path(path_text).expanduser()
    if not path.exists():
        raise DataError(
            f"{path}: no such file or folder: WEBSHOP_DATA is the folder with WebShop's files, or one of its products"
        )
    # A checkout of WebShop keeps them in `data`.
    items = (_first(path, ITEMS) or _first(path / "data", ITEMS)) if path.is_dir() else path
    if items is None:
        raise DataError(f"{path}: no products in this folder; it should hold one of {', '.join(ITEMS)} (or .gz)")
    folder = items.parent
    small = "1000" in items.name
    extras = _first(folder, EXTRAS if small else EXTRAS[::-1])
    return Files(items, extras, _first(folder, HUMAN), _first(folder, NOUNS), int(limit_text) if limit_text else None)


def read_items(path: Path) -> Iterator[tuple[int, Any]]:
    """The records of a file of products, each with its line."""
    name = path.name.removesuffix(".gz")
    if name.endswith((".jsonl", ".ndjson")):
        for line, record in _lines(path):
            yield line, record["product"] if isinstance(record, dict) and "product" in record else record
    else:
        for line, _, record in _Stream(path).records("["):
            yield line, record


def read_map(path: Path) -> Iterator[tuple[int, str, Any]]:
    """The entries of a file that maps product ids to something."""
    for line, key, value in _Stream(path).records("{"):
        assert key is not None
        yield line, key, value


def _first(folder: Path, names: tuple[str, ...]) -> Path | None:
    for name in names:
        for file in (folder / name, folder / f"{name}.gz"):
            if file.is_file():
                return file
    return None


def _open(path: Path) -> IO[str]:
    if path.name.endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8")
    return open(path, encoding="utf-8")


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    number = 0
    try:
        with _open(path) as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield number, json.loads(line)
    except (OSError, EOFError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: line {max(1, number)} cannot be read: {error}") from error


class _Stream:
    """A JSON list or object of any length, one member at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text, self.place, self.line, self.ended = "", 0, 1, False
        self.decode = json.JSONDecoder().raw_decode

    def records(self, opening: str) -> Iterator[tuple[int, str | None, Any]]:
        number = 0
        try:
            with _open(self.path) as self.stream:
                if self._next() != opening:
                    raise self._refuse(f"a file that begins with {opening!r} was expected")
                closing = "]" if opening == "[" else "}"
                self.place += 1
                while self._next() != closing:
                    number += 1
                    if number > 1:
                        self._take(",", number)
                    key = self._value(number) if opening == "{" else None
                    if key is not None:
                        self._take(":", number)
                    self._next()
                    line = self.line
                    yield line, key, self._value(number)
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise self._refuse(f"record {number + 1} cannot be read: {error}") from error

    def _next(self) -> str:
        """The next character that is not white space; the place is left on it. Empty at the end of the file."""
        while True:
            while self.place < len(self.text) and self.text[self.place] in _SPACE:
                self.line += self.text[self.place] == "\n"
                self.place += 1
            if self.place < len(self.text):
                return self.text[self.place]
            if not self._more():
                return ""

    def _take(self, sign: str, number: int) -> None:
        if self._next() != sign:
            found = repr(self.text[self.place : self.place + 20]) if self.place < len(self.text) else "the end of the file"
            raise self._refuse(f"record {number}: {sign!r} was expected, not {found}")
        self.place += 1

    def _value(self, number: int) -> Any:
        self._next()
        while True:
            try:
                value, end = self.decode(self.text, self.place)
            except (ValueError, RecursionError) as error:
                # It may only be cut at the end of what was read so far.
                if len(self.text) - self.place < _MAX_RECORD and self._more():
                    continue
                raise self._refuse(f"record {number} is not valid JSON: {error}") from error
            self.line += self.text.count("\n", self.place, end)
            self.place = end
            return value

    def _more(self) -> bool:
        chunk = "" if self.ended else self.stream.read(max(_CHUNK, len(self.text) - self.place))
        self.ended = not chunk
        self.text, self.place = self.text[self.place :] + chunk, 0
        return bool(chunk)

    def _refuse(self, what: str) -> DataError:
        return DataError(f"{self.path}: line {self.line}: {what}")
