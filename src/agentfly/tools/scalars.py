"""`Form`, the error `Mismatch`, and the forms of str, int, float, bool and None.

A value of the exact type passes unchanged. Unambiguous values are converted: "12" to a number, 1.0 to an integer, "true" to a
boolean. A boolean is never converted to a number, and NaN and infinity are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from .text import clean, quote

# Results of unions by (id of the value, id of the union). Without it a recursive union would take exponential time.
Memo = dict[tuple[int, int], Any]
Convert = Callable[[Any, Memo], Any]
Schema = dict[str, Any]


class Mismatch(Exception):
    """A JSON value does not fit. Each enclosing conversion appends its key or index to `path`."""

    def __init__(self, expected: str, value: object, *, because: str = "") -> None:
        super().__init__(expected)
        self.expected, self.because, self.got = expected, because, show(value)
        self.path: list[str | int] = []

    def where(self) -> str:
        parts = self.path[::-1]
        text = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:50]}" for part in parts[:6]).lstrip(".")
        return clean(text) + (" ..." if len(parts) > 6 else "")

    def __str__(self) -> str:
        return f"{quote(self.where())} {self.because or f'must be {self.expected}, got {self.got}'}"


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """`kinds` are the JSON types that fit without conversion (None: any); a union tries members that fit first."""

    schema: Schema
    convert: Convert
    kinds: frozenset[str] | None = None


class FormCompiler(Protocol):
    """What compiles the annotations of one tool (`forms.Compiler`), as `records` sees it."""

    defs: dict[str, Schema]
    open: dict[Any, list[Any]]

    def hints(self, owner: object, globalns: dict[str, Any] | None = None) -> dict[str, Any]: ...

    def compile(self, annotation: object) -> Form: ...


KIND = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", list: "array", dict: "object"}
_PHRASE = {
    "boolean": "true or false",
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "null": "null",
    "array": "a list",
    "object": "an object",
}


def kind_of(value: object) -> str:
    return KIND.get(type(value)) or ("array" if isinstance(value, tuple) else type(value).__name__)


def show(value: Any) -> str:
    """A short description of a value for an error message."""
    kind = kind_of(value)
    if kind == "string":
        return f"the string {quote(value, 40)}"
    if kind == "integer":
        return f"the number {value}" if value.bit_length() < 200 else "a very large integer"
    if kind == "number":
        return f"the number {value}"
    if kind == "boolean":
        return "true" if value else "false"
    return {"null": "null", "array": "a list", "object": "an object"}.get(kind, f"a {kind}")


def phrase(schema: Schema) -> str:
    """The schema in words, for an error message."""
    if "enum" in schema:
        options = [quote(option) if isinstance(option, str) else json.dumps(option) for option in schema["enum"][:20]]
        return f"one of {', '.join(options)}{', ...' if len(schema['enum']) > 20 else ''}"
    if "anyOf" in schema:
        return " or ".join(phrase(member) for member in schema["anyOf"])
    kinds = schema.get("type", "object" if "$ref" in schema else "any value")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return " or ".join(_PHRASE.get(kind, kind) for kind in kinds)


def argument_text(name: str, schema: Mapping[str, Any], required: bool) -> str:
    """`a: number`, `b: number = 3` or `c?: string`, as a signature shows an argument."""
    if required:
        return f"{name}: {_type_text(schema)}"
    if schema.get("default") is None:
        return f"{name}?: {_type_text(schema, 'null')}"
    return f"{name}: {_type_text(schema)} = {json.dumps(schema['default'], ensure_ascii=False)}"


def _type_text(schema: Mapping[str, Any], less: str = "") -> str:
    """`number`, `string|null`, `array of integer`, `"a"|"b"`. `less` is a type to leave out."""
    if "enum" in schema:
        return "|".join(json.dumps(option, ensure_ascii=False) for option in schema["enum"])
    if "anyOf" in schema:
        kinds = [_type_text(member) for member in schema["anyOf"]]
    elif schema.get("type") == "array" and schema.get("items"):
        kinds = [f"array of {_type_text(schema['items'])}"]
    else:
        kind = schema.get("type", "object" if "$ref" in schema else "any")
        kinds = [kind] if isinstance(kind, str) else list(kind)
    return "|".join(kind for kind in kinds if kind != less)


def convert_part(place: str | int, convert: Convert, value: object, memo: Memo) -> Any:
    """Converts an item or a field. A mismatch inside it gets its place."""
    try:
        return convert(value, memo)
    except Mismatch as mismatch:
        mismatch.path.append(place)
        raise


# Scalars


def _string(value: object, memo: Memo) -> Any:
    if type(value) is str:
        return value if value.isascii() else clean(value)
    raise Mismatch("a string", value)


def _number(value: Any, memo: Memo) -> Any:
    kind = type(value)
    if kind is int:
        return value  # an int is a valid float in Python: 12 stays 12
    if kind is float and value - value == 0.0:
        return value
    if kind is str and (number := _read_number(value)) is not None:
        return number
    raise Mismatch("a finite number" if kind is float else "a number", value)


def _integer(value: Any, memo: Memo) -> Any:
    kind = type(value)
    if kind is int:
        return value
    number = _read_number(value) if kind is str else value
    if type(number) is int:
        return number
    if type(number) is float and number.is_integer():
        return int(number)
    raise Mismatch("an integer", value)


def _boolean(value: object, memo: Memo) -> Any:
    if type(value) is bool:
        return value
    if type(value) is str and (word := value[:8].strip().lower()) in ("true", "false") and len(value) < 8:
        return word == "true"
    raise Mismatch("true or false", value)


def _null(value: object, memo: Memo) -> Any:
    if value is None:
        return None
    raise Mismatch("null", value)


def _anything(value: object, memo: Memo) -> Any:
    return value


def _read_number(text: str) -> int | float | None:
    if len(text) > 400 or not text.isascii() or "_" in text:
        return None  # int() takes quadratic time in the number of digits
    try:
        return int(text)
    except ValueError:
        try:
            number = float(text)
        except ValueError:
            return None
    return number if number - number == 0.0 else None


ANY = Form({}, _anything)
SCALARS: dict[Any, Form] = {
    str: Form({"type": "string"}, _string, frozenset({"string"})),
    int: Form({"type": "integer"}, _integer, frozenset({"integer"})),
    float: Form({"type": "number"}, _number, frozenset({"number", "integer"})),
    bool: Form({"type": "boolean"}, _boolean, frozenset({"boolean"})),
    None: Form({"type": "null"}, _null, frozenset({"null"})),
    type(None): Form({"type": "null"}, _null, frozenset({"null"})),
    Any: ANY,
    object: ANY,
}


def again(mismatch: Mismatch) -> Mismatch:
    """A copy: each time the stored one was raised, its path would grow."""
    copy = Mismatch(mismatch.expected, None, because=mismatch.because)
    copy.got, copy.path = mismatch.got, list(mismatch.path)
    return copy


def read_json(value: object, bracket: str, wanted: type, memo: Memo) -> Any:
    """Parses JSON text where a list or object is expected: XML-like call formats send every argument as text."""
    if type(value) is not str or value[:64].lstrip()[:1] != bracket:
        return value
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):
        return value
    if type(read) is not wanted:
        return value
    memo[id(read), 0] = read  # keeps the value alive, so that the ids in the memo stay unique
    return read
