"""Splits a reply into thinking, visible text and calls with the marks of its template, and finds the skeleton of a text.

Templates with fields such as `tool_calls` or `reasoning_content` need the parts without the marks, because they write the marks
themselves. The calls are not parsed here; the message has them already. The time is linear in the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ..types import Message, ToolCall
from .template_marks import Marks

Skeleton = tuple[str, ...]


class Parts(NamedTuple):
    """`head` is the exact text before the calls; `thinking` and `content` are its parts, without marks.

    `wrapped`: marks of a response stand around the visible text in `head`.
    """

    head: str
    thinking: str | None
    content: str
    wrapped: bool = False


class ReplySplitter:
    """Splits the replies of one template."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self._openings = sorted({pair[0] for pair in marks.responses if pair[0].strip()}, key=len, reverse=True)
        self._closings = sorted({pair[1] for pair in marks.responses if pair[1]}, key=len, reverse=True)
        alone = len(marks.calls) == 1 and not marks.named_calls and not marks.header
        self._only_mark = marks.calls[0] if alone else ""  # the only way in which calls begin
        # The mark directly before the visible text, for a part of a reply that begins with other marks.
        self._last_opening = next(iter(re.findall(r"<[^<>\s]+>\s*$", self._openings[0])), "").strip() if self._openings else ""

    def read(self, message: Message, structured: bool) -> tuple[Parts, bool]:
        """The parts of a reply, and whether its calls have the notation of the template.

        Calls in another notation (Action: ... Input: ...), and calls that could not be parsed, stay in the text.
        """
        text, calls = message.content, message.tool_calls
        thinking, rest = self._split_thinking(text)
        if not (structured and calls):
            return self._parts(text, rest, thinking), False
        for call in calls:
            if call.error is not None or not call.name:
                return self._parts(text, rest, thinking), False
        start = self._call_start(rest, calls[0])
        if start is None:
            if all(call.name in text and all(_written(value) in text for value in call.arguments.values()) for call in calls):
                return self._parts(text, rest, thinking), False
            start = len(rest)
        return self._parts(text[: len(text) - len(rest) + start], rest[:start], thinking), True

    def _split_thinking(self, text: str) -> tuple[str | None, str]:
        """The thought of a reply, None if it has none, and the text after it."""
        for opening, closing in self.marks.thinking:
            if closing not in text:
                continue
            thoughts: list[str] = []
            rest = text
            while closing in rest:
                before, _, after = rest.partition(closing)
                before = self._without_header(before)
                if before.startswith(opening):
                    before = before[len(opening) :]
                elif thoughts or not (self.marks.opened or self._is_bare(before, opening)):
                    break  # Words, or another part of the reply, stand before the thought.
                thoughts.append(before.strip("\n"))
                rest = after
            if thoughts:
                return "\n".join(thoughts), rest
        return None, text

    def _is_bare(self, text: str, opening: str) -> bool:
        return opening not in text and not any(mark in text for mark in self.marks.in_replies)

    def _without_header(self, text: str) -> str:
        return text.lstrip().removeprefix(self.marks.header).lstrip() if self.marks.header else text.lstrip()

    def _parts(self, head: str, said: str, thinking: str | None) -> Parts:
        header = self.marks.header
        if header:
            pieces = [self._unwrapped(piece) for piece in said.split(header)]
            content = "\n".join(piece for piece in pieces if piece.strip())
        else:
            content = self._unwrapped(said)
        wrapped = content != said and content.strip() != said.strip()
        if thinking is not None or wrapped:
            content = content.strip("\n")
        return Parts(head, thinking, content, wrapped)

    def _unwrapped(self, text: str) -> str:
        """The visible text without the marks of a response."""
        if not (self._openings or self._closings):
            return text
        bare = text.lstrip()
        for opening in self._openings:
            mark = opening if opening.rstrip().isalnum() else opening.rstrip()
            if bare.startswith(mark):
                text = bare[len(mark) :]
                break
        else:
            if self._last_opening and self._last_opening in bare and bare.startswith(("<", "[")):
                text = bare.partition(self._last_opening)[2]
        bare = text.rstrip()
        for closing in (*self._closings, *(pair[1] for pair in self.marks.thinking if self.marks.header)):
            if bare.endswith(closing):
                return bare[: -len(closing)]
        return text

    def _call_start(self, rest: str, call: ToolCall) -> int | None:
        """Where the calls begin in the text after the thought, or None if the template's notation of calls is not in it."""
        if self._only_mark and (at := rest.find(self._only_mark)) >= 0:
            return at
        starts = [at for mark in self.marks.calls if (at := rest.find(mark)) >= 0]
        named = [at for lead in self.marks.named_calls if (at := self._named(rest, lead, call.name)) >= 0]
        if not starts and not named:
            return 0 if rest.lstrip()[:1] in ("{", "[") else None
        start = min(starts + named)
        if self.marks.header and (at := rest.rfind(self.marks.header, start, max(starts + named))) >= 0:
            # Another part of the reply stands between the first mark and the call.
            start = at + len(self.marks.header)
        return start

    def _named(self, rest: str, lead: str, name: str) -> int:
        if lead:
            return rest.find(lead + name)
        return 0 if rest.lstrip().startswith(name) else -1


def _written(value: object) -> str:
    if isinstance(value, str):
        return value[:40]
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return str(value)


class Skeletons:
    """Finds skeletons: the marks that matter to one template, and "" for each run of words between them."""

    def __init__(self, marks: Iterable[str]) -> None:
        self._marks = tuple(sorted(set(marks), key=len, reverse=True))
        self._pattern = re.compile("|".join(map(re.escape, self._marks)) or r"(?!)")

    def of(self, text: str) -> Skeleton:
        """The skeleton of a text, at most its first and last six pieces, which bounds the number of shapes."""
        for mark in self._marks:
            if mark in text:
                break
        else:
            return ("",) if text and not text.isspace() else ()
        pieces: list[str] = []
        at = 0
        for match in self._pattern.finditer(text):
            if text[at : match.start()].strip():
                pieces.append("")
            pieces.append(match.group())
            at = match.end()
        if text[at:].strip():
            pieces.append("")
        return tuple(pieces) if len(pieces) <= 12 else tuple(pieces[:6] + pieces[-6:])


def fill_skeleton(skeleton: Sequence[str], word: Callable[[int], str]) -> str:
    """A text with this skeleton and `word(i)` in place of the i-th run of words."""
    return "".join(piece or word(i) for i, piece in enumerate(skeleton))
