"""A type annotation in, a `Form` out: the JSON schema that the model reads and the conversion that its arguments go through.

Both come from the same place, so they cannot drift apart. A conversion takes a JSON value, returns the Python value or raises
`Mismatch`, which says where, what was expected and what came. Exact types pass at once; what is clearly meant is coerced ("12" for a
number, 1.0 for an integer, "true" for a boolean, JSON text for a list or an object). A boolean is never a number and NaN is refused.
Whatever a model sends, a conversion takes time in proportion to it. Records (dataclasses and their like) are in `records`.
"""

from __future__ import annotations

import collections.abc as abc
import enum
import json
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union

from ..errors import ConfigError
from .text import clean, quote

# What a union has already made of a value, by (id of the value, id of the union): a recursive union stays linear.
Memo = dict[tuple[int, int], Any]
Convert = Callable[[Any, Memo], Any]
Schema = dict[str, Any]


class Mismatch(Exception):
    """A JSON value does not fit. `path` grows from the inside out while the error rises."""

    def __init__(self, expected: str, value: Any, *, because: str = "") -> None:
        super().__init__(expected)
        self.expected, self.because, self.got = expected, because, show(value)
        self.path: list[str | int] = []

    def where(self) -> str:
        parts = self.path[::-1]
        text = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:50]}" for part in parts[:6]).lstrip(".")
        return clean(text) + (" ..." if len(parts) > 6 else "")

    def __str__(self) -> str:
        return f"{quote(self.where())} {self.because or f'must be {self.expected}, got {self.got}'}"


@dataclass(frozen=True, slots=True)
class Form:
    """`kinds` are the JSON kinds that fit without coercion (None: any): a union tries those members first."""

    schema: Schema
    convert: Convert
    kinds: frozenset[str] | None = None


_KIND = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", list: "array", dict: "object"}
_PHRASE = {
    "boolean": "true or false",
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "null": "null",
    "array": "a list",
    "object": "an object",
}


def kind_of(value: Any) -> str:
    return _KIND.get(type(value)) or ("array" if isinstance(value, tuple) else type(value).__name__)


def show(value: Any) -> str:
    """A value as an error message names it: short, whatever it is."""
    kind = kind_of(value)
    if kind == "string":
        return f"the string {quote(value, 40)}"
    if kind == "integer":
        return f"the number {value}" if value.bit_length() < 200 else "a very large integer"
    if kind == "number":
        return f"the number {value}"
    return {"boolean": str(value).lower(), "null": "null", "array": "a list", "object": "an object"}.get(kind, f"a {kind}")


def phrase(schema: Schema) -> str:
    """What a schema asks for, in words."""
    if "enum" in schema:
        options = [quote(option) if isinstance(option, str) else json.dumps(option) for option in schema["enum"][:20]]
        return f"one of {', '.join(options)}{', ...' if len(schema['enum']) > 20 else ''}"
    if "anyOf" in schema:
        return " or ".join(phrase(member) for member in schema["anyOf"])
    kinds = schema.get("type", "object" if "$ref" in schema else "any value")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return " or ".join(_PHRASE.get(kind, kind) for kind in kinds)


def type_name(schema: Schema) -> str:
    """The type as a signature shows it: `number`, `string|null`, `array of integer`, `"a"|"b"`."""
    if "enum" in schema:
        return "|".join(json.dumps(option, ensure_ascii=False) for option in schema["enum"])
    if "anyOf" in schema:
        return "|".join(type_name(member) for member in schema["anyOf"])
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    kind = schema.get("type", "any")
    if kind == "array" and schema.get("items"):
        return f"array of {type_name(schema['items'])}"
    return kind if isinstance(kind, str) else "|".join(kind)


# Scalars


def _string(value: Any, memo: Memo) -> Any:
    if type(value) is str:
        return value if value.isascii() else clean(value)
    raise Mismatch("a string", value)


def _number(value: Any, memo: Memo) -> Any:
    kind = type(value)
    if kind is int:
        return value  # as in Python itself, an int is a float that is exact: 12 stays 12
    if kind is float and value - value == 0.0:
        return value
    if kind is str and (number := _read_number(value)) is not None:
        return number
    raise Mismatch("a number" if value == value else "a finite number", value)


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


def _boolean(value: Any, memo: Memo) -> Any:
    if type(value) is bool:
        return value
    if type(value) is str and (word := value[:8].strip().lower()) in ("true", "false") and len(value) < 8:
        return word == "true"
    raise Mismatch("true or false", value)


def _null(value: Any, memo: Memo) -> Any:
    if value is None:
        return None
    raise Mismatch("null", value)


def _anything(value: Any, memo: Memo) -> Any:
    return value


def _read_number(text: str) -> int | float | None:
    if len(text) > 400 or not text.isascii() or "_" in text:
        return None  # int() is quadratic in the digits
    try:
        return int(text)
    except ValueError:
        try:
            number = float(text)
        except ValueError:
            return None
    return number if number - number == 0.0 else None


ANY = Form({}, _anything)
_SCALARS: dict[Any, Form] = {
    str: Form({"type": "string"}, _string, frozenset({"string"})),
    int: Form({"type": "integer"}, _integer, frozenset({"integer"})),
    float: Form({"type": "number"}, _number, frozenset({"number", "integer"})),
    bool: Form({"type": "boolean"}, _boolean, frozenset({"boolean"})),
    None: Form({"type": "null"}, _null, frozenset({"null"})),
    type(None): Form({"type": "null"}, _null, frozenset({"null"})),
    Any: ANY,
    object: ANY,
}
_LISTS = {list, tuple, set, frozenset, abc.Sequence, abc.MutableSequence, abc.Iterable, abc.Collection, abc.Set, abc.MutableSet}
_DICTS = {dict, abc.Mapping, abc.MutableMapping}
_SETS = {set, frozenset, abc.Set, abc.MutableSet}


class Compiler:
    """Compiles the annotations of one tool. `defs` collects the schemas that refer to themselves; `names` helps forward references."""

    def __init__(self, names: Mapping[str, Any] | None = None) -> None:
        self.defs: dict[str, Schema] = {}
        self.names = dict(names or {})
        self.open: dict[Any, list[Any]] = {}  # records being compiled: [name in defs or None, finished form or None]

    def compile(self, annotation: Any) -> Form:
        """The form of one annotation, or ConfigError where it has none."""
        try:
            if annotation in _SCALARS:
                return _SCALARS[annotation]
        except TypeError:
            pass  # an unhashable annotation, such as Literal[[]]: refused below
        origin, args = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is typing.Annotated:
            return self._annotated(annotation, args)
        if origin is Literal:
            return self._options(list(args), {}, annotation)
        if origin in (Union, types.UnionType):
            return self._union(args)
        if (origin or annotation) in _LISTS:
            return self._array(origin or annotation, args)
        if (origin or annotation) in _DICTS:
            return self._mapping(args)
        if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
            return self._enum(annotation)
        if isinstance(annotation, typing.TypeVar):
            return self.compile(annotation.__bound__ or Any)
        if hasattr(annotation, "__supertype__"):  # NewType
            return self.compile(annotation.__supertype__)
        if hasattr(annotation, "__value__"):  # the `type X = ...` statement
            return self.compile(annotation.__value__)
        from . import records

        if (form := records.compile_record(self, annotation)) is not None:
            return form
        raise ConfigError(
            f"the type {getattr(annotation, '__qualname__', annotation)} has no JSON form; use str, int, float, bool, None, Literal, "
            "an Enum, list, tuple, set, dict, a union, a dataclass, a TypedDict or a pydantic model"
        )

    def _annotated(self, annotation: Any, args: tuple[Any, ...]) -> Form:
        """`Annotated[int, "how many"]`; constraints of pydantic or annotated_types are pydantic's to check."""
        inner, *notes = args
        if any(type(note).__module__.partition(".")[0] in ("pydantic", "pydantic_core", "annotated_types") for note in notes):
            from . import records

            return records.compile_pydantic(self, annotation)
        form = self.compile(inner)
        for note in notes:
            described = note if isinstance(note, str) else getattr(note, "documentation", None)
            if isinstance(described, str):
                return Form({**form.schema, "description": described}, form.convert, form.kinds)
        return form

    def _enum(self, cls: type[enum.Enum]) -> Form:
        members = list(cls)
        by_value = all(type(member.value) in (str, int, float, bool) for member in members)
        named: dict[str, Any] = {member.name: member for member in members}
        if by_value:
            return self._options([member.value for member in members], {"members": members, "named": named}, cls)
        return self._options(list(named), {"members": members}, cls)

    def _options(self, options: list[Any], extra: dict[str, Any], annotation: Any) -> Form:
        """One of a few scalars. `extra` maps them to enum members, which may also be asked for by their names."""
        members: list[Any] = extra.get("members", options)
        named: dict[str, Any] = extra.get("named", {})
        if not options or any(type(option) not in _KIND or type(option) in (list, dict) for option in options):
            if options and all(isinstance(option, enum.Enum) for option in options):
                return self._options([member.value for member in options], {"members": options}, annotation)
            raise ConfigError(f"{annotation} must list strings, numbers, booleans or None")
        kinds = frozenset(kind_of(option) for option in options)
        schema: Schema = {"enum": options}
        if len(kinds) == 1:
            schema = {"type": next(iter(kinds)), "enum": options}
        exact = {(type(option), option): member for option, member in zip(options, members, strict=True)}
        loose = {str(option).lower(): member for option, member in zip(options, members, strict=True)}
        expected = phrase(schema)

        def convert(value: Any, memo: Memo) -> Any:
            kind = type(value)
            if kind in _KIND and kind is not list and kind is not dict:
                if (kind, value) in exact:
                    return exact[kind, value]
                if kind is float and value.is_integer() and (int, int(value)) in exact:
                    return exact[int, int(value)]
                if kind is str:
                    if value in named:
                        return named[value]
                    if len(value) < 200 and value.strip().lower() in loose:
                        return loose[value.strip().lower()]
            raise Mismatch(expected, value)

        return Form(schema, convert, kinds)

    def _union(self, args: tuple[Any, ...]) -> Form:
        members = [self.compile(arg) for arg in args]
        if any(member.kinds is None for member in members):
            return ANY
        schema: Schema
        if all(set(member.schema) == {"type"} and isinstance(member.schema["type"], str) for member in members):
            kinds = list(dict.fromkeys(member.schema["type"] for member in members))
            if "number" in kinds and "integer" in kinds:
                kinds.remove("integer")
            schema = {"type": kinds if len(kinds) > 1 else kinds[0]}
        else:
            schema = {"anyOf": [member.schema for member in members]}
        key = id(members)
        expected = phrase(schema)

        def convert(value: Any, memo: Memo) -> Any:
            seen = memo.get((id(value), key))
            if seen is None:
                seen = memo[id(value), key] = (attempt(value, memo),)
            if isinstance(seen[0], Mismatch):
                raise _again(seen[0])
            return seen[0]

        def attempt(value: Any, memo: Memo) -> Any:
            kind = kind_of(value)
            fitting = [member for member in members if kind in (member.kinds or ())]
            failures = []
            for member in fitting + [member for member in members if member not in fitting]:
                try:
                    return member.convert(value, memo)
                except Mismatch as mismatch:
                    failures.append(mismatch)
            return failures[0] if len(fitting) == 1 else Mismatch(expected, value)

        return Form(schema, convert, frozenset().union(*(member.kinds or () for member in members)))

    def _array(self, origin: Any, args: tuple[Any, ...]) -> Form:
        build = {tuple: tuple, frozenset: frozenset, set: set, abc.Set: set, abc.MutableSet: set}.get(origin)
        if origin is tuple and args and args[-1] is not Ellipsis:
            return self._tuple(() if args == ((),) else args)
        item = self.compile(args[0] if args else Any)
        schema: Schema = {"type": "array", "items": item.schema} if item.schema else {"type": "array"}
        if origin in _SETS:
            schema["uniqueItems"] = True
        convert_item = item.convert

        def convert(value: Any, memo: Memo) -> Any:
            given = _read_json(value, "[", list, memo)
            if type(given) is not list and type(given) is not tuple:
                raise Mismatch("a list", value)
            index = 0
            made = []
            try:
                for index, part in enumerate(given):  # noqa: B007
                    made.append(convert_item(part, memo))
            except Mismatch as mismatch:
                mismatch.path.append(index)
                raise
            try:
                return made if build is None else build(made)
            except TypeError:
                raise Mismatch("a list of values that can be compared", value) from None

        return Form(schema, convert, frozenset({"array"}))

    def _tuple(self, args: tuple[Any, ...]) -> Form:
        forms = [self.compile(arg) for arg in args]
        count = len(forms)
        schema: Schema = {"type": "array", "minItems": count, "maxItems": count}
        if forms:
            schema["prefixItems"] = [form.schema for form in forms]

        def convert(value: Any, memo: Memo) -> Any:
            given = _read_json(value, "[", list, memo)
            if type(given) not in (list, tuple):
                raise Mismatch(f"a list of {count} values", value)
            if len(given) != count:
                raise Mismatch("", value, because=f"must be a list of {count} values, got {len(given)}")
            made = []
            for index, (form, part) in enumerate(zip(forms, given, strict=True)):
                try:
                    made.append(form.convert(part, memo))
                except Mismatch as mismatch:
                    mismatch.path.append(index)
                    raise
            return tuple(made)

        return Form(schema, convert, frozenset({"array"}))

    def _mapping(self, args: tuple[Any, ...]) -> Form:
        key, item = (self.compile(arg) for arg in (args or (str, Any)))
        if not (key.kinds or frozenset({"string"})) <= {"string", "integer", "number"}:
            raise ConfigError(f"the keys of a dict are strings in JSON, not {args[0]}")
        schema: Schema = {"type": "object"}
        if item.schema:
            schema["additionalProperties"] = item.schema
        if "enum" in key.schema:
            schema["propertyNames"] = {"enum": [str(option) for option in key.schema["enum"]]}

        def convert(value: Any, memo: Memo) -> Any:
            given = _read_json(value, "{", dict, memo)
            if type(given) is not dict:
                raise Mismatch("an object", value)
            made = {}
            for name, part in given.items():
                try:
                    made[key.convert(name, memo)] = item.convert(part, memo)
                except Mismatch as mismatch:
                    mismatch.path.append(str(name))
                    raise
            return made

        return Form(schema, convert, frozenset({"object"}))


def _again(mismatch: Mismatch) -> Mismatch:
    """A fresh copy: the remembered one must not grow a path each time it is raised."""
    copy = Mismatch(mismatch.expected, None, because=mismatch.because)
    copy.got, copy.path = mismatch.got, list(mismatch.path)
    return copy


def _read_json(value: Any, bracket: str, wanted: type, memo: Memo) -> Any:
    """JSON text where a list or an object was asked for: XML-like call formats send every argument as text."""
    if type(value) is not str or value[:64].lstrip()[:1] != bracket:
        return value
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):
        return value
    if type(read) is not wanted:
        return value
    memo[id(read), 0] = read  # keeps it alive, so that the ids of its parts stay unique
    return read


def caller_names(depth: int) -> dict[str, Any]:
    """The local names around the caller, innermost first: a class defined in a function can then be named in a string annotation."""
    found: dict[str, Any] = {}
    frame: types.FrameType | None = sys._getframe(depth)
    while frame is not None and frame.f_code.co_name != "<module>" and len(found) < 10_000:
        for name, value in frame.f_locals.items():
            found.setdefault(name, value)
        frame = frame.f_back
    return found
