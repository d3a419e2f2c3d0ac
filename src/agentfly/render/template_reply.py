"""Splits a reply into thinking, visible text and calls, and finds the skeleton of a text: its marks without its words.

Templates with fields such as `tool_calls` or `reasoning_content` need the parts. The calls are not parsed here; the message has
them already. The time is linear in the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..types import Message

# The marks of thinking of different model families.
THINKING = (
    ("<think>", "</think>"),
    ("<mm:think>", "</mm:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
)
# The beginnings of calls. The text before the first of them is the visible reply.
CALLS = (
    "<tool_call>",
    "<tool_calls>",
    "<|tool_call>",
    "<|tool_call|>",
    "<|tool_call_start|>",
    "<|tool_calls_section_begin|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜DSML｜function_calls>",
    "<|START_ACTION|>",
    "<|tool_calls_prefix|>",
    "<|python_tag|>",
    "<function=",
    "[TOOL_CALLS]",
    "]<]minimax[>[<tool_call>",
    "<|start|>assistant<|channel|>commentary to=",
    "<|channel|>commentary to=",
    "<|start|>assistant to=",
    " to=functions.",
)
# Channel marks, for replies that are several messages in one (`<|channel|>analysis<|message|>...`).
CHANNEL, MESSAGE, END = "<|channel|>", "<|message|>", "<|end|>"
CHANNELS = (
    "<|start|>assistant<|channel|>final<|message|>",
    "<|channel|>analysis<|message|>",
    "<|channel|>final<|message|>",
    "<|channel|>commentary<|message|>",
    "<|end|>",
)
MARKS = tuple(tag for pair in THINKING for tag in pair) + CHANNELS

Skeleton = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Parts:
    """`head` is the exact text before the calls; `thinking` and `content` are its parts."""

    head: str
    thinking: str | None
    content: str


def split(text: str, calls: bool) -> Parts:
    """The parts of a reply. With `calls`, the text after the first mark of a call is left out, as the message has the calls."""
    head = text
    if calls:
        found = [at for at in (text.find(mark) for mark in CALLS) if at >= 0]
        if found:
            head = text[: min(found)]
        elif text.lstrip()[:1] in ("{", "["):
            head = ""
    if CHANNEL in head:
        return _split_channels(head, calls)
    for opening, closing in THINKING:
        if closing in head:
            before, _, content = head.partition(closing)
            return Parts(head, before.rpartition(opening)[2].strip("\n"), content.strip("\n"))
    return Parts(head, None, head)


def _split_channels(head: str, calls: bool) -> Parts:
    thinking: list[str] = []
    content: list[str] = []
    before, *parts = head.split(CHANNEL)
    if before.strip():
        content.append(before)
    for part in parts:
        channel, _, body = part.partition(MESSAGE)
        (content if channel.strip() == "final" else thinking).append(body.partition(END)[0])
    if calls:
        # These templates accept a single text before a call.
        return Parts(head, "\n".join(thinking + content) or None, "")
    return Parts(head, "\n".join(thinking) or None, "\n".join(content))


def is_foreign(message: Message) -> bool:
    """Whether the calls have a notation that no template uses (Action: ... Input: ...), or could not be parsed."""
    text = message.content
    if any(call.error is not None or not call.name for call in message.tool_calls):
        return True
    if any(mark in text for mark in CALLS) or text.lstrip()[:1] in ("{", "["):
        return False
    return all(
        call.name in text and all(_written(value) in text for value in call.arguments.values()) for call in message.tool_calls
    )


def _written(value: object) -> str:
    if isinstance(value, str):
        return value[:40]
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return str(value)


class Skeletons:
    """Finds skeletons: the marks that matter to one template, and "" for each run of words between them."""

    def __init__(self, literals: Iterable[str]) -> None:
        self._marks = tuple(sorted({*literals, *MARKS}, key=len, reverse=True))
        self._pattern = re.compile("|".join(map(re.escape, self._marks)))

    def of(self, text: str) -> Skeleton:
        """The skeleton of a text, at most its first and last six pieces, which bounds the number of shapes."""
        if not any(mark in text for mark in self._marks):
            return ("",) if text and not text.isspace() else ()
        pieces: list[str] = []
        at = 0
        for found in self._pattern.finditer(text):
            if text[at : found.start()].strip():
                pieces.append("")
            pieces.append(found.group())
            at = found.end()
        if text[at:].strip():
            pieces.append("")
        return tuple(pieces) if len(pieces) <= 12 else tuple(pieces[:6] + pieces[-6:])


def fill_skeleton(skeleton: Sequence[str], word: Callable[[int], str]) -> str:
    """A text with this skeleton and `word(i)` in place of the i-th run of words."""
    return "".join(piece or word(i) for i, piece in enumerate(skeleton))
