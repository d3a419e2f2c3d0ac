"""Qwen3-Coder: the call is XML-like, and argument values are raw text.

    <tool_call>
    <function=multiply>
    <parameter=a>
    12
    </parameter>
    </function>
    </tool_call>

Without the tool's schema nobody can tell the number 12 from the text "12": values come out as text (`typed` is false), and
`type_arguments` turns them into what the schema asks for. A value ends at the first `</parameter>`; it cannot hold one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...types import ToolCall
from .reply import MAX_NAME, ParsedReply, ReplyReader, broken, clean_name
from .strict_json import BadJson, load_json

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
WORDS = {"true": True, "false": False, "none": None, "null": None}


def parse_tool_calls(text: str) -> ParsedReply:
    reader = ReplyReader(text)
    while marker := reader.seek("<tool_call>", FUNCTION, skip=("</tool_call>",)):
        if marker == FUNCTION:
            reader.add(_read(reader))
            continue
        reader.skip_space()
        if not reader.text.startswith(FUNCTION, reader.pos):
            reader.add(broken("", f"after <tool_call> comes {FUNCTION}NAME>"))
    return reader.done(typed=False)


def _read(reader: ReplyReader) -> ToolCall:
    name = _tag_name(reader)
    if not name:
        return broken("", f"{FUNCTION}NAME> needs the name of a tool")
    arguments: dict[str, Any] = {}
    while True:
        reader.skip_space()
        if reader.text.startswith(FUNCTION_END, reader.pos):
            reader.pos += len(FUNCTION_END)
            return ToolCall(name, arguments)
        if not reader.text.startswith(PARAMETER, reader.pos):
            return _give_up(reader, name, f"it is not closed with {FUNCTION_END}, or has text outside its parameters")
        reader.pos += len(PARAMETER)
        key = _tag_name(reader)
        end, following = reader.find(PARAMETER_END), reader.find(PARAMETER)
        if not key:
            return _give_up(reader, name, f"{PARAMETER}NAME> needs the name of a parameter")
        if end < 0 or 0 <= following < end:
            return _give_up(reader, name, f"the parameter {key!r} is not closed with {PARAMETER_END}")
        if key in arguments:
            return _give_up(reader, name, f"the parameter {key!r} is given twice")
        arguments[key] = reader.text[reader.pos : end].removeprefix("\n").removesuffix("\n")
        reader.pos = end + len(PARAMETER_END)


def _tag_name(reader: ReplyReader) -> str:
    """The rest of a tag `<function=NAME>`; moves behind it. "" where the tag does not end soon."""
    end = reader.text.find(">", reader.pos, reader.pos + MAX_NAME)
    if end < 0:
        return ""
    name, reader.pos = reader.text[reader.pos : end], end + 1
    return clean_name(name)


def _give_up(reader: ReplyReader, name: str, why: str) -> ToolCall:
    """Leave a broken call where it ends, or where the next one begins."""
    end, following = reader.find(FUNCTION_END), reader.find(FUNCTION)
    if end >= 0 and not 0 <= following < end:
        reader.pos = end + len(FUNCTION_END)
    else:
        reader.pos = len(reader.text) if following < 0 else following
    return broken(name, why)


def type_arguments(call: ToolCall, schema: Mapping[str, Any]) -> ToolCall:
    """Raw text to what the tool's schema asks for. What does not fit stays text: the tool then says what it wanted."""
    function = schema.get("function", schema)
    properties = function.get("parameters", {}).get("properties", {})
    typed = {name: _typed(value, properties.get(name, {})) for name, value in call.arguments.items()}
    return replace(call, arguments=typed)


def _typed(value: Any, schema: Mapping[str, Any]) -> Any:
    kinds = {kind for part in (schema, *schema.get("anyOf", ())) for kind in _kinds(part)}
    word = value.strip().lower() if isinstance(value, str) and len(value) < 20 else ""
    if word in WORDS and ("null" if WORDS[word] is None else "boolean") in kinds:
        return WORDS[word]
    if not isinstance(value, str) or not kinds or "string" in kinds:
        return value
    try:
        return load_json(value)
    except BadJson:
        return value


def _kinds(schema: Mapping[str, Any]) -> list[Any]:
    kind = "object" if "$ref" in schema else schema.get("type", [])
    return [kind] if isinstance(kind, str) else list(kind)
