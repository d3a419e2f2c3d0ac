"""Formats in which a call is written as in a programming language.

    [multiply(a=12, b=7), search(query="rivers of Peru")]                  Llama 4, Llama 3.2: the reply is the list
    <|tool_call_start|>[multiply(a=12, b=7)]<|tool_call_end|>              LFM2
    <|tool_call>call:search{query:<|"|>rivers of Peru<|"|>}<tool_call|>    Gemma 4

Arguments are literals. Expressions, and arguments without a name, are errors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...types import ToolCall
from .literals import BadLiteral, Literals
from .reply import MAX_CALLS, CallParser, Pairs, ReplyReader, broken

MAX_RETRIES = 8

_LIST_OF_CALLS = re.compile(r"\[\s{0,64}[^\W\d][\w.\-]{0,127}\(")
_GEMMA_HEAD = re.compile(r"\s*call:\s*([^\s{]{1,128})\s*\{")
_GEMMA_KEY = re.compile(r"[^:,{}\[\]\s]{1,128}")


class _Cut(Exception):
    """The calls before the error, the name of the broken one, and where reading ended."""

    def __init__(self, calls: list[ToolCall], name: str, why: str, pos: int) -> None:
        self.calls = [*calls, broken(name, why)]
        self.pos = pos


@dataclass(frozen=True, kw_only=True)
class PythonCalls(CallParser):
    """Python calls between marks, in a list or one per line; with `bare`, a reply may begin with such a list."""

    marks: Pairs = (("<|tool_call_start|>", "<|tool_call_end|>"), ("<|python_start|>", "<|python_end|>"))
    bare: bool = True

    def read(self, reader: ReplyReader) -> None:
        pairs = dict(self.marks)
        num_retries = MAX_RETRIES
        while mark := reader.seek(*pairs, bare="[" if self.bare else ""):
            if mark in pairs:
                num_retries = self._read_marked(reader, pairs[mark], num_retries)
            else:
                self._read_bare(reader)

    def _read_bare(self, reader: ReplyReader) -> None:
        more = True
        while more and _LIST_OF_CALLS.match(reader.text, reader.pos):
            try:
                calls, reader.pos = self.region(reader.text, reader.pos)
            except _Cut as cut:
                # No telling where the next call would begin.
                calls, reader.pos = cut.calls, len(reader.text)
            more = reader.add(*calls)
            if more:
                reader.skip_space()

    def _read_marked(self, reader: ReplyReader, closing: str, num_retries: int) -> int:
        """Reads up to the closing mark. If that does not succeed, the mark may be inside a string: tries the next ones."""
        first = end = reader.find(closing)
        if end < 0:
            reader.pos = len(reader.text)
            reader.add(broken("", f"it is not closed with {closing}"))
            return num_retries
        failed: _Cut | None = None
        while True:
            try:
                calls, _ = self.region(reader.text[reader.pos : end], 0)
                break
            except _Cut as cut:
                failed = failed or cut
                end = reader.text.find(closing, end + 1) if num_retries and cut.pos >= end - reader.pos else -1
                if end < 0:
                    calls, end = failed.calls, first
                    break
                num_retries -= 1
        reader.pos = end + len(closing)
        reader.add(*calls)
        return num_retries

    def write(self, calls: Sequence[ToolCall]) -> str:
        texts = [f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})" for call in calls]
        opening, closing = self.marks[0]
        return f"{opening}[{', '.join(texts)}]{closing}"

    def region(self, text: str, pos: int) -> tuple[list[ToolCall], int]:
        """The calls that begin at `pos` and where they end. Raises _Cut."""
        literals = _PythonCall(text, pos)
        calls: list[ToolCall] = []
        try:
            listed = literals.accept("[")
            if not listed and pos:
                raise BadLiteral("the calls stand in one list: [tool(argument=value)]")
            while not (literals.accept("]") if listed else literals.ended()):
                if len(calls) > MAX_CALLS:
                    return calls, len(text)
                calls.append(literals.call())
                if literals.accept(",") or not listed:
                    continue
                literals.closing("]", "the calls of a list are set apart by commas and closed with ]", calls)
                break
        except BadLiteral as error:
            raise _Cut(calls, literals.name, str(error), literals.reached) from None
        if not calls:
            raise _Cut([], "", "there is no call: write [tool(argument=value)]", literals.pos)
        if not pos and not literals.ended():
            raise _Cut([], literals.name, "there is other text after the calls", literals.pos)
        return calls, literals.pos


class _PythonCall(Literals):
    name = ""

    def closing(self, mark: str, why: str, calls: list[ToolCall]) -> None:
        if not self.accept(mark):
            calls.pop()
            raise BadLiteral(why)

    def call(self) -> ToolCall:
        self.name = ""
        self.name = self.word()
        if not self.name:
            raise BadLiteral("a call looks like tool(argument=value)")
        self.expect("(", f"the name {self.name!r} must be followed by its arguments in parentheses")
        arguments: dict[str, Any] = {}
        while not self.accept(")"):
            key = self.word()
            if not key or not self.accept("="):
                raise BadLiteral("every argument needs its name: tool(argument=value)")
            if key in arguments:
                raise BadLiteral(f"the argument {key!r} is given twice")
            arguments[key] = self.value(0)
            if not self.accept(","):
                self.expect(")", f"after the argument {key!r} comes a comma or )")
                break
        return ToolCall(self.name, arguments)


@dataclass(frozen=True, kw_only=True)
class GemmaCalls(PythonCalls):
    """Gemma: `call:NAME{key:value}` between marks; strings stand between two `quote` marks."""

    marks: Pairs = (("<|tool_call>", "<tool_call|>"),)
    bare: bool = False
    quote: str = '<|"|>'

    def write(self, calls: Sequence[ToolCall]) -> str:
        return ""

    def region(self, text: str, pos: int) -> tuple[list[ToolCall], int]:
        literals = _GemmaCall(text, pos)
        literals.quote = self.quote
        try:
            match = _GEMMA_HEAD.match(text, pos)
            if match is None:
                raise BadLiteral("a call looks like call:tool{argument:value}")
            literals.name, literals.pos = match[1], match.end()
            call = ToolCall(match[1], literals.pairs(0))
            if not literals.ended():
                raise BadLiteral("there is other text after its arguments")
        except BadLiteral as error:
            raise _Cut([], literals.name, str(error), literals.reached) from None
        return [call], literals.pos


class _GemmaCall(Literals):
    name = ""
    quote = ""

    def value(self, depth: int) -> Any:
        self.accept("")
        return self.string(self.quote) if self.text.startswith(self.quote, self.pos) else super().value(depth)

    def key(self, depth: int) -> Any:
        self.accept("")
        if self.text.startswith(self.quote, self.pos):
            return self.string(self.quote)
        match = _GEMMA_KEY.match(self.text, self.pos)
        if match is None:
            raise BadLiteral("every argument needs its name: call:tool{argument:value}")
        self.pos = match.end()
        return match[0]

    def string(self, quote: str) -> str:
        if quote != self.quote:
            return super().string(quote)
        start = self.pos + len(quote)
        end = self.text.find(quote, start)
        if end < 0:
            self.reached = len(self.text)
            raise BadLiteral("a string is not closed")
        self.pos = end + len(quote)
        return self.text[start:end].encode("utf-8", "replace").decode()
