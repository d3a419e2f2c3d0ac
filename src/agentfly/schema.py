"""One checker of settings: a type hint with bounds and a value in, the value as that type or one sentence out.

Config, engine options, placements, pools and the dashboard's queries use it. A bound stands where the type does: in
`Annotated[int, Bounds(low=1)]`, or in a dataclass field, `setting(1, low=1)`. `check_fields` checks a whole dataclass. What a
model writes into the arguments of a tool is read by `tools.forms` instead, which converts more and describes types as JSON.
"""

from __future__ import annotations

import difflib
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from .errors import ConfigError


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a number: `low` and `high` are allowed, `above` and `below` are not."""

    low: float = -math.inf
    above: float = -math.inf
    high: float = math.inf
    below: float = math.inf

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high and self.above < value < self.below

    def words(self, kind: str) -> str:
        """`an integer of at least 1`, `a number above 0 and at most 1`, `a number from 0 to 1`."""
        if self.low == self.high:
            return _number_words(self.low)
        if self.low > -math.inf and self.high < math.inf:
            return f"{kind} from {_number_words(self.low)} to {_number_words(self.high)}"
        limits = {"of at least": self.low, "above": self.above, "at most": self.high, "below": self.below}
        stated = [f"{name} {_number_words(limit)}" for name, limit in limits.items() if math.isfinite(limit)]
        return f"{kind} {' and '.join(stated)}".rstrip()


def _number_words(number: float) -> str:
    """1048576 and 0.001, not 1.04858e+06."""
    return str(int(number)) if number == int(number) else f"{number:g}"


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition on a value of the right type, and the phrase that describes the values which fulfil it."""

    holds: Callable[[Any], bool]
    phrase: str

    def words(self, kind: str) -> str:
        return self.phrase


Limit = Bounds | Rule

Count = Annotated[int, Bounds(low=1)]
NotNegative = Annotated[int, Bounds(low=0)]
Positive = Annotated[float, Bounds(above=0)]
Name = Annotated[str, Rule(bool, "a string that is not empty")]

_KINDS = {int: "an integer", float: "a number", str: "a string", bool: "true or false", Path: "a path"}
_UNIONS = (Union, types.UnionType)


def setting(default: object, text: str = "", **bounds: float) -> Any:
    """A dataclass field with help text. `bounds` are those of `Bounds`."""
    metadata = {"help": text, "limit": Bounds(**bounds) if bounds else None}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def check_fields(settings: Any, prefix: str = "") -> None:
    """Check all fields of a dataclass against their types and bounds.

    Raises ConfigError for the first that is wrong. Its sentence begins with `prefix` and the name of the field.
    """
    hints = type_hints(type(settings))
    for item in fields(settings):
        read(f"{prefix}{item.name}", getattr(settings, item.name), hints[item.name], item.metadata.get("limit"))


type_hints: Callable[[Any], dict[str, Any]] = cache(partial(get_type_hints, include_extras=True))
"""Returns the annotations of a class or function, with their bounds."""


def read(key: str, value: object, hint: object, limit: Limit | None = None) -> Any:
    """Returns the value as the type `hint`: an integer becomes a float, and `"a, b"` a list of strings.

    A hint of another kind, such as `Any`, takes every value. Raises ConfigError, whose sentence begins with `key`.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return read(key, value, args[0], next((arg for arg in args[1:] if isinstance(arg, Limit)), limit))
    if origin in _UNIONS:
        options = [arg for arg in args if arg is not type(None)]
        if value is None and len(options) < len(args):
            return None
        if len(options) == 1:
            return read(key, value, options[0], limit)
        for option in options:
            try:
                return read(key, value, option, limit)
            except ConfigError:
                continue
        raise refusal(key, value, hint, limit)
    if origin is Literal:
        if any(type(value) is type(arg) and value == arg for arg in args):
            return value
        near = difflib.get_close_matches(str(value), [str(arg) for arg in args], n=1)
        raise refusal(key, value, hint, limit, f"; did you mean {near[0]!r}?" if near else "")
    converted = _converted(key, value, hint, origin, args)
    if converted is _REFUSED or (limit is not None and not limit.holds(converted)):
        raise refusal(key, value, hint, limit)
    return converted


_REFUSED = object()


def _converted(key: str, value: Any, hint: object, origin: object, args: tuple[Any, ...]) -> Any:
    """Returns the value as a type that is no union and no choice, or `_REFUSED`."""
    if hint is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return float(value) if is_number else _REFUSED
    if hint is int:
        return value if isinstance(value, int) and not isinstance(value, bool) else _REFUSED
    if hint in (bool, str, Path):
        return value if isinstance(value, hint) else _REFUSED
    if not isinstance(origin, type):
        return value
    if issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            return _REFUSED
        return {str(name): read(f"{key}.{name}", item, args[1]) for name, item in value.items()}
    if not issubclass(origin, Iterable):
        return value
    if isinstance(value, str) and origin is list and args == (str,):
        return [name.strip() for name in value.split(",") if name.strip()]
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return _REFUSED
    if not isinstance(value, list | tuple | set | frozenset):
        return value  # an iterator, which reading would consume
    if origin is tuple and args[-1] is not ...:
        if len(value) != len(args):
            return _REFUSED
        return tuple(read(f"{key}[{i}]", item, arg) for i, (item, arg) in enumerate(zip(value, args, strict=True)))
    return (tuple if origin is tuple else list)(read(f"{key}[{i}]", item, args[0]) for i, item in enumerate(value))


def refusal(key: str, value: object, hint: object, limit: Limit | None = None, more: str = "") -> ConfigError:
    """The error for a value that `hint` does not take."""
    shown = repr(value)
    return ConfigError(f"{key} must be {words(hint, limit)}, not {shown if len(shown) <= 80 else f'{shown[:77]}...'}{more}")


def words(hint: Any, limit: Limit | None = None) -> str:
    """Returns what a value of this type is, with an article: `an integer of at least 1 or 'auto'`."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return words(args[0], next((arg for arg in args[1:] if isinstance(arg, Limit)), limit))
    if origin in _UNIONS:
        return " or ".join(words(arg, limit) for arg in args if arg is not type(None))
    if origin is Literal:
        return " or ".join(filter(None, [", ".join(map(repr, args[:-1])), repr(args[-1])]))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        kind = "a table"
    elif isinstance(origin, type) and issubclass(origin, Iterable):
        count = f"{len(args)} " if origin is tuple and args[-1] is not ... else ""
        kind = f"a list of {count}{_PLURALS.get(_plain(args[0]), 'tables')}" if args and args[0] is not Any else "a list"
    else:
        kind = _KINDS.get(hint, "an object")
    return kind if limit is None else limit.words(kind)


_PLURALS = {int: "integers", float: "numbers", str: "strings", Path: "paths"}


def _plain(hint: object) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def type_name(hint: object, limit: Limit | None = None) -> str:
    """Returns the words without articles, for a column of a table."""
    return re.sub(r"\b(?:a|an) ", "", words(hint, limit))


_UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_BUDGET = re.compile(r"(?P<dollar>\$)?\s*(?P<number>\d+(?:\.\d+)?|\.\d+)\s*(?P<unit>s|sec|min|h|d)?")


def read_budget(key: str, text: str) -> tuple[float | None, float | None]:
    """The seconds or the dollars of a budget: ("20min") is (1200.0, None), ("$2") is (None, 2.0). Raises ConfigError."""
    match = _BUDGET.fullmatch(text.strip())
    if match is None or bool(match["dollar"]) == bool(match["unit"]) or not float(match["number"]) > 0:
        raise ConfigError(f'{key} is a time such as "90s", "20min", "1.5h" or "2d", or an amount such as "$2", not {text!r}')
    number = float(match["number"])
    return (None, number) if match["dollar"] else (number * _UNITS[match["unit"]], None)
