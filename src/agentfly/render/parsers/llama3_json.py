"""Llama 3: the reply is a call, bare or after a tag; several calls are separated by semicolons.

    {"name": "multiply", "parameters": {"a": 12, "b": 7}}
    <|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}

A bare JSON object is a call only if it has (or, if broken, begins with) a name and parameters: an answer may be JSON, too.
"""

from __future__ import annotations

from .reply import ParsedReply, ReplyReader, broken, call_from_json, guess_name
from .strict_json import BadJson, load_object

TAG = "<|python_tag|>"
BETWEEN = " \t\r\n;,"


def parse_tool_calls(text: str) -> ParsedReply:
    reader = ReplyReader(text)
    reader.skip_space()
    if reader.text.startswith("{", reader.pos):
        start, body = reader.pos, reader.take_json("")
        if not _is_call(body):
            return ParsedReply(text[start:].strip())
        reader.add(call_from_json(body, "parameters"))
        _read_more(reader)
    while reader.seek(TAG):
        reader.skip_space()
        if not reader.text.startswith("{", reader.pos):
            reader.add(broken("", f'after {TAG} comes one JSON object: {{"name": "tool", "parameters": {{...}}}}'))
        _read_more(reader)
    return reader.done()


def _read_more(reader: ReplyReader) -> None:
    while True:
        while reader.pos < len(reader.text) and reader.text[reader.pos] in BETWEEN:
            reader.pos += 1
        if not reader.text.startswith("{", reader.pos):
            return
        if not reader.add(call_from_json(reader.take_json(TAG), "parameters")):
            return


def _is_call(body: str) -> bool:
    try:
        value = load_object(body)
    except BadJson:
        return bool(guess_name(body)) and ('"parameters"' in body or '"arguments"' in body)
    return isinstance(value.get("name"), str) and ("parameters" in value or "arguments" in value)
