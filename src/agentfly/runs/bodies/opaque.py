"""What the store keeps of a value that is not plain data: `simplify` replaces images, bytes and objects by an `Opaque`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ... import codec

MAX_DEPTH = 40  # of a field or an argument; the codec bounds how deep tuples and records may nest
MAX_REPR = 2000
SCALARS = frozenset((str, int, float, bool, type(None)))


@dataclass(frozen=True, slots=True)
class Opaque:
    """Stands in for a value that the store does not keep: the name of its type, and a text."""

    type: str
    text: str


codec.register(Opaque)


def is_plain(value: Any) -> bool:
    """Whether `simplify` would change nothing, other than for a value that is nested too deep."""
    kind = type(value)
    if kind in SCALARS or kind is Opaque:
        return True
    if kind is dict:
        return _all_plain(value) and _all_plain(value.values())
    return (kind is list or kind is tuple) and _all_plain(value)


def _all_plain(values: Collection[Any]) -> bool:
    return SCALARS.issuperset(map(type, values)) or all(map(is_plain, values))


def simplify(value: object, depth: int = 0) -> Any:
    """The value made of None, bool, int, float, str, list, tuple, dict and `Opaque` only. Applying it twice changes nothing."""
    if type(value) in SCALARS or isinstance(value, Opaque):
        return value
    if depth >= MAX_DEPTH:
        return Opaque(_type_name(value), "nested too deep to be stored")
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a scalar of numpy or torch
        return simplify(value.item(), depth + 1)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, list):
        return [simplify(part, depth + 1) for part in value]
    if isinstance(value, tuple):
        return tuple(simplify(part, depth + 1) for part in value)
    if isinstance(value, Mapping):
        return {hashable(simplify(key, depth + 1)): simplify(part, depth + 1) for key, part in value.items()}
    return Opaque(_type_name(value), _safe_repr(value))


def hashable(key: object) -> Any:
    return Opaque("list", repr(key)) if isinstance(key, (list, dict)) else key


def left_out(image: object) -> Opaque:
    """A note in place of an image: a run that stores its images grows to gigabytes."""
    if isinstance(image, Opaque):
        return image
    size = getattr(image, "size", None)
    shape = f" {size[0]}x{size[1]}" if isinstance(size, tuple) and len(size) == 2 else ""
    return Opaque(_type_name(image), f"image{shape} left out of the store")


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _safe_repr(value: object) -> str:
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - a user's repr may raise anything, and the trajectory must still be stored
        return f"<its repr failed: {type(error).__name__}>"
    return text if len(text) <= MAX_REPR else text[:MAX_REPR] + "..."
