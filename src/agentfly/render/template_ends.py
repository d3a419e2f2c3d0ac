"""Finds the tokens that end a reply, and the turn marks that a reply must not contain, by rendering placeholder messages.

The generation config of a model may name more stop tokens; those are given to the renderer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ..types import Message, ToolCall
from .profile_glue import without
from .template import TemplateRefused
from .template_dialect import Dialect
from .template_marks import PROBE_TOOLS
from .template_reply import MARKS
from .template_tokens import Codec


def end_of_turn(dialect: Dialect, codec: Codec) -> list[int]:
    """The ids of the tokens that end a plain reply and a reply with a call."""
    user, reply = Message("user", "zquser"), Message("assistant", "zqreply")
    call = ToolCall("zqtool", {"x": "zqvalue"}, "zqd00000q")
    result = Message("tool", "zqresult", tool_call_id=call.id)
    found: list[int] = []
    behind = _after(dialect, [user, reply], "zqreply", None)
    marks = _specials(codec, behind)
    if marks and not without(behind, marks).strip():
        found.append(codec.control[marks[-1]])
    else:
        # The template ends the last reply with no mark, so the model ends it with the mark of the next turn.
        behind = _after(dialect, [user, reply, user], "zqreply", None)
        found += [codec.control[mark] for mark in _specials(codec, behind)[:1] if behind.lstrip().startswith(mark)]
    if dialect.format.calls:
        called = Message("assistant", "", (call,))
        both = Message("assistant", "", (call, replace(call, id="zqd00001q")))
        twice = _after(dialect, [user, both], "zqvalue", PROBE_TOOLS)
        closing = _specials(codec, _after(dialect, [user, called], "zqvalue", PROBE_TOOLS))
        if closing:
            # The mark that closes a call follows each call; the mark that ends the turn occurs once, at the end.
            found += [codec.control[closing[-1]]] if twice.count(closing[-1]) <= 1 else []
        else:
            after = _after(dialect, [user, called, result], "zqvalue", PROBE_TOOLS).partition("zqresult")[0]
            found += [codec.control[token] for token in _specials(codec, after)[:1]]
    return list(dict.fromkeys(found))


def _specials(codec: Codec, text: str) -> list[str]:
    """The special tokens of a text in order; of overlapping tokens the longest."""
    found = sorted((token for token in codec.special if token in text), key=lambda token: (text.find(token), len(token)))
    return [token for token in found if not any(token != other and token in other for other in found)]


def _after(dialect: Dialect, messages: list[Message], word: str, tools: Any) -> str:
    try:
        text = dialect.render(messages, tools, False, 0)
    except TemplateRefused:
        return ""
    return text.partition(word)[2]


def turn_marks(dialect: Dialect, codec: Codec, stops: Iterable[str]) -> list[str]:
    """The special tokens that begin and end turns, which a reply must not contain. Marks of thinking are allowed."""
    marks = set(stops)
    for messages in ([Message("user", "a")], [Message("system", "a"), Message("user", "a")]):
        try:
            text = dialect.render(messages, None, True, 0)
        except TemplateRefused:
            continue
        marks |= {token for token in codec.special if token in text}
    return [mark for mark in marks if len(mark) > 1 and mark not in MARKS]
