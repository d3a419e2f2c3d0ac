"""DeepSeek V3, R1 and V3.1: calls between marks, with the JSON in a code fence (V3) or bare (V3.1).

    V3     <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>multiply
           ```json
           {"a": 12, "b": 7}
           ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    V3.1   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>multiply<｜tool▁sep｜>{"a": 12}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

The XML format of V3.2 and later is not supported.
"""

from __future__ import annotations

import re

from ...types import ToolCall
from .reply import MAX_NAME, ParsedReply, ReplyReader, broken, call_from_parts

ALL, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```"
_BEFORE_JSON = re.compile(r"[^\n`{<]*")


def parse_tool_calls(text: str) -> ParsedReply:
    reader = ReplyReader(text)
    while reader.seek(CALL, skip=(ALL, ALL_END)):
        reader.add(reader.close(_read(reader), CALL, CALL_END, FENCE))
    return reader.done()


def _read(reader: ReplyReader) -> ToolCall:
    sep, end = reader.find(SEP), reader.find(CALL_END)
    if sep < 0 or 0 <= end < sep or 0 <= reader.find(CALL) < sep:
        return broken("", f"write {CALL}NAME{SEP}{{...}}{CALL_END}")
    name = reader.text[reader.pos : sep].strip()
    reader.pos = sep + len(SEP)
    _skip_fence(reader)
    if not reader.text.startswith("{", reader.pos):
        name = _BEFORE_JSON.match(reader.text, reader.pos, reader.pos + MAX_NAME)[0]  # type: ignore[index]
        reader.pos += len(name)
        _skip_fence(reader)
    if not reader.text.startswith("{", reader.pos):
        return broken(name, f"after the name comes one JSON object and then {CALL_END}")
    return call_from_parts(name, reader.take_json(CALL_END).removesuffix(FENCE))


def _skip_fence(reader: ReplyReader) -> None:
    reader.skip_space()
    if reader.text.startswith(FENCE, reader.pos):
        reader.pos += len(FENCE)
        if reader.text.startswith("json", reader.pos):
            reader.pos += len("json")
        reader.skip_space()
