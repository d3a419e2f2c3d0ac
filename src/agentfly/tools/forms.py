"""Compiles a type annotation to a `Form`: a JSON schema for the model, and a conversion from JSON to the Python value.

A conversion raises `Mismatch` if the value does not fit; its text gives the place, the expected type and the value. A list or
object may also arrive as JSON text. Conversion takes time proportional to the value. `records` compiles types with fields.
"""

from __future__ import annotations

import collections.abc as abc
import enum
import sys
import types
import typing
from typing import Any, Literal, Union

from ..errors import ConfigError
from . import records
from .compound import array_of, options_of, union_of
from .scalars import SCALARS, Form, Memo, Mismatch, Schema, convert_part, read_json

_LISTS = {list, tuple, set, frozenset, abc.Sequence, abc.MutableSequence, abc.Iterable, abc.Collection, abc.Set, abc.MutableSet}
_DICTS = {dict, abc.Mapping, abc.MutableMapping}
_SETS = {set, frozenset, abc.Set, abc.MutableSet}


class Compiler:
    """Compiles the annotations of one tool. `defs` collects the schemas of recursive types."""

    def __init__(self) -> None:
        self.defs: dict[str, Schema] = {}
        self.names: dict[str, Any] = {}
        self.open: dict[Any, list[Any]] = {}  # records being compiled: [name in defs or None, finished form or None]

    def hints(self, owner: object, globalns: dict[str, Any] | None = None) -> dict[str, Any]:
        """The annotations of a class or function, with strings evaluated. Raises ConfigError."""
        while True:
            try:
                return typing.get_type_hints(owner, globalns, self.names, include_extras=True)
            except NameError as error:
                name = error.name or ""
                local = _find_local(name)
                if local is None or name in self.names:
                    raise ConfigError(f"an annotation names {name!r}, which is not known there") from None
                self.names[name] = local
            except (SyntaxError, TypeError, AttributeError) as error:
                raise ConfigError(f"an annotation cannot be read: {error}") from None

    def compile(self, annotation: object) -> Form:
        """The form of an annotation. Raises ConfigError if the type has no JSON form."""
        origin, args = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is typing.Annotated:
            return self._annotated(annotation, args)
        if origin is Literal:
            return options_of(list(args), {}, annotation)
        if origin in (Union, types.UnionType):
            return self._union(args)
        if not isinstance(annotation, abc.Hashable):
            raise ConfigError(f"{annotation!r} is not a type; write list[int], not [int]")
        if annotation in SCALARS:
            return SCALARS[annotation]
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
        if (form := records.compile_record(self, annotation)) is not None:
            return form
        raise ConfigError(
            f"the type {getattr(annotation, '__qualname__', annotation)} has no JSON form; use str, int, float, bool, None, "
            "Literal, an Enum, list, tuple, set, dict, a union, a dataclass, a TypedDict or a pydantic model"
        )

    def _annotated(self, annotation: object, args: tuple[Any, ...]) -> Form:
        """`Annotated[int, "how many"]`. Constraints of pydantic and annotated_types are checked by pydantic."""
        inner, *notes = args
        if any(type(note).__module__.partition(".")[0] in ("pydantic", "pydantic_core", "annotated_types") for note in notes):
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
            return options_of([member.value for member in members], {"members": members, "named": named}, cls)
        return options_of(list(named), {"members": members}, cls)

    def _union(self, args: tuple[Any, ...]) -> Form:
        return union_of([self.compile(arg) for arg in args])

    def _array(self, origin: Any, args: tuple[Any, ...]) -> Form:
        if origin is tuple and args and args[-1] is not Ellipsis:
            return self._tuple(() if args == ((),) else args)
        return array_of(self.compile(args[0] if args else Any), origin)

    def _tuple(self, args: tuple[Any, ...]) -> Form:
        forms = [self.compile(arg) for arg in args]
        count = len(forms)
        schema: Schema = {"type": "array", "minItems": count, "maxItems": count}
        if forms:
            schema["prefixItems"] = [form.schema for form in forms]

        def convert(value: object, memo: Memo) -> Any:
            given = read_json(value, "[", list, memo)
            if type(given) not in (list, tuple):
                raise Mismatch(f"a list of {count} values", value)
            if len(given) != count:
                raise Mismatch("", value, because=f"must be a list of {count} values, got {len(given)}")
            pairs = enumerate(zip(forms, given, strict=True))
            return tuple([convert_part(index, form.convert, part, memo) for index, (form, part) in pairs])

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

        def convert(value: object, memo: Memo) -> Any:
            given = read_json(value, "{", dict, memo)
            if type(given) is not dict:
                raise Mismatch("an object", value)
            return {
                convert_part(str(name), key.convert, name, memo): convert_part(str(name), item.convert, part, memo)
                for name, part in given.items()
            }

        return Form(schema, convert, frozenset({"object"}))


def _find_local(name: str) -> Any:
    """Looks a name up in the frames around the decorator: an annotation may name a class that is local to a function."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if name in frame.f_locals and not str(frame.f_globals.get("__name__", "")).startswith(__package__):
            return frame.f_locals[name]
        frame = frame.f_back
    return None
