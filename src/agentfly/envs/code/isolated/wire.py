"""Plain data to text and back. Both sessions run this file as source, so it imports nothing of AgentFly.

Plain are None, numbers, text, bytes, the containers of Python and `collections`, ranges, dates, decimals, fractions, built-in
types, numpy's arrays and scalars, and iterators (one of more than `MAX_ITEMS` items is read as needed). A value of a subclass
becomes one of the base class, so an overridden method does not travel. Anything else stays with its owner and travels as a
number, or is refused with `NotPlain`.
"""

import builtins
import collections
import datetime
import decimal
import fractions
import importlib
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

MAX_ITEMS = 10_000
MAX_CHARS = 1_000_000
PART = 8_000
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "l": list, "t": tuple, "s": set, "z": frozenset, "q": collections.deque, "I": iter,
}  # fmt: skip
_MAPPINGS: dict[str, Callable[[list[Any]], Any]] = {
    "d": dict, "O": collections.OrderedDict, "C": lambda pairs: collections.Counter(dict(pairs)),
}  # fmt: skip
_TAGS: list[tuple[Any, str]] = [
    (list, "l"), (tuple, "t"), (set, "s"), (frozenset, "z"), (collections.deque, "q"),
    (collections.OrderedDict, "O"), (collections.Counter, "C"), (dict, "d"),
]  # fmt: skip
_DATES: list[tuple[str, type, tuple[str, ...]]] = [  # datetime before date: it is a subclass
    ("datetime", datetime.datetime, ("year", "month", "day", "hour", "minute", "second", "microsecond")),
    ("date", datetime.date, ("year", "month", "day")),
    ("time", datetime.time, ("hour", "minute", "second", "microsecond")),
    ("timedelta", datetime.timedelta, ("days", "seconds", "microseconds")),
]


class NotPlain(Exception):
    """The value cannot be sent."""


def pack(value: Any, keep: Callable[[Any], int] | None = None) -> Any:
    """Returns `value` as JSON data. `keep` stores an object that is not plain and returns its number; without it, NotPlain."""
    kind: Any = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        value = int.__index__(value)
        return value if abs(value) < 1 << 53 else ["i", hex(value)]
    if isinstance(value, float):
        return ["f", float.__repr__(value)]
    if isinstance(value, complex):
        return ["c", float.__repr__(value.real), float.__repr__(value.imag)]
    if isinstance(value, bytes | bytearray):
        return ["b" if isinstance(value, bytes) else "B", bytes(value).decode("latin-1")]
    for base, tag in _TAGS:
        if issubclass(kind, base):
            if tag in _MAPPINGS:
                return [tag, *([pack(key, keep), pack(item, keep)] for key, item in dict.items(value))]
            return [tag, *(pack(item, keep) for item in base.__iter__(value))]
    if kind is range:
        return ["r", *(pack(end) for end in (value.start, value.stop, value.step))]
    if isinstance(value, decimal.Decimal):
        return ["D", decimal.Decimal.__str__(value)]
    if isinstance(value, fractions.Fraction):
        return ["F", pack(value.numerator), pack(value.denominator)]
    for date, base, parts in _DATES:
        if kind is base and getattr(value, "tzinfo", None) is None:
            return ["T", date, *(getattr(value, part) for part in parts)]
    name: Any = value.__name__ if kind is type else None
    if name is not None and getattr(builtins, name, None) is value:
        return ["y", name]
    if kind.__module__ == "numpy":
        return _pack_numpy(value, keep)
    if issubclass(kind, (Iterator, *_VIEWS)):
        items: list[Any] = []
        for item in value:
            if len(items) >= MAX_ITEMS:
                if keep is None:
                    raise NotPlain(f"an iterator of more than {MAX_ITEMS:,} items")
                return ["n", keep(itertools.chain([unpack(seen, _nothing) for seen in items], [item], value))]
            items.append(pack(item, keep))
        return ["l" if kind in _VIEWS else "I", *items]
    if keep is None:
        raise NotPlain(f"a {kind.__name__}")
    return ["o", keep(value)]


_VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))


def _pack_numpy(value: Any, keep: Callable[[Any], int] | None) -> Any:
    if hasattr(value, "dtype") and value.dtype.kind in "biufcSU":
        if value.shape == ():
            return pack(value.item(), keep)
        return ["A", value.dtype.str, list(value.shape), [pack(item) for item in value.ravel().tolist()]]
    if keep is None:
        raise NotPlain(f"a numpy {type(value).__name__}")
    return ["o", keep(value)]


def unpack(tree: Any, give: Callable[[int], Any]) -> Any:
    """Reverses `pack`. `give` returns the object of a number. Raises ValueError, TypeError or LookupError for other data."""
    if not isinstance(tree, list):
        return tree
    tag, rest = tree[0], tree[1:]
    if tag in _SEQUENCES:
        return _SEQUENCES[tag]([unpack(item, give) for item in rest])
    if tag in _MAPPINGS:
        return _MAPPINGS[tag]([(unpack(key, give), unpack(item, give)) for key, item in rest])
    if tag == "o":
        return give(rest[0])
    if tag == "n":
        return _stream(give(rest[0]))
    if tag == "A":
        dtype, shape, items = rest
        return importlib.import_module("numpy").array([unpack(item, give) for item in items], dtype=dtype).reshape(shape)
    return _SCALARS[tag](*rest)


def _stream(source: Any) -> Iterator[Any]:
    while True:
        try:
            yield source._method("__next__")
        except StopIteration:
            return


def _date(name: str, *parts: int) -> Any:
    return next(kind for known, kind, _ in _DATES if known == name)(*parts)


_SCALARS: dict[str, Callable[..., Any]] = {
    "i": lambda text: int(text, 16),
    "f": float,
    "c": lambda real, imaginary: complex(float(real), float(imaginary)),
    "b": lambda text: text.encode("latin-1"),
    "B": lambda text: bytearray(text.encode("latin-1")),
    "r": lambda *ends: range(*(unpack(end, _nothing) for end in ends)),
    "D": decimal.Decimal,
    "F": lambda top, below: fractions.Fraction(unpack(top, _nothing), unpack(below, _nothing)),
    "T": _date,
    "y": lambda name: getattr(builtins, name),
}


def _nothing(number: int) -> Any:
    raise ValueError(f"no object has the number {number}")


def write(message: dict[str, Any]) -> str:
    """Returns JSON in ASCII, which keeps lone surrogates."""
    text = json.dumps(message)
    if len(text) > MAX_CHARS:
        raise NotPlain(f"data of more than {MAX_CHARS:,} characters")
    return text


class PartSender:
    """Sends a long text in parts, each with the length of the whole: a session cuts the value of a cell."""

    def __init__(self) -> None:
        self.text = ""

    def say(self, text: str) -> str:
        self.text = text
        return self.part(0)

    def part(self, place: int) -> str:
        return f"{len(self.text)} {self.text[place : place + PART]}"


def read(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("not a message")
    return found
