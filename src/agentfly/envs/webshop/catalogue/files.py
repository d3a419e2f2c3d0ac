"""The published files of WebShop, read as a stream of records with line numbers.

    items_shuffle_1000.json, items_shuffle.json   a list of products as they were collected (the second has 5 GB)
    items_ins_v2_1000.json, items_ins_v2.json     per product: attributes and an instruction
    items_human_ins.json                          per product: instructions that people wrote
    documents.jsonl, products_1000.jsonl          one product per line, as a search document: {"id", "contents", "product"}
    title_nouns.json                              per product: the nouns of its name (optional; see nouns.py)

Each may be gzipped (`.gz`). A list or object is never held in memory whole. Errors name the file, the line and the record.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....errors import DataError
from ...jsonl import UNREADABLE, open_bytes, read_lines

ITEMS = ("items_shuffle_1000.json", "items_shuffle.json", "products_1000.jsonl", "documents.jsonl")
EXTRAS = ("items_ins_v2_1000.json", "items_ins_v2.json")
HUMAN = ("items_human_ins.json",)
NOUNS = ("title_nouns.json",)
_CHUNK = 1 << 20
_MAX_RECORD = 64 << 20
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Files:
    """The files of one catalogue. Only the first `limit` records are read, like `num_products` of the original."""

    items: Path
    extras: Path | None
    human: Path | None
    nouns: Path | None
    limit: int | None = None

    @property
    def all(self) -> list[Path]:
        return [path for path in (self.items, self.extras, self.human, self.nouns) if path is not None]


def locate(where: str) -> Files:
    """Find the files of `FOLDER` (or its folder `data`) or beside a `FILE` of products; `#100000` limits the records."""
    path_text, _, limit_text = where.partition("#")
    if limit_text and not (limit_text.isdecimal() and int(limit_text)):
        raise DataError(f"{where}: after # comes the number of products to read, not {limit_text!r}")
    path = Path(os.path.expanduser(path_text))
    if not os.path.exists(path):  # Path.exists raises for names that no file can have, os.path.exists does not
        raise DataError(
            f"{path}: no such file or folder: WEBSHOP_DATA is the folder with WebShop's files, or one of its products"
        )
    # A checkout of WebShop has them in `data`.
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
        for line, record in read_lines(path):
            yield line, record["product"] if isinstance(record, dict) and "product" in record else record
    else:
        for line, _, record in _Stream(path).records("["):
            yield line, record


def read_map(path: Path) -> Iterator[tuple[int, str, Any]]:
    """The entries of a file that maps product ids to something."""
    for line, key, value in _Stream(path).records("{"):
        if not isinstance(key, str):
            raise DataError(f"{path}: line {line}: a product's id is a text, not {key!r:.40}")
        yield line, key, value


def _first(folder: Path, names: tuple[str, ...]) -> Path | None:
    for name in names:
        for file in (folder / name, folder / f"{name}.gz"):
            if file.is_file():
                return file
    return None


class _Stream:
    """A JSON list or object of any length, one member at a time.

    If a part of the file cannot be read, the text before it is used first, so that the error names the right line and record.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text, self.place, self.line, self.ended = "", 0, 1, False
        self.before = 0
        """Number of characters of the current line before `text`."""
        self.number = 1
        self.fault: Exception | None = None
        self.decode = json.JSONDecoder().raw_decode
        self.decoder = codecs.getincrementaldecoder("utf-8")()

    def records(self, opening: str) -> Iterator[tuple[int, Any, Any]]:
        try:
            stream = open_bytes(self.path)
        except OSError as error:
            raise self._refuse(f"record 1 cannot be read: {error}") from error
        with stream as self.stream:
            if self._next() != opening:
                raise self._refuse(f"a file that begins with {opening!r} was expected")
            closing = "]" if opening == "[" else "}"
            self.place += 1
            while self._next() != closing:
                if self.number > 1:
                    self._take(",")
                key = None
                if opening == "{":
                    key = self._value()
                    self._take(":")
                self._next()
                line = self.line
                yield line, key, self._value()
                self.number += 1
            self.place += 1
            if self._next():
                raise self._refuse(f"the file should end after {closing!r}, not go on with {self._found()}")

    def _next(self) -> str:
        """The next character that is not white space, without consuming it. Empty at the end of the file."""
        while True:
            while self.place < len(self.text) and self.text[self.place] in _SPACE:
                self.line += self.text[self.place] == "\n"
                self.place += 1
            if self.place < len(self.text):
                return self.text[self.place]
            if not self._more():
                return ""

    def _take(self, sign: str) -> None:
        if self._next() != sign:
            raise self._refuse(f"record {self.number}: {sign!r} was expected, not {self._found()}")
        self.place += 1

    def _value(self) -> Any:
        self._next()
        while True:
            try:
                value, end = self.decode(self.text, self.place)
            except (ValueError, RecursionError) as error:
                said = str(error)
                if isinstance(error, json.JSONDecodeError):
                    line, column = self._position(error.pos)
                    said = f"{error.msg}: line {line} column {column}"
                # The value may continue in the next chunk.
                if len(self.text) - self.place < _MAX_RECORD and self._more():
                    continue
                raise self._refuse(f"record {self.number} is not valid JSON: {said}") from error
            self.line += self.text.count("\n", self.place, end)
            self.place = end
            return value

    def _more(self) -> bool:
        chunk = "" if self.ended else self._read(max(_CHUNK, len(self.text) - self.place))
        self.ended = not chunk
        self.before = self._position(self.place)[1] - 1
        self.text, self.place = self.text[self.place :] + chunk, 0
        return bool(chunk)

    def _read(self, size: int) -> str:
        """The next piece of text, up to a fault. Raises the fault if there is no text before it."""
        text, data = "", bytearray(1)
        while data and not text and self.fault is None:
            data.clear()
            try:
                while len(data) < size and (piece := self.stream.read1(size - len(data))):
                    data += piece
            except UNREADABLE as error:
                self.fault = error
            try:
                text = self.decoder.decode(data, final=not data and self.fault is None)
            except UnicodeDecodeError as error:
                self.fault, text = error, error.object[: error.start].decode()
        if self.fault is not None and not text:
            raise self._unreadable(self.fault) from self.fault
        return text

    def _unreadable(self, fault: Exception) -> DataError:
        """The error for a fault, when all text before it has been used."""
        line, column = self._position(len(self.text))
        if isinstance(fault, UnicodeDecodeError):
            said = f"its column {column} is not UTF-8 text ({fault.reason})"
        else:
            said = f"this is the last line that could be read, and not to its end: {fault}"
        return DataError(f"{self.path}: line {line}: record {self.number} cannot be read: {said}")

    def _position(self, place: int) -> tuple[int, int]:
        """Line and column in the file of a place in `text` at or after the current one."""
        start = self.text.rfind("\n", 0, place)
        column = place - start if start >= 0 else self.before + place + 1
        return self.line + self.text.count("\n", self.place, place), column

    def _found(self) -> str:
        return repr(self.text[self.place : self.place + 20]) if self.place < len(self.text) else "the end of the file"

    def _refuse(self, what: str) -> DataError:
        return DataError(f"{self.path}: line {self.line}: {what}")
