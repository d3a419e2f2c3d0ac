"""Plain data to text and back, in a closed grammar. Both sessions run this file as source, so it imports nothing of AgentFly.

    value     null, true, false, an integer, a text, or a list [tag, ...]
    numbers   i hex  f decimal  c real imaginary  D decimal  F numerator denominator
    ranges    r start stop step  k start stop step (a slice)
    others    b B bytes as Latin-1  T kind, numbers (dates)  U UUID  y name of a data type
    numpy     A dtype, shape, items  N dtype, item
    items     l t s z q I (list, tuple, set, frozenset, deque, iterator), then values  Q limit, values (a deque with one)
    pairs     d O C (dict, OrderedDict, Counter), then [key, value]  V "keys", "values" or "items", then values
    named     P name, fields, values (namedtuple)  E name of a data type or null, pairs (defaultdict)
    more      S number, value (data whose class has more attributes than the data; they stay with its owner)
    objects   o number (stays with its owner)  n number (an iterator of more items than are read ahead, read as needed)

`read` checks the length and depth of a text before it parses the text, and `unpack` refuses everything outside the grammar with
`NotData`. No tag names code. A value of a subclass travels as one of the base class, so an overridden method does not travel.
"""

import base64
import collections
import contextlib
import datetime
import decimal
import fractions
import importlib
import itertools
import json
import math
import re
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

MAX_ITEMS = 10_000
READ_S = 0.2
"""Seconds in which an iterator is read ahead."""
MAX_CHARS = 8_000_000
MAX_DEPTH = 200
PART = 16_000
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
_DATES: dict[str, tuple[type, tuple[str, ...]]] = {  # datetime before date: it is a subclass
    "datetime": (datetime.datetime, ("year", "month", "day", "hour", "minute", "second", "microsecond")),
    "date": (datetime.date, ("year", "month", "day")),
    "time": (datetime.time, ("hour", "minute", "second", "microsecond")),
    "timedelta": (datetime.timedelta, ("days", "seconds", "microseconds")),
}
_TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, type(None),
    )
}  # fmt: skip
_NAMED: dict[str, object] = {**_TYPES, "Ellipsis": ..., "NotImplemented": NotImplemented}
EXTENDED: tuple[Any, ...] = (str, int, float, list, tuple, dict, set)
_VIEWS: dict[str, tuple[type, Callable[[list[Any]], object]]] = {
    "keys": (type({}.keys()), lambda items: dict.fromkeys(items).keys()),
    "values": (type({}.values()), lambda items: dict(enumerate(items)).values()),
    "items": (type({}.items()), lambda items: dict(items).items()),
}
_INTEGER = re.compile(r"-?0x[0-9a-f]+")
_FLOAT = re.compile(r"-?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|inf|nan)")
_DECIMAL = re.compile(r"-?(?:\d+(?:\.\d+)?(?:E[+-]?\d+)?|Infinity|s?NaN\d*)")
_DTYPE = re.compile(r"[<>|=](?:[biufc]\d{1,2}|[SU]\d{1,4})")
_FIELD = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,60}")
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # the optional quote keeps an open string linear
_OTHERS = re.compile(r"[^\[\]{}]++")


class NotPlain(Exception):
    """The value cannot be sent."""


class NotData(ValueError):
    """The text or value is outside the grammar."""


def pack(value: object, keep: Callable[[Any], int] | None = None) -> Any:
    """Returns `value` as JSON data. `keep` stores an object that is not plain and returns its number; without it, NotPlain."""
    if keep is not None and _has_more(value):
        with contextlib.suppress(NotPlain):  # the tests keep no data
            return ["S", keep(value), _pack(value, keep)]
    return _pack(value, keep)


def _has_more(value: object) -> bool:
    """Whether this is data of a class, of the solution or a library, that adds attributes to those of the data."""
    kind = type(value)
    base = next((base for base in EXTENDED if issubclass(kind, base)), None)
    if kind.__module__ in ("builtins", "collections", "numpy") or base is None:
        return False
    added = set(dir(value)) - set(dir(base)) - set(getattr(kind, "_fields", ()))
    return any(name == "__getattr__" or not name.startswith("_") for name in added)


def _pack(value: Any, keep: Callable[[Any], int] | None) -> Any:
    kind: Any = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind.__module__ == "numpy":
        return _pack_numpy(value, keep)
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
    if kind.__bases__ == (tuple,) and _are_names(fields := getattr(kind, "_fields", ())):
        return ["P", kind.__name__, list(fields), [pack(item, keep) for item in tuple.__iter__(value)]]
    if kind is collections.defaultdict:
        factory = getattr(value.default_factory, "__name__", None)
        known_type = factory if _TYPES.get(factory or "") is value.default_factory else None
        return ["E", known_type, *([pack(key, keep), pack(item, keep)] for key, item in value.items())]
    if kind is collections.deque and value.maxlen is not None:
        return ["Q", value.maxlen, *(pack(item, keep) for item in value)]
    for base, tag in _TAGS:
        if issubclass(kind, base):
            if tag in _MAPPINGS:
                return [tag, *([pack(key, keep), pack(item, keep)] for key, item in dict.items(value))]
            return [tag, *(pack(item, keep) for item in base.__iter__(value))]
    if kind is range:
        return ["r", *(pack(end) for end in (value.start, value.stop, value.step))]
    if kind is slice:
        return ["k", *(pack(end, keep) for end in (value.start, value.stop, value.step))]
    if isinstance(value, decimal.Decimal):
        return ["D", decimal.Decimal.__str__(value)]
    if isinstance(value, fractions.Fraction):
        return ["F", pack(value.numerator), pack(value.denominator)]
    for date, (base, parts) in _DATES.items():
        if kind is base:
            shift = getattr(value, "tzinfo", None) and value.utcoffset()
            zone = [] if shift is None else [shift.days, shift.seconds]
            return ["T", date, *(getattr(value, part) for part in parts), *zone]
    if kind is uuid.UUID:
        return ["U", value.hex]
    for name, named in _NAMED.items():
        if value is named:
            return ["y", name]
    for name, (view, _) in _VIEWS.items():
        if issubclass(kind, view):
            return ["V", name, *(pack(item, keep) for item in value)]
    if issubclass(kind, Iterator) and not hasattr(kind, "readline"):  # a stream has more than its lines
        items: list[Any] = []
        until = math.inf if keep is None else time.monotonic() + READ_S
        for item in value:
            if len(items) >= MAX_ITEMS or time.monotonic() > until:
                if keep is None:
                    raise NotPlain(f"an iterator of more than {MAX_ITEMS:,} items")
                return ["n", keep(itertools.chain([unpack(seen, _nothing) for seen in items], [item], value))]
            items.append(pack(item, keep))
        return ["I", *items]
    if keep is None:
        raise NotPlain(f"a {kind.__name__}")
    return ["o", keep(value)]


def _pack_numpy(value: Any, keep: Callable[[Any], int] | None) -> Any:
    if hasattr(value, "dtype") and value.dtype.kind in "biufcSU":
        if value.shape == ():
            exact = value.dtype.kind == "f" and value.dtype.itemsize > 8  # a long double is its own item
            return ["N", value.dtype.str, pack(float(value) if exact else value.item(), keep)]
        return ["A", value.dtype.str, list(value.shape), [pack(item) for item in value.ravel().tolist()]]
    if keep is None:
        raise NotPlain(f"a numpy {type(value).__name__}")
    return ["o", keep(value)]


def unpack(
    tree: object,
    give: Callable[[int], Any],
    stream: Callable[[Any], Any] | None = None,
    arrays: bool = True,
    extend: Callable[[Any, Any], Any] | None = None,
) -> Any:
    """Reverses `pack`. `give` returns the object of a number, `stream` makes an iterator of such an object, `extend` gives data
    the other attributes of such an object. Raises NotData."""

    def value(tree: object) -> Any:
        if tree is None or type(tree) in (bool, int, str):
            return tree
        if type(tree) is not list or not tree or type(tree[0]) is not str:
            raise NotData("a value is neither a constant nor a list with a tag")
        tag, *rest = tree
        if tag in _SEQUENCES:
            return _SEQUENCES[tag]([value(item) for item in rest])
        if tag in _MAPPINGS:
            return _MAPPINGS[tag]([(value(key), value(item)) for key, item in rest])
        if tag == "o":
            return give(_number(*rest))
        if tag == "n" and stream is not None:
            return stream(give(_number(*rest)))
        if tag == "k":
            start, stop, step = map(value, rest)
            return slice(start, stop, step)
        if tag == "A" and arrays:
            return _array(*rest)
        if tag == "N":
            dtype, item = rest
            return importlib.import_module("numpy").dtype(_text(_DTYPE, dtype)).type(value(item)) if arrays else value(item)
        if tag == "P":
            name, fields, items = rest
            return _named(name, fields)._make(map(value, items))
        if tag == "E":
            factory, *pairs = rest
            factory_type = None if factory is None else _TYPES[factory]
            return collections.defaultdict(factory_type, [(value(key), value(item)) for key, item in pairs])
        if tag == "S" and extend is not None:
            number, inner = rest
            return extend(value(inner), give(_number(number)))
        if tag == "V":
            return _VIEWS[rest[0]][1](list(map(value, rest[1:])))
        if tag == "Q":
            return collections.deque(map(value, rest[1:]), _number(rest[0]))
        if tag not in _SCALARS:
            raise NotData(f"no value has the tag {tag[:20]!r} here")
        return _SCALARS[tag](*rest)

    try:
        return value(tree)
    except NotData:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise NotData(f"a value is malformed ({type(error).__name__})") from None


def _are_names(fields: Any) -> bool:
    return (
        type(fields) in (tuple, list) and 0 < len(fields) < 100 and all(type(f) is str and _FIELD.fullmatch(f) for f in fields)
    )


def _named(name: Any, fields: Any) -> Any:
    if not _are_names([name]) or not _are_names(fields):
        raise NotData("the names of a tuple are malformed")
    return collections.namedtuple(name, fields)


def _number(number: object) -> int:
    if type(number) is not int or not 0 <= number < 1 << 31:
        raise NotData("an object's number is not a number")
    return number


def _text(pattern: re.Pattern[str], text: object) -> str:
    if type(text) is not str or not pattern.fullmatch(text):
        raise NotData("a number is malformed")
    return text


def _integer(tree: object) -> int:
    if type(tree) is list and len(tree) == 2 and tree[0] == "i":
        return int(_text(_INTEGER, tree[1]), 16)
    if type(tree) is not int:
        raise NotData("a number is not an integer")
    return tree


def _float(text: object) -> float:
    return float(_text(_FLOAT, text))


def _date(name: Any, *parts: object) -> Any:
    kind, names = _DATES[name]
    numbers = [_integer(part) for part in parts]
    zone = numbers[len(names) :]
    if len(numbers) < len(names) or len(zone) not in (0, 2) or (zone and name not in ("datetime", "time")):
        raise NotData("a date is malformed")
    made: Any = kind(*numbers[: len(names)])
    return made.replace(tzinfo=datetime.timezone(datetime.timedelta(*zone))) if zone else made


def _array(dtype: Any, shape: Any, items: Any) -> Any:
    sizes = [_integer(size) for size in shape]
    if len(sizes) > 32 or min(sizes, default=0) < 0 or math.prod(sizes) != len(items):
        raise NotData("an array has another number of items than its shape says")
    values = [unpack(item, _nothing, arrays=False) for item in items]
    return importlib.import_module("numpy").array(values, dtype=_text(_DTYPE, dtype)).reshape(sizes)


_SCALARS: dict[str, Callable[..., Any]] = {
    "i": lambda text: int(_text(_INTEGER, text), 16),
    "f": _float,
    "c": lambda real, imaginary: complex(_float(real), _float(imaginary)),
    "b": lambda text: text.encode("latin-1"),
    "B": lambda text: bytearray(text.encode("latin-1")),
    "r": lambda start, stop, step: range(_integer(start), _integer(stop), _integer(step)),
    "D": lambda text: decimal.Decimal(_text(_DECIMAL, text)),
    "F": lambda top, below: fractions.Fraction(_integer(top), _integer(below)),
    "T": _date,
    "U": lambda text: uuid.UUID(text),
    "y": lambda name: _NAMED[name],
}


def _nothing(number: int) -> Any:
    raise NotData(f"no object has the number {number}")


def write(message: dict[str, Any]) -> str:
    """Returns JSON in ASCII, which keeps lone surrogates. Raises NotPlain for what `read` would refuse."""
    text = json.dumps(message)
    if len(text) > MAX_CHARS:
        raise NotPlain(f"data of more than {MAX_CHARS:,} characters")
    if _depth(text) > MAX_DEPTH:
        raise NotPlain(f"data of more than {MAX_DEPTH} levels")
    return text


def read(text: str) -> dict[str, Any]:
    """Returns the message that `write` made. Checks length and depth before it parses. Raises NotData."""
    if len(text) > MAX_CHARS or _depth(text) > MAX_DEPTH:
        raise NotData("the text is too long or too deep")
    try:
        message = json.loads(text, parse_float=_refuse, parse_constant=_refuse)
    except NotData:
        raise
    except (ValueError, RecursionError) as error:
        raise NotData(f"the text is not JSON ({type(error).__name__})") from None
    if type(message) is not dict:
        raise NotData("the text is not a message")
    return message


def _refuse(text: str) -> Any:
    raise NotData(f"{text[:20]!r} is not in the grammar")


def _depth(text: str) -> int:
    """Returns how deep brackets are nested outside strings, in linear time on any text."""
    brackets = _OTHERS.sub("", _STRING.sub("", text))
    return max(itertools.accumulate(1 if mark in "[{" else -1 for mark in brackets), default=0)


class PartSender:
    """Sends a long text in parts: a session cuts the value of a cell. Base64, so that the value's repr needs no parser.

    A part is the letter of the kind, the length of the whole, a space, and at most PART characters.
    """

    def __init__(self) -> None:
        self.kind, self.text = "", ""

    def say(self, kind: str, text: str) -> str:
        self.kind, self.text = kind, base64.b64encode(text.encode("ascii")).decode()
        return self.part(0)

    def part(self, place: int) -> str:
        return f"{self.kind}{len(self.text)} {self.text[place : place + PART]}"


def decode(text: str) -> str:
    """Returns what `PartSender` encoded. Raises NotData."""
    try:
        return base64.b64decode(text, validate=True).decode("ascii")
    except ValueError:
        raise NotData("the text is not Base64 of ASCII") from None
