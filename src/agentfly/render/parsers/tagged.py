"""Formats in which every argument stands between its own tags and its value is raw text.

    <function=multiply>                 <invoke name="multiply">                 <tool_call>multiply
    <parameter=a>                       <parameter name="a">12</parameter>       <arg_key>a</arg_key>
    12                                  </invoke>                                <arg_value>12</arg_value>
    </parameter>                                                                 </tool_call>
    </function>
      qwen3_coder                         minimax                                  glm

Only the schema of the tool tells the number 12 from the text "12". Values are therefore returned as text (`typed` is false),
and `type_arguments` converts them by the schema. A value ends at the first closing tag, so it cannot contain one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ...types import ToolCall
from .reply import CallParser, ReplyReader, broken, clean_name
from .strict_json import BadJson, load_json

CDATA, CDATA_END = "<![CDATA[", "]]>"


@dataclass(frozen=True, kw_only=True)
class TaggedCalls(CallParser):
    """An opening mark, a head with the name, arguments, the closing mark.

    head        matched after the opening mark; has the group `name`.
    key         how an argument begins; matched after `key_mark`; has the group `key`, and `string` if the format says whether
                the value is a string (the others are JSON).
    trims       one line break at each end of a value belongs to the tags.
    blocks      marks around calls: after one of them an opening mark must follow. Their closing marks are in `skip`.
    """

    opening: str
    head: re.Pattern[str]
    key_mark: str
    key: re.Pattern[str]
    value_end: str
    closing: str
    trims: bool = False
    blocks: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    typed: bool = False

    def read(self, reader: ReplyReader) -> None:
        while mark := reader.seek(self.opening, *self.blocks, skip=self.skip):
            if mark == self.opening:
                reader.add(self._read(reader))
                continue
            reader.skip_space()
            if not reader.at(self.opening):
                reader.add(broken("", f"after {mark} comes {self.opening} and the name of a tool"))

    def _read(self, reader: ReplyReader) -> ToolCall:
        match = self.head.match(reader.text, reader.pos)
        name = clean_name(match["name"]) if match else ""
        if match is None or not name:
            return self._give_up(reader, "", f"after {self.opening} comes the name of a tool")
        reader.pos = match.end()
        arguments: dict[str, Any] = {}
        while True:
            reader.skip_space()
            if reader.accept(self.closing):
                return ToolCall(name, arguments)
            if not reader.accept(self.key_mark):
                return self._give_up(reader, name, f"it is not closed with {self.closing}, or has text outside its parameters")
            start = self.key.match(reader.text, reader.pos)
            key = clean_name(start["key"]) if start else ""
            if start is None or not key:
                return self._give_up(reader, name, f"after {self.key_mark} comes the name of a parameter")
            reader.pos = start.end()
            if key in arguments:
                return self._give_up(reader, name, f"the parameter {key!r} is given twice")
            text = self._value(reader)
            if text is None:
                return self._give_up(reader, name, f"the parameter {key!r} is not closed with {self.value_end}")
            try:
                arguments[key] = self._decoded(text, start)
            except BadJson as error:
                return self._give_up(reader, name, f"the parameter {key!r}: {error}")

    def _value(self, reader: ReplyReader) -> str | None:
        if reader.at(CDATA):
            start, end = reader.pos + len(CDATA), reader.find(CDATA_END + self.value_end)
            if end >= 0:
                reader.pos = end + len(CDATA_END) + len(self.value_end)
                return reader.text[start:end]
        end, following = reader.find(self.value_end), reader.find(self.key_mark)
        if end < 0 or 0 <= following < end:
            return None
        value = reader.text[reader.pos : end]
        reader.pos = end + len(self.value_end)
        return value.removeprefix("\n").removesuffix("\n") if self.trims else value

    def _decoded(self, text: str, start: re.Match[str]) -> Any:
        given = start.groupdict().get("string")
        if given is None or given == "true":
            return text.encode("utf-8", "replace").decode()
        return load_json(text.strip())

    def _give_up(self, reader: ReplyReader, name: str, why: str) -> ToolCall:
        return reader.close(broken(name, why), self.opening, self.closing)


def invoke(prefix: str, *blocks: str, **options: Any) -> TaggedCalls:
    """The format of `<invoke name="NAME"><parameter name="KEY">value</parameter></invoke>`, with a prefix in every tag."""
    return TaggedCalls(
        opening=f"<{prefix}invoke name=",
        head=re.compile(r"[\"']?(?P<name>[^\"'<>\n]{1,128})[\"']?\s{0,8}>"),
        key_mark=f"<{prefix}parameter name=",
        key=re.compile(r"[\"']?(?P<key>[^\"'<>\n]{1,128})[\"']?(?:\s{1,8}string=[\"']?(?P<string>true|false)[\"']?)?\s{0,8}>"),
        value_end=f"</{prefix}parameter>",
        closing=f"</{prefix}invoke>",
        skip=tuple(f"{side}{prefix}{block}>" for block in blocks for side in ("<", "</")),
        **options,
    )
