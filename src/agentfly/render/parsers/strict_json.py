"""Strict parsing of JSON that a model wrote.

`load_json` raises `BadJson`, whose text is written for the model, for what `json.loads` accepts or crashes on: deep
nesting, very long or infinite numbers, NaN, a repeated key, half of a surrogate pair. `json_end` finds the end of a value
in one pass.
"""

from __future__ import annotations

import json
import math
import re
from functools import lru_cache, partial
from typing import Any

MAX_DEPTH = 64
MAX_DIGITS = 1000

_QUOTE = re.compile(r'["\\]')
_MARKS = re.compile(r'["{}\[\]]')


class BadJson(Exception):
    """The text is not valid JSON; the message is written for the model."""


def load_json(text: str) -> Any:
    """The value of a JSON text. Line breaks inside strings are accepted. Raises BadJson."""
    if _too_deep(text):
        raise BadJson(f"the JSON is nested deeper than {MAX_DEPTH} levels")
    decoder = _decoder if len(text) <= MAX_DIGITS else _careful_decoder
    try:
        value = _decode(decoder, text)
    except json.JSONDecodeError as error:
        where = "at its end" if error.pos >= len(text.rstrip()) else f"at character {error.pos + 1}"
        raise BadJson(f"the JSON is not valid {where}: {error.msg[:1].lower()}{error.msg[1:]}") from None
    if text.isascii() and "\\u" not in text:
        return value
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadJson("the JSON has half a surrogate pair (\\ud800 to \\udfff), which is no character") from None
    return value


def _decode(decoder: Any, text: str) -> Any:
    """`decoder.decode` without its two searches for white space, if the text is exactly one value."""
    try:
        value, end = decoder.scan_once(text, 0)
        if end == len(text):
            return value
    except StopIteration:
        pass  # no value begins here; decode() below raises the error
    return decoder.decode(text)


def load_object(text: str) -> dict[str, Any]:
    """As `load_json`, for a JSON object only."""
    value = load_json(text)
    if not isinstance(value, dict):
        raise BadJson(f"a JSON object is expected, not {json_kind(value)}")
    return value


def json_kind(value: object) -> str:
    """The type of a value in words."""
    if value is None:
        return "null"
    kinds: list[tuple[type, str]] = [(bool, "true or false"), (str, "a string"), (dict, "an object"), (list, "a list")]
    return next((name for kind, name in kinds if isinstance(value, kind)), "a number")


def json_end(text: str, start: int, *stops: str) -> tuple[int, bool]:
    """Where the object or list that begins at `start` ends, and whether it is complete.

    An incomplete value ends at the first of `stops` outside a string, or at the end of the text. Braces and stops inside
    strings are ignored. Takes one pass.

        {"a": "}"} tail  ->  10, True        {"a": [1 </tool_call>  ->  9, False
    """
    marks = _marks(stops)
    depth, at = 0, start
    while match := marks.search(text, at):
        mark, at = match[0], match.end()
        if mark == '"':
            at = _string_end(text, at)
            if at < 0:
                return len(text), False
        elif mark in "{[":
            depth += 1
        elif mark in "}]":
            depth -= 1
            if depth <= 0:
                return at, True
        else:
            return match.start(), False
    return len(text), False


@lru_cache(maxsize=256)
def _marks(stops: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join([*map(re.escape, stops), _MARKS.pattern])) if stops else _MARKS


def _string_end(text: str, at: int) -> int:
    """The position after the closing quote of the string whose content begins at `at`, or -1."""
    while match := _QUOTE.search(text, at):
        if match[0] == '"':
            return match.end()
        at = match.end() + 1
    return -1


def _too_deep(text: str) -> bool:
    if text.count("{") + text.count("[") <= MAX_DEPTH:
        return False
    depth, at = 0, 0
    while match := _MARKS.search(text, at):
        mark, at = match[0], match.end()
        if mark == '"':
            at = _string_end(text, at)
            if at < 0:
                return False
        else:
            depth += 1 if mark in "{[" else -1
            if depth > MAX_DEPTH:
                return True
    return False


def _checked(digits: str) -> str:
    if len(digits) > MAX_DIGITS:
        raise BadJson(f"a number has more than {MAX_DIGITS} digits")
    return digits


def _fraction(digits: str) -> float:
    value = float(_checked(digits))
    if not math.isfinite(value):
        raise BadJson("a number is too large")
    return value


def _constant(name: str) -> Any:
    raise BadJson(f"{name} is not JSON; use a number or null")


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise BadJson(f"the key {key[:40].encode('utf-8', 'replace').decode()!r} is given twice")
            seen.add(key)
    return made


_strict = partial(json.JSONDecoder, object_pairs_hook=_pairs, parse_float=_fraction, parse_constant=_constant, strict=False)
_decoder = _strict()
_careful_decoder = _strict(parse_int=lambda digits: int(_checked(digits)))
