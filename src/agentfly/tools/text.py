"""Text for the model: results as text or JSON, cut to a length, and without characters that cannot be encoded.

The text never holds a memory address or a traceback.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from typing import Any

from ..errors import ForeignExit


def clean(text: str) -> str:
    """Text that can be encoded: half of a surrogate pair becomes U+FFFD, two halves become their character."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def quote(text: str, length: int = 60) -> str:
    """The beginning of a text in quotes, for a message to the model."""
    return json.dumps(clean(text[:length]) + ("..." if len(text) > length else ""), ensure_ascii=False)


def cut(text: str, max_length: int) -> str:
    """The first `max_length` characters, and a note on how many are missing."""
    if len(text) <= max_length:
        return text
    return f"{text[:max_length]}\n[... cut: {len(text) - max_length:,} of {len(text):,} characters left out]"


def render(value: Any) -> str:
    """The result of a tool as text. Raises ValueError if it has no text form."""
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
    """`Type: message`, at most 500 characters."""
    try:
        message = clean(str(error)).strip()
    except Exception:  # noqa: BLE001 - `__str__` of an exception may raise anything
        message = ""
    if isinstance(error, ForeignExit):
        return cut(message, 500)
    name = type(error).__name__
    return cut(f"{name}: {message}" if message else name, 500)


def finite(value: object) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def _simpler(value: object) -> Any:
    """Converts one level of a value that `json` cannot write, without a deep copy."""
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
