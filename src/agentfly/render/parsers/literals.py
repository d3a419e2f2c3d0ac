"""Reads values as Python writes them, without `ast.parse`, whose recursion and memory on hostile text cannot be bounded.

Values are numbers, strings, lists, tuples, dicts, True, False and None. Expressions are errors.
"""

from __future__ import annotations

import math
import re
from typing import Any

from .strict_json import MAX_DEPTH, MAX_DIGITS

WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}

_NAME = re.compile(r"[^\W\d][\w.\-]{0,127}")
_NUMBER = re.compile(r"[+-]?(?:0[xX][0-9a-fA-F]+|(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)")
_SPACE = re.compile(r"\s*")
_STRING_END = {quote: re.compile(rf"{quote}|\\") for quote in ("'", '"', "'''", '"""')}
_ESCAPE = re.compile(r"\\(?:([\\'\"abfnrtv\n])|([0-7]{1,3})|(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})))")
_ESCAPED = {"\n": "", "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


class BadLiteral(Exception):
    """A value cannot be read; the text is written for the model."""


def load_literal(text: str) -> Any:
    """The value of a text that is one Python literal. Raises BadLiteral."""
    literals = Literals(text, 0)
    value = literals.value(0)
    if not literals.ended():
        raise BadLiteral("there is other text after the value")
    return value


class Literals:
    """Reads literal values from a text, left to right."""

    def __init__(self, text: str, pos: int) -> None:
        self.text, self.pos = text, pos
        self.reached = 0  # how far a string that is not closed was searched

    def ended(self) -> bool:
        self.accept("")
        return self.pos >= len(self.text)

    def accept(self, mark: str) -> bool:
        self.pos = _SPACE.match(self.text, self.pos).end()  # type: ignore[union-attr]
        if not self.text.startswith(mark, self.pos):
            return False
        self.pos += len(mark)
        return True

    def expect(self, mark: str, why: str) -> None:
        if not self.accept(mark):
            raise BadLiteral(why)

    def word(self) -> str:
        self.accept("")
        match = _NAME.match(self.text, self.pos)
        if match is None:
            return ""
        self.pos = match.end()
        return match[0]

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise BadLiteral(f"a value is nested deeper than {MAX_DEPTH} levels")
        self.accept("")
        first = self.text[self.pos : self.pos + 1]
        if first in ("'", '"'):
            return self.string(first)
        if self.accept("["):
            return self.items("]", depth)
        if self.accept("("):
            return self.items(")", depth)
        if self.accept("{"):
            return self.pairs(depth)
        if match := _NUMBER.match(self.text, self.pos):
            self.pos = match.end()
            return _number(match[0])
        word = self.word()
        if word in WORDS:
            return WORDS[word]
        raise BadLiteral("a value must be a plain number, string, list, dict, True, False or None")

    def items(self, closer: str, depth: int) -> list[Any]:
        values: list[Any] = []
        while not self.accept(closer):
            values.append(self.value(depth + 1))
            if not self.accept(","):
                self.expect(closer, f"a list is not closed with {closer}")
                break
        return values

    def pairs(self, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while not self.accept("}"):
            key = self.key(depth + 1)
            if not isinstance(key, str) or key in values:
                raise BadLiteral("the keys of a dict must be strings, each given once")
            self.expect(":", "a key of a dict must be followed by a colon")
            values[key] = self.value(depth + 1)
            if not self.accept(","):
                self.expect("}", "a dict is not closed with }")
                break
        return values

    def key(self, depth: int) -> Any:
        return self.value(depth)

    def string(self, quote: str) -> str:
        quote = quote * 3 if self.text.startswith(quote * 3, self.pos) else quote
        start = at = self.pos + len(quote)
        while match := _STRING_END[quote].search(self.text, at):
            if match[0] == quote:
                self.pos = match.end()
                return _unescape(self.text[start : match.start()])
            at = match.end() + 1
        self.reached = len(self.text)
        raise BadLiteral("a string is not closed")


def _number(text: str) -> int | float:
    if len(text) > MAX_DIGITS:
        raise BadLiteral(f"a number has more than {MAX_DIGITS} digits")
    try:
        value = int(text, 16) if "x" in text or "X" in text else float(text) if any(c in text for c in ".eE") else int(text)
    except ValueError:
        raise BadLiteral(f"{text[:40]!r} is not a number") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise BadLiteral("a number is too large")
    return value


def _unescape(text: str) -> str:
    if "\\" in text:
        text = _ESCAPE.sub(_character, text)
    try:
        # Two escapes may form one character; half of such a pair is not a character.
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:
        raise BadLiteral("a string has half a surrogate pair, which is no character") from None


def _character(found: re.Match[str]) -> str:
    plain, octal, *hexes = found.groups()
    if plain is not None:
        return _ESCAPED.get(plain, plain)
    code = int(octal, 8) if octal is not None else int(next(digits for digits in hexes if digits is not None), 16)
    if code > 0x10FFFF:
        raise BadLiteral("a string has an escape that is no character")
    return chr(code)
