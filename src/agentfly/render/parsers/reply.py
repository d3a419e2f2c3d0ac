"""`ReplyReader` walks a reply once from left to right and collects prose and calls; `CallParser` is the base of every parser.

Thinking is neither prose nor call. Each parser has its marks of thinking, pairs of an opening and a closing mark. A template
may open the thinking in the prompt, so text before a closing mark that nothing opened is thinking, too:

    <think>plan</think>text    text        plan</think>text    text        text<think>cut off    text

The next position of each mark is cached, so the reader makes one pass per mark, however often it searches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ...types import ToolCall, quick_init
from .strict_json import BadJson, json_end, json_kind, load_json, load_object

Pairs = tuple[tuple[str, str], ...]
THINK: Pairs = (("<think>", "</think>"),)
MAX_CALLS = 64
MAX_ATTEMPTS = 4 * MAX_CALLS
MAX_BACK = 4
MAX_NAME = 128

_WORD = re.compile(r"[a-z]+")
_GENERAL = {"end", "eom", "eot", "eos", "im", "message", "msg", "sep", "close", "turn", "of", "text", "s"}


@quick_init
@dataclass(frozen=True, slots=True)
class ParsedReply:
    """The prose of a reply, without thinking and calls, and the calls. If `typed` is false, arguments are raw text."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    typed: bool = True


Parser = Callable[[str], ParsedReply]


class ReplyReader:
    """Walks one reply. `seek` a marker, read what follows, `add` a call, move `pos`; `done` when there is no marker left.

    thinking   the pairs of marks around thinking.
    opened     the closing mark of the thinking that the prompt opened. With "", a closing mark that nothing opened voids what
               was read before it. With None (for readers that keep results elsewhere) reading begins behind such a mark.
    drop       marks around prose (`<|START_RESPONSE|>`), which are left out.
    """

    def __init__(self, text: str, thinking: Pairs = THINK, opened: str | None = None, drop: tuple[str, ...] = ()) -> None:
        self.text = text
        self.pos = 0
        self._pairs = dict(thinking)
        self._closings = own_closings(thinking)
        self._drop = drop
        self._kept: list[str] = []
        self._calls: list[ToolCall] = []
        self._next: dict[str, int] = {}
        self._marked_at = 0
        self._num_attempts = 0
        self._num_bare = self._num_back = MAX_BACK
        self._said = False  # whether prose or a mark was read
        self._trust_quotes = True
        self._too_many = False
        if opened is None:
            self.pos = after_thinking(text, thinking)
        elif opened:
            end = self.find(opened)
            self.pos = len(text) if end < 0 else end + len(opened)

    def find(self, marker: str, start: int | None = None) -> int:
        """The next position of `marker` at or after `start` (default: here), or -1. `start` must not decrease."""
        start = self.pos if start is None else start
        at = self._next.get(marker, -2)
        if at != -1 and at < start:
            at = self._next[marker] = self.text.find(marker, start)
        return at

    def first(self, markers: Iterable[str], start: int | None = None) -> tuple[int, str]:
        """The nearest of the markers and its position, the longest if several begin there; (-1, "") if there is none."""
        at, marker = -1, ""
        for wanted in markers:
            place = self.find(wanted, start)
            if place >= 0 and (at < 0 or place < at or (place == at and len(wanted) > len(marker))):
                at, marker = place, wanted
        return at, marker

    def seek(self, *markers: str, skip: tuple[str, ...] = (), bare: str = "") -> str:
        """Moves past the first marker outside thinking and returns it, or "" if there is none or MAX_CALLS calls were read.

        The text before it is prose. Marks in `skip` are dropped. If the reply (less its thinking) begins with a character of
        `bare`, that character is returned, and `pos` stays before it.
        """
        skip = (*skip, *self._drop)
        while True:
            if bare and self._begins_with(bare):
                return self.text[self.pos]
            wanted = () if self._too_many else (*markers, *skip)
            at, marker = self.first((*wanted, *self._pairs, *self._closings))
            if not marker:
                break
            if not self._too_many:
                self.keep(self.text[self.pos : at])
            self.pos = at + len(marker)
            if marker in markers:
                if len(self._calls) < MAX_CALLS and self._num_attempts < MAX_ATTEMPTS:
                    self._marked_at = at
                    self._num_attempts += 1
                    self._said = True
                    return marker
                # Calls are no longer read. The walk goes on, because a closing mark of thinking may void what was read.
                self._too_many = True
            elif marker in self._pairs:
                end = self.find(self._pairs[marker])
                self.pos = len(self.text) if end < 0 else end + len(self._pairs[marker])
            elif marker in self._closings:
                self._void()
        if not self._too_many:
            self.keep(self.text[self.pos :])
        self.pos = len(self.text)
        return ""

    def _begins_with(self, bare: str) -> bool:
        if self._said or not self._num_bare:
            return False
        self.skip_space()
        if self.pos == len(self.text) or self.text[self.pos] not in bare:
            return False
        self._num_bare -= 1
        self._marked_at, self._said = self.pos, True
        return True

    def _void(self) -> None:
        """Forgets everything up to here: it was thinking."""
        self._kept.clear()
        self._calls.clear()
        self._too_many = self._said = False

    def skip_space(self) -> None:
        while self.pos < len(self.text) and self.text[self.pos].isspace():
            self.pos += 1

    def at(self, *marks: str) -> bool:
        """Whether one of the marks stands here."""
        return self.text.startswith(marks, self.pos)

    def accept(self, mark: str) -> bool:
        """Moves past a mark if it stands here."""
        if not self.text.startswith(mark, self.pos):
            return False
        self.pos += len(mark)
        return True

    def take_json(self, *stops: str) -> str:
        """The object or list that begins here; moves past it. It ends at the latest at one of `stops` outside a string.

        A quote that never closes hides every later stop. Finding that costs one pass over the text. After it happened once, a
        value ends at the next stop regardless of quotes, so that calls after a broken one are still read in linear time.
        """
        start = self.pos
        stops = tuple(stop for stop in stops if stop)
        complete = False
        if self._trust_quotes:
            self.pos, complete = json_end(self.text, start, *stops)
        if not complete and self.pos in (start, len(self.text)):
            self._trust_quotes = False
            at, _ = self.first((*stops, *self._closings), start)
            self.pos = len(self.text) if at < 0 else at
        return self.text[start : self.pos]

    def close(self, call: ToolCall, openers: str | tuple[str, ...], closer: str, between: str = "") -> ToolCall:
        """Moves past the closing marker of a call.

        The call is broken if the marker is missing, or if text other than `between` precedes it.
        """
        end = self.find(closer)
        following, _ = self.first((openers,) if isinstance(openers, str) else openers)
        if end < 0 or 0 <= following < end:
            self.pos = len(self.text) if following < 0 else following
            return call if call.error else broken(call.name, f"it is not closed with {closer}")
        rest = self.text[self.pos : end].strip()
        self.pos = end + len(closer)
        if call.error or rest in ("", between):
            return call
        return broken(call.name, "there is other text after its JSON object")

    def add(self, *calls: ToolCall) -> bool:
        """Adds calls up to MAX_CALLS. Returns False if there were more.

        A broken call that reaches beyond a closing mark of thinking was a mark that the thinking mentions, and no call.
        """
        if self._closings and any(call.error for call in calls):
            at, closing = self.first(self._closings, self._marked_at)
            if 0 <= at < self.pos:
                self._void()
                if self._num_back:
                    # Positions behind the mark may have been skipped, so the cache starts anew.
                    self._num_back -= 1
                    self._next.clear()
                    self.pos = at + len(closing)
                return True
        room = MAX_CALLS - len(self._calls)
        self._calls += calls[:room]
        self._too_many |= len(calls) > room
        return not self._too_many

    def keep(self, text: str) -> None:
        """Adds prose."""
        self._kept.append(text)
        self._said = self._said or bool(text.strip())

    def done(self, *, typed: bool = True) -> ParsedReply:
        content = "\n".join(part for kept in self._kept if (part := kept.strip()))
        calls = list(self._calls)
        if self._too_many:
            calls.append(broken("", f"only the first {MAX_CALLS} calls of a reply are read"))
        return ParsedReply(content, tuple(calls), typed)


@dataclass(frozen=True, kw_only=True)
class CallParser:
    """A parser of one format. Calling it with the text of a reply returns a `ParsedReply`; it never raises.

    `thinking`, `opened` and `drop` are those of `ReplyReader`. `names` are the tools that exist, or None if unknown.
    `typed` is false if the format writes arguments as text, whose types only the schema of the tool tells. `final` are the
    marks of a call whose closing mark also ends the reply: the text of a completion leaves it out.
    """

    thinking: Pairs = THINK
    opened: str = ""
    drop: tuple[str, ...] = ()
    names: frozenset[str] | None = None
    typed: bool = True
    final: tuple[str, str] = ("", "")

    def __call__(self, text: str) -> ParsedReply:
        reader = ReplyReader(self.closed(text), self.thinking, self.opened, self.drop)
        self.read(reader)
        return reader.done(typed=self.typed)

    def closed(self, text: str) -> str:
        """The text with the mark that closed its last call and ended the reply."""
        opening, closing = self.final
        at = text.rfind(opening) if opening else -1
        return text if at < 0 or closing in text[at:] else text + closing

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Calls in this format, or "" if only a chat template can write them."""
        return ""

    def read(self, reader: ReplyReader) -> None:
        """Reads a reply to its end."""
        raise NotImplementedError


@lru_cache(maxsize=256)
def own_closings(pairs: Pairs) -> tuple[str, ...]:
    """The closing marks that end nothing but thinking.

    A mark such as `<|end|>` ends other messages as well. Without its opening it says nothing about the text before it.
    """
    return tuple(dict.fromkeys(closing for _, closing in pairs if {*_WORD.findall(closing.lower())} - _GENERAL))


def after_thinking(text: str, thinking: Pairs = THINK) -> int:
    """The position after the thinking at the beginning of a reply; 0 if there is none."""
    reader = ReplyReader(text, thinking, "")
    pos = 0
    opened, _ = reader.first(dict(thinking))
    closed, closing = reader.first(own_closings(thinking))
    if closed >= 0 and not 0 <= opened < closed:
        pos = closed + len(closing)
    pairs = dict(thinking)
    while True:
        opened, opening = reader.first(pairs, pos)
        if opened < 0 or text[pos:opened].strip():
            return pos
        closed = reader.find(pairs[opening], opened)
        pos = len(text) if closed < 0 else closed + len(pairs[opening])


def without_thinking(text: str, thinking: Pairs = THINK) -> str:
    """The reply without its thinking."""
    reader = ReplyReader(text, thinking, "")
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


def call_from_object(value: object, key: str = "arguments") -> ToolCall:
    """A call from a decoded object.

    The keys may be `name` or `tool_name`, and `arguments` or `parameters`; the arguments may also be a string with JSON. The
    object may be wrapped as {"type": "function", "function": {...}}.
    """
    if not isinstance(value, dict):
        return broken("", f"a JSON object is expected, not {json_kind(value)}")
    if isinstance(value.get("function"), dict) and "name" not in value:
        value = {"id": value.get("id"), **value["function"]}
    name = value.get("name", value.get("tool_name"))
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
    for key in ('"name"', '"tool_name"'):
        _, separator, rest = text[:400].partition(key)
        name = rest.lstrip(" :\n\t")
        if separator and name.startswith('"'):
            return name[1:].partition('"')[0]
    return ""
