"""Qwen3-Coder: the call is XML-like, and argument values are raw text.

    <tool_call>
    <function=multiply>
    <parameter=a>
    12
    </parameter>
    </function>
    </tool_call>

Only the schema of the tool tells the number 12 from the text "12". Values are therefore returned as text (`typed` is
false), and `type_arguments` converts them by the schema. A value ends at the first `</parameter>`, so it cannot contain
one.
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

    def give_up(why: str) -> ToolCall:
        return reader.close(broken(name, why), FUNCTION, FUNCTION_END)

    while True:
        reader.skip_space()
        if reader.text.startswith(FUNCTION_END, reader.pos):
            reader.pos += len(FUNCTION_END)
            return ToolCall(name, arguments)
        if not reader.text.startswith(PARAMETER, reader.pos):
            return give_up(f"it is not closed with {FUNCTION_END}, or has text outside its parameters")
        reader.pos += len(PARAMETER)
        key = _tag_name(reader)
        end, following = reader.find(PARAMETER_END), reader.find(PARAMETER)
        if not key:
            return give_up(f"{PARAMETER}NAME> needs the name of a parameter")
        if end < 0 or 0 <= following < end:
            return give_up(f"the parameter {key!r} is not closed with {PARAMETER_END}")
        if key in arguments:
            return give_up(f"the parameter {key!r} is given twice")
        arguments[key] = reader.text[reader.pos : end].removeprefix("\n").removesuffix("\n")
        reader.pos = end + len(PARAMETER_END)


def _tag_name(reader: ReplyReader) -> str:
    """The name in a tag `<function=NAME>`; moves past the tag. Returns "" if the tag does not end soon."""
    end = reader.text.find(">", reader.pos, reader.pos + MAX_NAME)
    if end < 0:
        return ""
    name, reader.pos = reader.text[reader.pos : end], end + 1
    return clean_name(name)


def type_arguments(call: ToolCall, schema: Mapping[str, Any]) -> ToolCall:
    """Converts raw text to the types of the schema. A value that does not fit stays text, and the tool refuses it."""
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
