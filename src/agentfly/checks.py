"""Dataclasses whose fields declare their limits: `check_fields` checks every value against its type and limits."""

from __future__ import annotations

import math
import types
from dataclasses import field, fields
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .errors import ConfigError


def setting(default: object, text: str = "", **limits: float) -> Any:
    """A dataclass field with help text. `limits` are `low` and `high` (inclusive) and `above` (exclusive)."""
    metadata = {"help": text, **limits}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def check_fields(settings: Any, prefix: str = "") -> None:
    """Check numbers, choices, flags and lists of texts against their annotations and limits.

    Raises ConfigError for the first that is wrong. Its sentence begins with `prefix` and the name of the field.
    """
    kind: Any = type(settings)
    hints = _hints(kind)
    for item in fields(settings):
        value, hint = getattr(settings, item.name), hints[item.name]
        if get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint):
            if value is None:
                continue
            hint = next(arg for arg in get_args(hint) if arg is not type(None))
        choices = [choice for arg in get_args(hint) if get_origin(arg) is Literal for choice in get_args(arg)]
        if choices and get_origin(hint) in (Union, types.UnionType):  # a number, or a word in its place
            if isinstance(value, str) and value in choices:
                continue
            hint = next(arg for arg in get_args(hint) if get_origin(arg) is not Literal)
        limits = {key: limit for key, limit in item.metadata.items() if key != "help"}
        if (wrong := _wrong(value, hint, **limits)) is not None:
            raise ConfigError(f"{prefix}{item.name} must be {wrong}, not {value!r}")


@cache
def _hints(kind: object) -> dict[str, Any]:
    return get_type_hints(kind)


def _wrong(value: Any, hint: Any, *, low: float = -math.inf, above: float = -math.inf, high: float = math.inf) -> str | None:
    """Returns what the value must be, or None if it is right or of a type that has no limits."""
    if get_origin(hint) is Literal:
        return None if value in get_args(hint) else f"one of {', '.join(get_args(hint))}"
    if hint is bool:
        return None if isinstance(value, bool) else "true or false"
    if hint == tuple[str, ...]:
        good = isinstance(value, list | tuple) and all(isinstance(text, str) and text for text in value)
        return None if good else "a list of texts"
    if hint not in (int, float):
        return None
    is_number = isinstance(value, int if hint is int else int | float) and not isinstance(value, bool)
    if is_number and low <= value <= high and value > above and not math.isinf(value):
        return None
    limits = [f"at least {low:g}"] * (low > -math.inf) + [f"greater than {above:g}"] * (above > -math.inf)
    limits += [f"at most {high:g}"] * (high < math.inf)
    return ", ".join(["a whole number" if hint is int else "a number", " and ".join(limits)]).removesuffix(", ")
