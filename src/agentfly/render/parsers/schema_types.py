"""`type_arguments` converts arguments that a format writes as text to the types that the schema of the tool asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...types import ToolCall
from .literals import BadLiteral, load_literal
from .strict_json import BadJson, load_json

WORDS = {"true": True, "false": False, "none": None, "null": None}
MAX_DEPTH = 64


def type_arguments(call: ToolCall, schema: Mapping[str, Any]) -> ToolCall:
    """Converts raw text to the types of the schema. A value that does not fit stays text, and the tool refuses it."""
    parameters = schema.get("function", schema).get("parameters") or {}
    return replace(
        call, arguments={name: _typed(value, _property(parameters, name), parameters) for name, value in call.arguments.items()}
    )


def _property(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    schema_of_name = (schema.get("properties") or {}).get(name, schema.get("additionalProperties"))
    return schema_of_name if isinstance(schema_of_name, Mapping) else {}


def _typed(value: object, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int = 0) -> Any:
    parts = _parts(schema, root)
    kinds = {kind for part in parts for kind in _kinds(part)}
    if depth < MAX_DEPTH and isinstance(value, (dict, list)):
        part = next((part for part in parts if ("array" if isinstance(value, list) else "object") in _kinds(part)), {})
        if isinstance(value, list):
            items = part.get("items")
            return [_typed(item, items if isinstance(items, Mapping) else {}, root, depth + 1) for item in value]
        return {name: _typed(item, _property(part, name), root, depth + 1) for name, item in value.items()}
    if not isinstance(value, str):
        return value
    word = value.strip().lower() if len(value) < 20 else ""
    if word in WORDS and ("null" if WORDS[word] is None else "boolean") in kinds:
        return WORDS[word]
    if not kinds or "string" in kinds:
        return value
    if not value.strip():
        return [] if "array" in kinds else {} if "object" in kinds else value
    try:
        return load_json(value)
    except BadJson:
        pass  # some templates write lists and objects as Python does
    try:
        return load_literal(value)
    except BadLiteral:
        return value


def _parts(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The schema and its alternatives, with references into the tool's own definitions followed."""
    parts: list[Mapping[str, Any]] = []
    for part in (schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())):
        name = str(part.get("$ref", ""))
        target = (root.get("$defs") or {}).get(name.rpartition("/")[2]) if name else None
        parts.append(target if isinstance(target, Mapping) else part)
    return parts


def _kinds(schema: Mapping[str, Any]) -> list[Any]:
    if "$ref" in schema:
        return ["object"]
    kind = schema.get("type", [])
    kinds = [kind] if isinstance(kind, str) else list(kind)
    if not kinds and isinstance(schema.get("enum"), list):
        names = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
        kinds = [names[type(item)] for item in schema["enum"] if type(item) in names]
    return kinds
