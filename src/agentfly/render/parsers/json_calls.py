"""Formats in which a call is a JSON object with a name and arguments, or in which calls are a JSON list of such objects.

    <tool_call>{"name": "multiply", "arguments": {"a": 12}}</tool_call>                                      hermes
    <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "multiply", "parameters": {"a": 12}}]<|END_ACTION|>  cohere
    <|tools_prefix|>[{"multiply": {"a": 12}}]<|tools_suffix|>                                                apertus

A closing mark inside a JSON string does not end the call. A call that is not closed is an error and is not executed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ...types import ToolCall
from .reply import MAX_CALLS, CallParser, Pairs, ParsedReply, ReplyReader, broken, call_from_object, guess_name
from .strict_json import BadJson, load_json

FENCE = "```"
_LANGUAGE = re.compile(r"(?:json5?|tool_calls?|function_calls?|text)?[ \t]{0,8}\n?", re.IGNORECASE)
_BETWEEN = re.compile(r"[\s;,]*")
_KEYS = {"name", "arguments", "parameters", "id", "type"}


@dataclass(frozen=True, kw_only=True)
class JsonCalls(CallParser):
    """JSON between an opening mark and its closing mark ("" if the format has none: the JSON ends the call).

    key        the arguments' key in what the model is told about a broken call.
    bare       the reply may be the JSON itself, if it has a name and arguments: an answer may be JSON, too.
    chained    several values after one mark, separated by white space, commas or semicolons.
    by_name    an object is {"NAME": arguments}.
    keys       the keys of the name and of the arguments, if they are not the usual ones.
    fenced     a reply without any mark may be JSON, or have JSON in a ```json block, that calls a tool in `names`.
    skip       marks around a block of calls.
    """

    marks: Pairs = ()
    key: str = "arguments"
    bare: bool = False
    chained: bool = False
    by_name: bool = False
    keys: tuple[str, str] | None = None
    fenced: bool = False
    skip: tuple[str, ...] = ()

    def __call__(self, text: str) -> ParsedReply:
        text = self.closed(text)
        reply = self._exactly_one(text) or self._prose(text) or super().__call__(text)
        if not self.fenced or reply.calls or "{" not in text:
            return reply
        loose = FencedCalls(thinking=self.thinking, opened=self.opened, drop=self.drop, names=self.names)(text)
        return loose if loose.calls else reply

    def write(self, calls: Sequence[ToolCall]) -> str:
        opening, closing = self.marks[0] if self.marks else ("", "")
        name, arguments = self.keys or ("name", self.key)
        items = [
            {call.name: call.arguments} if self.by_name else {name: call.name, arguments: call.arguments} for call in calls
        ]
        opening = opening.removesuffix("[")
        if closing and not self.by_name:
            return "\n".join(f"{opening}\n{json.dumps(item, ensure_ascii=False)}\n{closing}" for item in items)
        return f"{opening}{json.dumps(items, ensure_ascii=False)}{closing}"

    def _exactly_one(self, text: str) -> ParsedReply | None:
        """The reply, if it ends with its only call and has no thinking: a fast path for trained models. None for all others."""
        if self.opened or len(self.marks) != 1 or (self.bare and text.lstrip()[:1] in ("{", "[")):
            return None
        [(opening, closing)] = self.marks
        text = text.rstrip()
        if not closing or opening[-1] in "[{" or not text.endswith(closing) or text.count(closing) > 1:
            return None
        for mark in self._others:
            if mark in text:
                return None
        prose, _, body = text[: -len(closing)].partition(opening)
        body = body.strip()
        if not body.startswith("{") or opening in body:
            return None
        try:
            return ParsedReply(prose.strip(), (self._call(load_json(body)),), self.typed)
        except BadJson:
            return None

    def _prose(self, text: str) -> ParsedReply | None:
        """The reply, if it has no mark: a fast path for answers. None for all others."""
        if self.opened or (self.bare and text.lstrip()[:1] in ("{", "[")):
            return None
        for mark in self._all:
            if mark in text:
                return None
        return ParsedReply(text.strip(), (), self.typed)

    @cached_property
    def _all(self) -> tuple[str, ...]:
        """All marks that a reader looks for."""
        return (*(opening for opening, _ in self.marks), *self._others)

    @cached_property
    def _others(self) -> tuple[str, ...]:
        """All marks but those of a call."""
        return (*(mark for pair in self.thinking for mark in pair), *self.drop, *self.skip)

    def read(self, reader: ReplyReader) -> None:
        pairs = dict(self.marks)
        while mark := reader.seek(*pairs, skip=self.skip, bare="{[" if self.bare else ""):
            if mark not in pairs:
                self._read_bare(reader)
                continue
            if mark[-1] in "[{":
                reader.pos -= 1  # the mark includes the beginning of the JSON
            reader.skip_space()
            if reader.at("[", "{") and not reader.at(*pairs):
                self._read_values(reader, pairs[mark])
            else:
                call = broken("", f"after {mark} comes {self._shape}")
                reader.add(reader.close(call, tuple(pairs), pairs[mark]) if pairs[mark] else call)

    @property
    def _shape(self) -> str:
        return 'JSON: [{"tool": {...}}]' if self.by_name else f'JSON: {{"name": "tool", "{self.key}": {{...}}}}'

    def _read_values(self, reader: ReplyReader, closing: str) -> None:
        openings = tuple(opening for opening, _ in self.marks)
        more = True
        while more:
            calls = self._calls(reader.take_json(closing, *openings))
            if closing and (last := reader.close(calls[-1], openings, closing)) is not calls[-1]:
                calls = [last]  # the block is cut off or followed by other text: none of its calls is executed
            more = reader.add(*calls) and self.chained and not closing
            if more:
                reader.pos = _BETWEEN.match(reader.text, reader.pos).end()  # type: ignore[union-attr]
                more = reader.at("{", "[") and not reader.at(*openings)

    def _calls(self, body: str) -> list[ToolCall]:
        try:
            value = load_json(body)
        except BadJson as error:
            return [broken(guess_name(body), str(error))]
        items = value[: MAX_CALLS + 1] if isinstance(value, list) else [value]
        return [self._call(item) for item in items] or [broken("", f"the list is empty; a call is {self._shape}")]

    def _call(self, item: object) -> ToolCall:
        if self.by_name and isinstance(item, dict) and len(item) == 1 and isinstance(next(iter(item.values())), dict):
            [(name, arguments)] = item.items()
            return call_from_object({"name": name, "arguments": arguments})
        if self.keys and isinstance(item, dict):
            item = {"name": item.get(self.keys[0]), "arguments": item.get(self.keys[1])}
        return call_from_object(item, self.key)

    def _read_bare(self, reader: ReplyReader) -> None:
        start = reader.pos
        if _looks_called(reader.take_json(*(opening for opening, _ in self.marks))):
            reader.pos = start
            self._read_values(reader, "")
        else:
            reader.pos = start


@dataclass(frozen=True, kw_only=True)
class FencedCalls(CallParser):
    """Calls in ```json blocks, or a reply that begins with the JSON of a call.

    Such JSON counts only if it consists of a name and arguments and if the name is one of `names`; all else is prose.
    """

    def read(self, reader: ReplyReader) -> None:
        while mark := reader.seek(FENCE, bare="{["):
            start = reader.pos
            if mark == FENCE:
                reader.pos = _LANGUAGE.match(reader.text, reader.pos).end()  # type: ignore[union-attr]
                reader.skip_space()
            if not reader.at("{", "["):
                self._skip_block(reader, start)
                continue
            body = reader.take_json(FENCE)
            if _looks_called(body, self.names, _KEYS):
                calls = JsonCalls()._calls(body)
                if mark == FENCE and (last := reader.close(calls[-1], (), FENCE)) is not calls[-1]:
                    calls = [last]
                reader.add(*calls)
            elif mark == FENCE:
                self._skip_block(reader, start)
            else:
                reader.pos = start

    def _skip_block(self, reader: ReplyReader, start: int) -> None:
        end = reader.find(FENCE)
        reader.pos = len(reader.text) if end < 0 else end + len(FENCE)
        reader.keep(reader.text[start - len(FENCE) : reader.pos])


def _looks_called(body: str, names: frozenset[str] | None = None, keys: set[str] | None = None) -> bool:
    """Whether JSON is a call or a list of calls, of these tools and with no other keys. JSON that is cut off must begin so."""
    try:
        value = load_json(body)
    except BadJson:
        name = guess_name(body)
        return bool(name) and (names is None or name in names) and ('"parameters"' in body or '"arguments"' in body)
    items = value if isinstance(value, list) else [value]
    return bool(items) and all(
        isinstance(item, dict)
        and isinstance(item.get("name"), str)
        and ("parameters" in item or "arguments" in item)
        and (names is None or item["name"] in names)
        and (keys is None or item.keys() <= keys)
        for item in items
    )
