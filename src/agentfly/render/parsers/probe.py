"""`ParserProbe` writes known tool calls through a chat template; its `score` says how well a parser reads them back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...errors import ConfigError
from ...types import Message, ToolCall
from .reply import Pairs, Parser
from .schema_types import type_arguments

# Renders messages, with tools, and with or without the beginning of the next reply. Raises ConfigError if refused.
Render = Callable[[Sequence[Message], Sequence[Mapping[str, Any]], bool], str]

_USER = Message("user", "zquestion")
_PLAIN = "zqplain"
_PART_OF_MARK = re.compile(r"[<\[][^<>\[\]\s]{0,64}\Z")


def _tool(name: str, **properties: Any) -> dict[str, Any]:
    described = {key: {"description": "Zq.", **value} for key, value in properties.items()}
    parameters = {"type": "object", "properties": described, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}


_FLAT = {
    "query": {"type": "string"},
    "limit": {"type": "integer"},
    "ratio": {"type": "number"},
    "exact": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
}
_DEEP = {"type": "object", "properties": {"level": {"type": "integer", "description": "Zq."}}}
_OPTIONS = {"type": "object", "properties": {"deep": {**_DEEP, "description": "Zq."}}}
PROBE_TOOLS = [_tool("find_rivers", **_FLAT, options=_OPTIONS), _tool("get_time")]
_SCHEMAS = {tool["function"]["name"]: tool for tool in PROBE_TOOLS}
# Some templates cannot write the schema of a nested object, or of a tool without parameters.
_TOOL_LISTS: tuple[list[dict[str, Any]], ...] = (
    PROBE_TOOLS,
    [_tool("find_rivers", query=_FLAT["query"]), _tool("get_time", zone=_FLAT["query"])],
    [],
)

_ARGUMENTS = {
    "query": "rivers of Peru",
    "limit": 3,
    "ratio": 0.5,
    "exact": True,
    "tags": ["long", "wide"],
    "options": {"deep": {"level": 1}},
}
_PLAIN_CALL = ToolCall("find_rivers", _ARGUMENTS, "zqcall001")
_NO_ARGUMENTS = ToolCall("get_time", {}, "zqcall002")
_SPECIAL = {
    **_ARGUMENTS,
    "query": 'a "b" <c> & {d} [e] \\ é 漢 it\'s\ntwo lines',
    "tags": ["1", "true", "a, b"],
    "exact": False,
}
_SPACED = {**_ARGUMENTS, "query": "\n  indented\n", "limit": -12, "tags": []}

REQUIRED = ((_PLAIN_CALL,), (_NO_ARGUMENTS,), (_PLAIN_CALL, _NO_ARGUMENTS))
"""A parser must read these as the template writes them."""
PREFERRED = ((ToolCall("find_rivers", _SPECIAL, "zqcall001"),), (ToolCall("find_rivers", _SPACED, "zqcall001"),))
"""Among several parsers, the one that reads more of these is taken. A template may write them in a way that loses them."""


class ParserProbe:
    """What a template writes for the known calls."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._tools: Sequence[Mapping[str, Any]] = next((tools for tools in _TOOL_LISTS if self._accepts(tools)), [])
        self.required = [(text, calls) for calls in REQUIRED if (text := self.write(*calls)) is not None]
        self.preferred = [(text, calls) for calls in PREFERRED if (text := self.write(*calls)) is not None]

    @property
    def shows_calls(self) -> bool:
        """Whether the template writes a plain call with its name and the keys of its arguments."""
        return bool(self.required) and self.required[0][1] == REQUIRED[0]

    @property
    def drops_calls(self) -> bool:
        """Whether the template refuses calls, or renders a reply with calls as it does one without."""
        texts = []
        for calls in ((_PLAIN_CALL,), ()):
            try:
                texts.append(self._render([_USER, Message("assistant", _PLAIN, calls)], self._tools, False))
            except ConfigError:
                return True
        return texts[0] == texts[1]

    def write(self, *calls: ToolCall, content: str = "") -> str | None:
        """The text of a reply with these calls, without its end of turn, or None if the template refuses or drops them."""
        reply = Message("assistant", content, calls)
        try:
            prompt = self._render([_USER], self._tools, True)
            shown = self._render([_USER, reply], self._tools, False)
            plain = self._render([_USER, Message("assistant", _PLAIN)], self._tools, False)
        except ConfigError:
            return None
        # The prompt may begin what these replies do not have (<think>): the reply begins where both replies leave the prompt.
        begin = len(common(prompt, shown, plain))
        if begin < len(prompt) and (cut := _PART_OF_MARK.search(shown, 0, begin)):
            begin = cut.start()
        text = shown[begin:].removesuffix(plain.rpartition(_PLAIN)[2] or "\0")
        written = all(call.name in text and all(key in text for key in call.arguments) for call in calls)
        return text.rstrip() if written and begin > prompt.rfind(_USER.content) else None

    def opened(self, pairs: Pairs) -> str:
        """The closing mark of the thinking that every prompt opens, or ""."""
        result = Message("tool", "zqresult", name=_PLAIN_CALL.name, tool_call_id=_PLAIN_CALL.id)
        chats = ([_USER], [_USER, Message("assistant", "", (_PLAIN_CALL,)), result])
        closings = set()
        for chat in chats:
            try:
                prompt = self._render(chat, self._tools, True).rstrip()
            except ConfigError:
                continue
            closings.add(next((closing for opening, closing in pairs if prompt.endswith(opening)), ""))
        return closings.pop() if len(closings) == 1 else ""

    def score(self, parser: Parser) -> int:
        """0 if the parser does not read the required calls, else 1 and one more for each of the others."""
        if not self.required or not all(_reads(parser, text, calls) for text, calls in self.required):
            return 0
        return 1 + sum(_reads(parser, text, calls) for text, calls in self.preferred)

    def leaves(self, parser: Parser) -> list[str]:
        """The marks around calls that the parser takes for prose."""
        parsed = [parser(text) for text, _ in self.required]
        rests = dict.fromkeys(reply.content.strip() for reply in parsed if reply.calls)
        return [rest for rest in rests if len(rest.split()) == 1]

    def reads_names(self, parser: Parser) -> bool:
        """Whether the parser reads the names of the required calls and the keys of their arguments, whatever their values."""
        return self.shows_calls and all(
            [_names(call) for call in _read(parser, text)] == [_names(call) for call in calls] for text, calls in self.required
        )

    def _accepts(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        try:
            return bool(self._render([_USER], tools, True))
        except ConfigError:
            return False


def common(*texts: str) -> str:
    """The beginning that texts share."""
    for at, letters in enumerate(zip(*texts, strict=False)):
        if len(set(letters)) > 1:
            return texts[0][:at]
    return min(texts, key=len)


def _reads(parser: Parser, text: str, calls: Sequence[ToolCall]) -> bool:
    return [_key(call) for call in _read(parser, text)] == [_key(call) for call in calls]


def _read(parser: Parser, text: str) -> Sequence[ToolCall]:
    try:
        reply = parser(text)
    except Exception:  # noqa: BLE001 (a user's parser for another format)
        return ()
    return reply.calls if reply.typed else [type_arguments(call, _SCHEMAS.get(call.name, {})) for call in reply.calls]


def _names(call: ToolCall) -> tuple[str, list[str], str | None]:
    return call.name, sorted(call.arguments), call.error


def _key(call: ToolCall) -> tuple[str, str, str | None]:
    return call.name, json.dumps(call.arguments, sort_keys=True, default=repr), call.error
