"""MiniMax M3: arguments are nested elements, and every tag follows the same token.

    ]<]minimax[>[<invoke name="search">]<]minimax[>[<tags>]<]minimax[>[<item>x]<]minimax[>[</item>]<]minimax[>[</tags>
    ]<]minimax[>[</invoke>

An element with elements inside is an object, or a list if these are all `item`; any other element is text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from ...types import ToolCall
from .reply import CallParser, ReplyReader, broken, clean_name
from .strict_json import MAX_DEPTH

_NAME = re.compile(r"\"(?P<name>[^\"<>\n]{1,128})\">")
_TAG = re.compile(r"<(/?)([^<>\s/]{1,128})>")


@dataclass
class _Element:
    key: str
    inner: list[tuple[str, Any]] = field(default_factory=list)
    text: str = ""

    def value(self) -> Any:
        """The value of the element. Raises ValueError with the reason if it has none."""
        if not self.inner:
            return self.text.encode("utf-8", "replace").decode()
        if self.text.strip():
            raise ValueError(f"<{self.key}> has text beside its elements")
        if all(key == "item" for key, _ in self.inner):
            return [value for _, value in self.inner]
        return self.mapping()

    def mapping(self) -> dict[str, Any]:
        values = dict(self.inner)
        if len(values) < len(self.inner):
            raise ValueError(f"an element of <{self.key}> is given twice")
        return values


@dataclass(frozen=True, kw_only=True)
class NestedCalls(CallParser):
    """Elements whose tags all follow `token`."""

    token: str
    typed: bool = False

    def read(self, reader: ReplyReader) -> None:
        block = (f"{self.token}<tool_call>", f"{self.token}</tool_call>")
        while reader.seek(f"{self.token}<invoke name=", skip=block):
            reader.add(self._read(reader))

    def _read(self, reader: ReplyReader) -> ToolCall:
        match = _NAME.match(reader.text, reader.pos)
        if match is None:
            return broken("", f'{self.token}<invoke name="NAME"> needs the name of a tool')
        name, reader.pos = clean_name(match["name"]), match.end()
        try:
            return ToolCall(name, self._elements(reader))
        except ValueError as error:
            return reader.close(broken(name, str(error)), f"{self.token}<invoke name=", f"{self.token}</invoke>")

    def _elements(self, reader: ReplyReader) -> dict[str, Any]:
        stack = [_Element("invoke")]
        while True:
            at = reader.find(self.token)
            tag = _TAG.match(reader.text, at + len(self.token)) if at >= 0 else None
            if tag is None:
                raise ValueError(f"<{stack[-1].key}> is not closed with {self.token}</{stack[-1].key}>")
            stack[-1].text += reader.text[reader.pos : at]
            closes, key = tag.groups()
            if not closes:
                if len(stack) > MAX_DEPTH:
                    raise ValueError(f"its elements are nested deeper than {MAX_DEPTH} levels")
                stack.append(_Element(key))
            elif key != stack[-1].key:
                raise ValueError(f"<{stack[-1].key}> is not closed with {self.token}</{stack[-1].key}>")
            elif len(stack) == 1:
                if stack[0].text.strip():
                    raise ValueError("it has text outside its arguments")
                reader.pos = tag.end()
                return stack[0].mapping()
            else:
                done = stack.pop()
                stack[-1].inner.append((key, done.value()))
            reader.pos = tag.end()
