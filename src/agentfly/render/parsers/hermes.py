"""Hermes, Qwen2.5, Qwen3: each call is one JSON object between tags.

    <tool_call>
    {"name": "multiply", "arguments": {"a": 12, "b": 7}}
    </tool_call>

A `</tool_call>` inside a JSON string does not end the call. A call that is not closed is an error and is not executed.
"""

from __future__ import annotations

from ...types import ToolCall
from .reply import ParsedReply, ReplyReader, broken, call_from_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def parse_tool_calls(text: str) -> ParsedReply:
    reader = ReplyReader(text)
    while reader.seek(OPEN):
        reader.add(reader.close(_read(reader), OPEN, CLOSE))
    return reader.done()


def _read(reader: ReplyReader) -> ToolCall:
    reader.skip_space()
    if not reader.text.startswith("{", reader.pos):
        return broken("", f'after {OPEN} comes one JSON object: {{"name": "tool", "arguments": {{...}}}}')
    return call_from_json(reader.take_json(CLOSE))
