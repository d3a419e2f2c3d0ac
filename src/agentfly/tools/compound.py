"""The forms of several values and of one of several: lists and sets, unions, enumerations.

Annotations (`forms`) and JSON schemas (`json_schema`) are compiled to them alike.
"""

from __future__ import annotations

import collections.abc as abc
import enum
from typing import Any

from ..errors import ConfigError
from .scalars import ANY, KIND, Form, Memo, Mismatch, Schema, again, convert_part, kind_of, phrase, read_json

_SETS = {set, frozenset, abc.Set, abc.MutableSet}


def options_of(options: list[Any], extra: dict[str, Any], annotation: object) -> Form:
    """One of several scalars. `extra` maps them to enum members, which the model may also give by name."""
    members: list[Any] = extra.get("members", options)
    named: dict[str, Any] = extra.get("named", {})
    if not options or any(type(option) not in KIND or type(option) in (list, dict) for option in options):
        if options and all(isinstance(option, enum.Enum) for option in options):
            return options_of([member.value for member in options], {"members": options}, annotation)
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
        if kind in KIND and kind is not list and kind is not dict:
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


def union_of(members: list[Form]) -> Form:
    """A value of one of these forms; one that fits without conversion is tried first."""
    if ANY in members:
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

    def convert(value: object, memo: Memo) -> Any:
        seen = memo.get((id(value), key))
        if seen is None:
            seen = memo[id(value), key] = (attempt(value, memo),)
        if isinstance(seen[0], Mismatch):
            raise again(seen[0])
        return seen[0]

    def attempt(value: object, memo: Memo) -> Any:
        kind = kind_of(value)
        fitting = [member for member in members if member.kinds is None or kind in member.kinds]
        failures = []
        for member in [*fitting, *(member for member in members if member not in fitting)]:
            try:
                return member.convert(value, memo)
            except Mismatch as mismatch:
                failures.append(mismatch)
        return failures[0] if len(fitting) == 1 else Mismatch(expected, value)

    sets = [member.kinds for member in members if member.kinds is not None]
    return Form(schema, convert, frozenset[str]().union(*sets) if len(sets) == len(members) else None)


def array_of(item: Form, origin: Any = list) -> Form:
    """A list, tuple or set of values of one form."""
    build = {tuple: tuple, frozenset: frozenset, set: set, abc.Set: set, abc.MutableSet: set}.get(origin)
    schema: Schema = {"type": "array", "items": item.schema} if item.schema else {"type": "array"}
    if origin in _SETS:
        schema["uniqueItems"] = True
    convert_item = item.convert

    def convert(value: object, memo: Memo) -> Any:
        given = read_json(value, "[", list, memo)
        if type(given) is not list and type(given) is not tuple:
            raise Mismatch("a list", value)
        made = [convert_part(index, convert_item, part, memo) for index, part in enumerate(given)]
        try:
            return made if build is None else build(made)
        except TypeError:
            raise Mismatch("a list of values that can be compared", value) from None

    return Form(schema, convert, frozenset({"array"}))
