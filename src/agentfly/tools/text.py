"""Values in, text for the model out: JSON where there is structure, cut at a length, and free of what breaks later.

`render` raises ValueError with one sentence where a value cannot be shown. It never shows a memory address and never a
traceback.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from typing import Any


def clean(text: str) -> str:
    """Text that can be encoded: half a surrogate pair (models write them) becomes U+FFFD, two halves become their character."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def quote(text: str, length: int = 60) -> str:
    """A short piece of the model's text inside a message to it."""
    return json.dumps(clean(text[:length]) + ("..." if len(text) > length else ""), ensure_ascii=False)


def cut(text: str, max_length: int) -> str:
    """The first `max_length` characters, and a marker that says how many are missing."""
    if len(text) <= max_length:
        return text
    return f"{text[:max_length]}\n[... cut: {len(text) - max_length:,} of {len(text):,} characters left out]"


def render(value: Any) -> str:
    """What a tool returned, as the model reads it."""
    kind = type(value)
    if kind is str:
        return value if value.isascii() else clean(value)
    try:
        if kind is int or kind is float:
            return repr(value)
        text = json.dumps(value, ensure_ascii=False, default=_simpler)
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ValueError(
            f"the tool returned a {kind.__name__} that cannot be shown as text ({why[:200]}); "
            "it should return a str, number, bool, None, dict, list, dataclass or ToolResult"
        ) from None
    if isinstance(value, str | enum.Enum) and text[:1] == '"':
        text = json.loads(text)
    return clean(text)


def describe_error(error: BaseException) -> str:
    """`Type: message`, short."""
    try:
        message = clean(str(error)).strip()
    except Exception:  # noqa: BLE001 - an exception whose __str__ raises still has a name
        message = ""
    name = type(error).__name__
    return cut(f"{name}: {message}" if message else name, 500)


def finite(value: Any) -> bool:
    """Whether a value can be a step reward."""
    return isinstance(value, int | float) and math.isfinite(value)


def _simpler(value: Any) -> Any:
    """What `json` does not know, one level at a time, so that nothing is copied deeply."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if hasattr(value, "model_dump"):  # pydantic
        return value.model_dump(mode="json")
    if hasattr(value, "tolist"):  # numpy arrays and scalars, tensors
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")
