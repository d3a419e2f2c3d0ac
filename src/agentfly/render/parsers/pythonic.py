"""Pythonic calls (Llama 4, Llama 3.2, LFM2): a list of Python calls, bare or between marks.

    [multiply(a=12, b=7), search(query="rivers of Peru")]
    <|tool_call_start|>[multiply(a=12, b=7)]<|tool_call_end|>

Arguments are numbers, strings, lists, dicts, True, False and None. `ast.parse` is not used, because its recursion and memory on
hostile text cannot be bounded. Expressions, and arguments without a name, are errors.
"""

from __future__ import annotations

import math
import re
from typing import Any

from ...types import ToolCall
from .reply import MAX_CALLS, ParsedReply, ReplyReader, broken
from .strict_json import MAX_DEPTH, MAX_DIGITS

MARKS = {"<|tool_call_start|>": "<|tool_call_end|>", "<|python_start|>": "<|python_end|>"}
WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}

_LIST_OF_CALLS = re.compile(r"\[\s*[^\W\d][\w.\-]{0,127}\(")
_NAME = re.compile(r"[^\W\d][\w.\-]{0,127}")
_NUMBER = re.compile(r"[+-]?(?:0[xX][0-9a-fA-F]+|(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)")
_SPACE = re.compile(r"\s*")
_STRING_END = {quote: re.compile(rf"{quote}|\\") for quote in ("'", '"', "'''", '"""')}
_ESCAPE = re.compile(r"\\(?:([\\'\"abfnrtv\n])|([0-7]{1,3})|(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})))")
_ESCAPED = {"\n": "", "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


class BadCall(Exception):
    """A call cannot be parsed; the text is written for the model."""


def parse_tool_calls(text: str) -> ParsedReply:
    reader = ReplyReader(text)
    reader.skip_space()
    while _LIST_OF_CALLS.match(text, reader.pos):
        calls, reader.pos = _read_list(text, reader.pos)
        if not reader.add(*calls):
            reader.pos = len(text)
        reader.skip_space()
    while marker := reader.seek(*MARKS):
        closer = MARKS[marker]
        end = reader.find(closer)
        if end < 0:
            reader.add(broken("", f"it is not closed with {closer}"))
            reader.pos = len(text)
        else:
            reader.add(*_read_list(text[reader.pos : end], 0)[0])
            reader.pos = end + len(closer)
    return reader.done()


def _read_list(text: str, pos: int) -> tuple[list[ToolCall], int]:
    """One list of calls and where it ends.

    What cannot be read takes the rest along: no telling where the next call would begin.
    """
    literals = _Literals(text, pos)
    calls: list[ToolCall] = []
    try:
        literals.expect("[", "the calls stand in one list: [tool(argument=value)]")
        while not literals.accept("]"):
            if len(calls) > MAX_CALLS:
                return calls, len(text)
            call = literals.call()
            ended = not literals.accept(",")
            if ended:
                literals.expect("]", "the calls of a list are set apart by commas and closed with ]")
            calls.append(call)
            if ended:
                break
    except BadCall as error:
        return [*calls, broken(literals.name, str(error))], len(text)
    return calls, literals.pos


class _Literals:
    """Reads calls and literal values from a text, left to right."""

    def __init__(self, text: str, pos: int) -> None:
        self.text, self.pos, self.name = text, pos, ""

    def accept(self, mark: str) -> bool:
        self.pos = _SPACE.match(self.text, self.pos).end()  # type: ignore[union-attr]
        if not self.text.startswith(mark, self.pos):
            return False
        self.pos += len(mark)
        return True

    def expect(self, mark: str, why: str) -> None:
        if not self.accept(mark):
            raise BadCall(why)

    def word(self) -> str:
        self.accept("")
        found = _NAME.match(self.text, self.pos)
        if found is None:
            return ""
        self.pos = found.end()
        return found[0]

    def call(self) -> ToolCall:
        self.name = ""
        self.name = self.word()
        if not self.name:
            raise BadCall("a call looks like tool(argument=value)")
        self.expect("(", f"the name {self.name!r} must be followed by its arguments in parentheses")
        arguments: dict[str, Any] = {}
        while not self.accept(")"):
            key = self.word()
            if not key or not self.accept("="):
                raise BadCall("every argument needs its name: tool(argument=value)")
            if key in arguments:
                raise BadCall(f"the argument {key!r} is given twice")
            arguments[key] = self.value(0)
            if not self.accept(","):
                self.expect(")", f"after the argument {key!r} comes a comma or )")
                break
        return ToolCall(self.name, arguments)

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise BadCall(f"a value is nested deeper than {MAX_DEPTH} levels")
        self.accept("")
        first = self.text[self.pos : self.pos + 1]
        if first in ("'", '"'):
            return self.string(first)
        if self.accept("["):
            return self.items("]", depth)
        if self.accept("("):
            return self.items(")", depth)
        if self.accept("{"):
            return self.pairs(depth)
        if found := _NUMBER.match(self.text, self.pos):
            self.pos = found.end()
            return _number(found[0])
        word = self.word()
        if word in WORDS:
            return WORDS[word]
        raise BadCall("a value must be a plain number, string, list, dict, True, False or None")

    def items(self, closer: str, depth: int) -> list[Any]:
        found: list[Any] = []
        while not self.accept(closer):
            found.append(self.value(depth + 1))
            if not self.accept(","):
                self.expect(closer, f"a list is not closed with {closer}")
                break
        return found

    def pairs(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self.accept("}"):
            key = self.value(depth + 1)
            if not isinstance(key, str) or key in found:
                raise BadCall("the keys of a dict must be strings, each given once")
            self.expect(":", "a key of a dict must be followed by a colon")
            found[key] = self.value(depth + 1)
            if not self.accept(","):
                self.expect("}", "a dict is not closed with }")
                break
        return found

    def string(self, quote: str) -> str:
        quote = quote * 3 if self.text.startswith(quote * 3, self.pos) else quote
        start = at = self.pos + len(quote)
        while found := _STRING_END[quote].search(self.text, at):
            if found[0] == quote:
                self.pos = found.end()
                return _unescape(self.text[start : found.start()])
            at = found.end() + 1
        raise BadCall("a string is not closed")


def _number(text: str) -> int | float:
    if len(text) > MAX_DIGITS:
        raise BadCall(f"a number has more than {MAX_DIGITS} digits")
    try:
        value = int(text, 16) if "x" in text or "X" in text else float(text) if any(c in text for c in ".eE") else int(text)
    except ValueError:
        raise BadCall(f"{text[:40]!r} is not a number") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise BadCall("a number is too large")
    return value


def _unescape(text: str) -> str:
    if "\\" in text:
        text = _ESCAPE.sub(_character, text)
    try:
        # Two escapes may form one character; half of such a pair is not a character.
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:
        raise BadCall("a string has half a surrogate pair, which is no character") from None


def _character(found: re.Match[str]) -> str:
    plain, octal, *hexes = found.groups()
    if plain is not None:
        return _ESCAPED.get(plain, plain)
    code = int(octal, 8) if octal is not None else int(next(digits for digits in hexes if digits is not None), 16)
    if code > 0x10FFFF:
        raise BadCall("a string has an escape that is no character")
    return chr(code)
