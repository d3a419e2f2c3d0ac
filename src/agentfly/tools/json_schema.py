"""Compiles a JSON schema to forms, for a tool whose parameters are given as a schema and not by annotations.

Checked are types, `enum`, `const`, `anyOf`, `oneOf`, `allOf`, fields, required fields, items and references inside the schema.
Other keywords (bounds, patterns, formats) are shown to the model and left to the function.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from .compound import array_of, options_of, union_of
from .records import unknown
from .scalars import ANY, KIND, SCALARS, Form, Memo, Mismatch, Schema, convert_part, read_json
from .text import quote

_SCALARS = {"string": str, "integer": int, "number": float, "boolean": bool, "null": None}
_ALTERNATIVES = ("anyOf", "oneOf")


class JsonParameters:
    """The arguments of a call by a schema: `forms` by name, those `required`, and the form of any other (`rest`), if allowed.

    A schema that says nothing of other arguments does not allow them: a name that the model made up is its mistake.
    """

    def __init__(self, schema: object) -> None:
        try:
            self.schema: Schema = json.loads(json.dumps(schema, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"parameters must be a JSON schema: {error}") from None
        if not isinstance(self.schema, dict) or self.schema.get("type", "object") != "object":
            raise ConfigError('parameters must be the JSON schema of an object: {"type": "object", "properties": {...}}')
        properties, required = self.schema.get("properties", {}), self.schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise ConfigError("parameters: `properties` must be an object and `required` a list of names")
        if absent := [name for name in required if name not in properties]:
            raise ConfigError(f"parameters: {absent[0]!r} is required, but not one of the properties")
        self._references: dict[str, Form | None] = {}
        self.forms = {name: self._form(part) for name, part in properties.items()}
        self.required = frozenset(required)
        allows = self.schema.get("additionalProperties", "patternProperties" in self.schema)
        self.rest = self._form(allows) if allows or isinstance(allows, dict) else None

    def _form(self, schema: object) -> Form:
        """The form of a schema; its own schema stays as it was given."""
        if schema is True:
            return ANY
        if not isinstance(schema, Mapping):
            raise ConfigError(f"parameters: {schema!r} is not a schema")
        made = self._unnamed(dict(schema))
        return Form(dict(schema), made.convert, made.kinds)

    def _unnamed(self, schema: Schema) -> Form:
        if "$ref" in schema:
            return self._referenced(schema["$ref"])
        if "enum" in schema or "const" in schema:
            return _one_of(schema["enum"] if "enum" in schema else [schema["const"]])
        for word in _ALTERNATIVES:
            if schema.get(word):
                return union_of([self._form(part) for part in schema[word]])
        if schema.get("allOf"):
            return _all_of([self._form(part) for part in schema["allOf"]])
        kind = schema.get("type", "object" if "properties" in schema else None)
        if isinstance(kind, list):
            return union_of([self._unnamed({**schema, "type": each}) for each in kind])
        if kind == "array":
            return array_of(self._form(schema.get("items", True)))
        if kind == "object":
            return self._object(schema)
        if kind is None:
            return ANY
        if kind not in _SCALARS:
            raise ConfigError(f"parameters: a schema has the unknown type {kind!r}")
        return SCALARS[_SCALARS[kind]]

    def _referenced(self, name: str) -> Form:
        """The form of a `$ref`. One that refers to itself is looked up again when a value is converted."""
        if self._references.get(name) is not None:
            return self._references[name] or ANY
        if name in self._references:  # it is being compiled
            return Form({"$ref": name}, lambda value, memo: (self._references[name] or ANY).convert(value, memo))
        target = self.schema
        try:
            if not name.startswith("#"):
                raise KeyError
            for part in name.split("/")[1:]:
                target = target[part.replace("~1", "/").replace("~0", "~")]
        except (KeyError, TypeError):
            raise ConfigError(f"parameters: {name!r} is not in the schema; only references inside it can be followed") from None
        self._references[name] = None
        made = self._references[name] = self._form(target)
        return made

    def _object(self, schema: Schema) -> Form:
        fields = {name: self._form(part) for name, part in schema.get("properties", {}).items()}
        required, allows = schema.get("required", []), schema.get("additionalProperties", True)
        rest = self._form(allows) if allows is not False else ANY if "patternProperties" in schema else None

        def convert(value: object, memo: Memo) -> Any:
            given = read_json(value, "{", dict, memo)
            if type(given) is not dict:
                raise Mismatch("an object", value)
            made = {}
            for name in required:
                if name not in given:
                    raise Mismatch("", value, because=f"has no field {quote(name)}")
            for name, part in given.items():
                form = fields.get(name, rest)
                if form is None:
                    raise Mismatch("", value, because=f"has {unknown(name, fields, 'field')}")
                made[name] = convert_part(str(name), form.convert, part, memo)
            return made

        return Form(schema, convert, frozenset({"object"}))


def _one_of(options: list[Any]) -> Form:
    """One of several values; of lists and objects, an equal one."""
    if options and all(type(option) in KIND and type(option) not in (list, dict) for option in options):
        return options_of(options, {}, options)
    expected = f"one of {json.dumps(options, ensure_ascii=False)[:200]}"

    def convert(value: object, memo: Memo) -> Any:
        if value in options:
            return value
        raise Mismatch(expected, value)

    return Form({}, convert)


def _all_of(parts: list[Form]) -> Form:
    def convert(value: object, memo: Memo) -> Any:
        for part in parts:
            value = part.convert(value, memo)
        return value

    kinds = [part.kinds for part in parts if part.kinds is not None]
    return Form({}, convert, frozenset.intersection(*kinds) if kinds else None)
