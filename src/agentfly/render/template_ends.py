"""The tokens that end a reply, and the turn marks that a reply must not contain, from the marks of the template.

The generation config of a model may name more stop tokens; those are given to the renderer.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..types import Message
from .template import TemplateRefused
from .template_dialect import Dialect
from .template_tokens import Codec


def end_of_turn(dialect: Dialect, codec: Codec) -> list[int]:
    """The ids of the tokens that end a plain reply and a reply with a call."""
    return list(dict.fromkeys(codec.control[mark] for mark in dialect.marks.ends if mark))


def turn_marks(dialect: Dialect, codec: Codec, stops: Iterable[str]) -> list[str]:
    """The special tokens that begin and end turns, which a reply must not contain. Marks of its parts are allowed."""
    marks = set(stops)
    for messages in ([Message("user", "a")], [Message("system", "a"), Message("user", "a")]):
        try:
            text = dialect.render(messages, None, True, 0)
        except TemplateRefused:
            continue
        marks |= {token for token in codec.special if token in text}
    allowed = "\0".join(dialect.marks.in_replies)
    return [mark for mark in marks if len(mark) > 1 and mark not in allowed]
