"""Mistral: a marker, then either a JSON list of calls (older) or a name and its arguments (newer).

    [TOOL_CALLS] [{"name": "multiply", "arguments": {"a": 12, "b": 7}, "id": "9Ae3bDc2F"}]
    [TOOL_CALLS]multiply[ARGS]{"a": 12, "b": 7}
    [TOOL_CALLS]multiply[CALL_ID]9Ae3bDc2F[ARGS]{"a": 12, "b": 7}

`[TOOL_CALLS]multiply{"a": 12, "b": 7}` is accepted as well: some detokenizers drop the inner marks.
"""

from __future__ import annotations

from dataclasses import replace

from ...types import ToolCall
from .reply import (
    MAX_CALLS,
    MAX_NAME,
    ParsedReply,
    ReplyReader,
    broken,
    call_from_object,
    call_from_parts,
    clean_name,
    guess_name,
)
from .strict_json import BadJson, load_json

CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
REACH = 2 * MAX_NAME + len(CALL_ID) + len(ARGS)


def parse_tool_calls(text: str) -> ParsedReply:
    reader = ReplyReader(text)
    while reader.seek(CALLS):
        reader.skip_space()
        if reader.text.startswith(("[", "{"), reader.pos) and not reader.text.startswith((CALLS, CALL_ID, ARGS), reader.pos):
            reader.add(*_read_list(reader.take_json(CALLS)))
        else:
            reader.add(_read_named(reader))
    return reader.done()


def _read_list(body: str) -> list[ToolCall]:
    try:
        value = load_json(body)
    except BadJson as error:
        return [broken(guess_name(body), str(error))]
    items = value[: MAX_CALLS + 1] if isinstance(value, list) else [value]
    return [call_from_object(item) for item in items]


def _read_named(reader: ReplyReader) -> ToolCall:
    """A name, optionally an id, then a JSON object. Only the first characters are searched for the name and the id."""
    head = reader.text[reader.pos : reader.pos + REACH].partition(CALLS)[0].partition("{")[0]
    name, _, rest = head.partition(CALL_ID)
    name, marked, _ = name.partition(ARGS)
    given = "" if marked else rest.partition(ARGS)[0]
    reader.pos += len(head)
    if not reader.text.startswith("{", reader.pos):
        return broken(name.partition("\n")[0], f'write {CALLS}NAME{ARGS}{{"argument": value}}')
    call = call_from_parts(name, reader.take_json(CALLS))
    return replace(call, id=clean_name(given)) if given else call
