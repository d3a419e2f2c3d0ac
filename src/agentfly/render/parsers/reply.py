"""`ReplyReader`, which every parser uses: walks a reply once from left to right and collects prose and calls.

Thinking (`<think>...</think>`) is neither prose nor call. A template may open the thinking in the prompt, so a reply whose
first such tag is `</think>` begins inside it. The next position of each marker is cached, so the reader makes one pass per
marker, however often it searches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...types import ToolCall
from .strict_json import BadJson, json_end, json_kind, load_json, load_object

THINK, THINK_END = "<think>", "</think>"
MAX_CALLS = 64
MAX_NAME = 128


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """The prose of a reply, without thinking and calls, and the calls. If `typed` is false, arguments are raw text."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    typed: bool = True


Parser = Callable[[str], ParsedReply]


class ReplyReader:
    """Walks one reply. `seek` a marker, read what follows, `add` a call, move `pos`; `done` when there is no marker left."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.pos = after_thinking(text)
        self._kept: list[str] = []
        self._calls: list[ToolCall] = []
        self._next: dict[str, int] = {}
        self._trust_quotes = True
        self._too_many = False

    def find(self, marker: str, start: int | None = None) -> int:
        """The next position of `marker` at or after `start` (default: here), or -1. `start` must not decrease."""
        start = self.pos if start is None else start
        at = self._next.get(marker, -2)
        if at != -1 and at < start:
            at = self._next[marker] = self.text.find(marker, start)
        return at

    def seek(self, *markers: str, skip: tuple[str, ...] = ()) -> str:
        """Moves past the first marker outside thinking and returns it, or "" if there is none or MAX_CALLS calls were read.

        The text before it is prose. Marks in `skip` are dropped.
        """
        while True:
            at, marker = len(self.text), ""
            for wanted in (*markers, *skip, THINK):
                if 0 <= (place := self.find(wanted)) < at:
                    at, marker = place, wanted
            if not marker:
                break
            self._kept.append(self.text[self.pos : at])
            self.pos = at + len(marker)
            if marker == THINK:
                end = self.find(THINK_END)
                self.pos = len(self.text) if end < 0 else end + len(THINK_END)
            elif marker in skip:
                continue
            elif len(self._calls) < MAX_CALLS:
                return marker
            else:
                self._too_many = True
                self.pos = len(self.text)
        self._kept.append(self.text[self.pos :])
        self.pos = len(self.text)
        return ""

    def skip_space(self) -> None:
        while self.pos < len(self.text) and self.text[self.pos].isspace():
            self.pos += 1

    def take_json(self, stop: str) -> str:
        """The object or list that begins here; moves past it. It ends at the latest at a `stop` outside a string.

        A quote that never closes hides every later `stop`. Finding that costs one pass over the text. After it happened once, a
        value ends at the next `stop` regardless of quotes, so that calls after a broken one are still read in linear time.
        """
        start = self.pos
        complete = False
        if self._trust_quotes:
            self.pos, complete = json_end(self.text, start, stop)
        if not complete and self.pos in (start, len(self.text)):
            self._trust_quotes = False
            at = self.text.find(stop, start) if stop else -1
            self.pos = len(self.text) if at < 0 else at
        return self.text[start : self.pos]

    def close(self, call: ToolCall, opener: str, closer: str, between: str = "") -> ToolCall:
        """Moves past the closing marker of a call.

        The call is broken if the marker is missing, or if text other than `between` precedes it.
        """
        end, following = self.find(closer), self.find(opener)
        if end < 0 or 0 <= following < end:
            self.pos = len(self.text) if following < 0 else following
            return call if call.error else broken(call.name, f"it is not closed with {closer}")
        rest = self.text[self.pos : end].strip()
        self.pos = end + len(closer)
        if call.error or rest in ("", between):
            return call
        return broken(call.name, "there is other text after its JSON object")

    def add(self, *calls: ToolCall) -> bool:
        """Adds calls up to MAX_CALLS. Returns False if there were more."""
        room = MAX_CALLS - len(self._calls)
        self._calls += calls[:room]
        self._too_many |= len(calls) > room
        return not self._too_many

    def done(self, *, typed: bool = True) -> ParsedReply:
        content = "\n".join(part for kept in self._kept if (part := kept.strip()))
        calls = list(self._calls)
        if self._too_many:
            calls.append(broken("", f"only the first {MAX_CALLS} calls of a reply are read"))
        return ParsedReply(content, tuple(calls), typed)


def after_thinking(text: str) -> int:
    """The position after the thinking at the beginning of a reply; 0 if there is none."""
    if THINK_END not in text and THINK not in text:
        return 0
    opened, closed = text.find(THINK), text.find(THINK_END)
    pos = closed + len(THINK_END) if closed >= 0 and not 0 <= opened < closed else 0
    while opened >= 0:
        opened = text.find(THINK, pos)
        if opened < 0 or text[pos:opened].strip():
            break
        closed = text.find(THINK_END, opened)
        pos = len(text) if closed < 0 else closed + len(THINK_END)
    return pos


def without_thinking(text: str) -> str:
    """The reply without its thinking."""
    reader = ReplyReader(text)
    reader.seek()
    return reader.done().content


def clean_name(name: str) -> str:
    """The name of a tool as the model wrote it, made short, one line and encodable."""
    if name.isidentifier() and len(name) <= MAX_NAME:
        return name
    name = name.strip().strip("`\"'").strip()
    return " ".join(name[:MAX_NAME].encode("utf-8", "replace").decode().split())


def broken(name: str, why: str) -> ToolCall:
    """A call that could not be parsed. It is not executed; the model is shown the reason."""
    return ToolCall(clean_name(name), error=f"This tool call could not be read: {why}.")


def call_from_parts(name: str, arguments: str) -> ToolCall:
    """A call with a name and separate JSON arguments."""
    if not clean_name(name) or len(name) > MAX_NAME:
        return broken(name, "it needs the name of a tool" if not name.strip() else "the name of the tool is too long")
    try:
        return ToolCall(clean_name(name), load_object(arguments))
    except BadJson as error:
        return broken(name, str(error))


def call_from_json(text: str, key: str = "arguments") -> ToolCall:
    """A call that is one JSON object with a name and arguments."""
    try:
        return call_from_object(load_object(text), key)
    except BadJson as error:
        return broken(guess_name(text), str(error))


def call_from_object(value: Any, key: str = "arguments") -> ToolCall:
    """A call from a decoded object.

    The key may be `arguments` or `parameters`; its value may also be a string with JSON.
    """
    if not isinstance(value, dict):
        return broken("", f"a JSON object is expected, not {json_kind(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not clean_name(name) or len(name) > MAX_NAME:
        return broken("", f'it must look like {{"name": "tool", "{key}": {{...}}}}')
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = load_json(arguments)
        except BadJson:
            return broken(name, f"{key} must be a JSON object, not a string")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return broken(name, f"{key} must be a JSON object, not {json_kind(arguments)}")
    given = value.get("id")
    return ToolCall(clean_name(name), arguments, clean_name(given) if isinstance(given, str) else "")


def guess_name(text: str) -> str:
    """The name in JSON that cannot be parsed, so that the error can tell the model which call it was."""
    _, key, rest = text[:400].partition('"name"')
    name = rest.lstrip(" :\n\t")
    return name[1:].partition('"')[0] if key and name.startswith('"') else ""
