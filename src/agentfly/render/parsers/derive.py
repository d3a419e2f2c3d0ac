"""`derive` makes a parser for a template of an unknown family from the marks that the template itself writes.

Calls with placeholder names and values are rendered. What stands around the placeholders are the marks:

    one       O zqname H K zqkey S zqvalue E C ...              O opening   H head   K, S, E around an argument   C closing
    two       O zqname ... C O zqsecond ... C ...

The shape is told by the arguments: a JSON object with or without the name inside, Python or Gemma calls, or text between tags.
None is returned if the marks are not distinctive. The caller checks that the parser reads known calls back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from ...types import ToolCall
from .json_calls import JsonCalls
from .literal_calls import GemmaCalls, PythonCalls
from .named_json import NamedJson
from .probe import common
from .reply import CallParser
from .strict_json import json_end
from .tagged import TaggedCalls

Write = Callable[..., str | None]

_SAID = "zqsaid"
_SPACE = r"\s{0,8}"
_FIRST = ToolCall("zqname", {"zqkey": "zqvalue"}, "zqcall001")
_SECOND = ToolCall("zqsecond", {"zqother": "zqmore"}, "zqcall002")
_BOTH = ToolCall("zqname", {"zqkey": "zqvalue", "zqother": "zqmore"}, "zqcall001")
_EMPTY = ToolCall("zqname", {}, "zqcall001")


class _Texts(NamedTuple):
    """The placeholder calls as the template writes them, from where the calls begin."""

    one: str
    two: str
    both: str
    empty: str


def derive(write: Write) -> CallParser | None:
    """A parser for the calls that `write(*calls, content=)` writes, or None."""
    one = write(_FIRST)
    both, empty = write(_BOTH), write(_EMPTY)
    if one is None or both is None or empty is None:
        return None
    texts = _Texts(one, write(_FIRST, _SECOND) or "", both, empty)
    lead = _lead(write, texts)
    texts = _Texts(*(text.removeprefix(lead) for text in texts))
    for shape in (_json_calls, _named_json, _literal_calls, _tagged):
        if (parser := shape(texts)) is not None:
            return parser
    return None


def _lead(write: Write, texts: _Texts) -> str:
    """What the template writes before every reply with calls, and before the words of one: no mark of calls."""
    said = write(_FIRST, content=_SAID)
    head = said.partition(_SAID)[0] if said and _SAID in said else ""
    return common(head, *(text for text in texts if text)) if head else ""


def _json_calls(texts: _Texts) -> JsonCalls | None:
    span = _json_around(texts.one, "zqname", "zqvalue")
    if span is None:
        return None
    begin, end, value = span
    listed = isinstance(value, list)
    item = value[0] if listed and len(value) == 1 else value
    opening, rest = texts.one[:begin].strip(), texts.one[end:].strip()
    closing = rest
    if texts.two and not (listed and _json_around(texts.two, "zqname", "zqmore")):
        first = _json_around(texts.two, "zqname", "zqvalue")
        second = texts.two.find("zqsecond")
        if first is None or second < 0:
            return None
        between = texts.two[first[1] : texts.two.rfind("{", 0, second)]
        opening_again = _common_end(texts.one[:begin].rstrip(), between.rstrip())
        closing = common(rest, between.strip())
        closing = closing.strip() if opening_again.strip() else ""
        opening = opening_again.strip() or opening
    if not isinstance(item, dict) or not is_distinct(opening):
        return None
    by_name = item.get("zqname") == {"zqkey": "zqvalue"}
    keys = None if by_name else _keys(item)
    if not by_name and keys is None:
        return None
    marks = ((opening, closing if is_distinct(closing) else ""),)
    return JsonCalls(marks=marks, by_name=by_name, keys=keys, chained=not listed and not closing)


def _keys(item: dict[str, Any]) -> tuple[str, str] | None:
    """The keys of the name and the arguments."""
    name = next((key for key, value in item.items() if value == "zqname"), None)
    texts = ({"zqkey": "zqvalue"}, json.dumps({"zqkey": "zqvalue"}))
    arguments = next((key for key, value in item.items() if value in texts), None)
    return (name, arguments) if name is not None and arguments is not None else None


def _named_json(texts: _Texts) -> NamedJson | None:
    name = texts.one.find("zqname")
    span = _json_around(texts.one[name:], "zqkey", "zqvalue") if name >= 0 else None
    if span is None or span[2] != {"zqkey": "zqvalue"}:
        return None
    begin, end = name + span[0], name + span[1]
    head, rest = texts.one[name + len("zqname") : begin], texts.one[end:].strip()
    opening, closing = _opening_and_closing(texts, texts.one[:name], rest)
    if not is_distinct(opening) or "{" in opening or "{" in head:
        return None
    stop = re.escape(head.strip()[:1])
    return NamedJson(
        opening=opening,
        head=re.compile(rf"\s*(?P<name>[^{stop}{{}}\s]{{1,128}}){_loose(head)}"),
        closing=closing,
        shape=f'{opening}NAME{head.strip()}{{"argument": value}}{closing}',
        skip=_around(texts.one[:name], opening, rest, closing),
    )


def _literal_calls(texts: _Texts) -> PythonCalls | None:
    name = texts.one.find("zqname")
    after = texts.one[name + len("zqname") :]
    before = texts.one[:name].strip()
    if re.match(r"\(\s*zqkey\s*=", after):
        opening, closing = before.removesuffix("[").strip(), after.rpartition(")")[2].strip().removeprefix("]").strip()
        return PythonCalls(marks=((opening, closing),), bare=False) if is_distinct(opening) and is_distinct(closing) else None
    match = re.match(r"\{zqkey:(.{1,32}?)zqvalue(.{1,32}?)\}", after)
    opening, closing = before.removesuffix("call:").strip(), after[match.end() :].strip() if match else ""
    if (
        match is None
        or match[1] != match[2]
        or not before.endswith("call:")
        or not (is_distinct(opening) and is_distinct(closing))
    ):
        return None
    return GemmaCalls(marks=((opening, closing),), quote=match[1])


def _tagged(texts: _Texts) -> TaggedCalls | None:
    places = [texts.both.find(word) for word in ("zqname", "zqkey", "zqvalue", "zqother", "zqmore")]
    if -1 in places or places != sorted(places):
        return None
    pieces = re.split("zqname|zqkey|zqvalue|zqother|zqmore", texts.both, maxsplit=5)
    before, to_key, inside, between, _, rest = pieces
    key_mark = _common_end(to_key, between)
    head, value_end = to_key.removesuffix(key_mark), between.removesuffix(key_mark)
    trims = inside.endswith("\n") and value_end.startswith("\n")
    if not rest.startswith(value_end) or not all(map(is_distinct, (key_mark, value_end))) or not inside.strip():
        return None
    opening, closing = _opening_and_closing(texts, before, rest.removeprefix(value_end).strip())
    if not is_distinct(opening) or not is_distinct(closing):
        return None
    stop, key_stop = re.escape(head.strip()[:1] or key_mark.strip()[:1]), re.escape(inside.strip()[:1])
    return TaggedCalls(
        opening=opening,
        head=re.compile(rf"\s*(?P<name>[^{stop}\s]{{1,128}}){_loose(head)}"),
        key_mark=key_mark.strip(),
        key=re.compile(rf"\s*(?P<key>[^{key_stop}\n]{{1,128}}){_loose(inside).removesuffix(_SPACE)}"),
        value_end=value_end.strip() if trims else value_end.rstrip(),
        closing=closing,
        trims=trims,
        skip=_around(before, opening, rest.removeprefix(value_end).strip(), closing),
    )


def _opening_and_closing(texts: _Texts, before: str, rest: str) -> tuple[str, str]:
    """The marks of one call. Two calls tell them from the marks around all calls."""
    second = texts.two.find("zqsecond")
    if second < 0:
        return before.strip(), rest
    begin = max(texts.two.rfind(word, 0, second) + len(word) for word in ("zqvalue",))
    between = texts.two[begin:second]
    opening = _common_end(before, between).strip()
    gap = between[: len(between) - len(_common_end(before, between))]
    for start in range(len(gap)):
        closing = common(rest, gap[start:].strip())
        if closing.strip() and rest.startswith(closing) and gap[start:].strip().startswith(closing) and is_distinct(closing):
            return opening, closing.strip()
    return opening, ""


def _around(before: str, opening: str, rest: str, closing: str) -> tuple[str, ...]:
    """The marks around all calls, which are no prose."""
    marks = (before.strip().removesuffix(opening).strip(), rest.removeprefix(closing).strip())
    return tuple(mark for mark in marks if is_distinct(mark) and "zq" not in mark)


def _json_around(text: str, *words: str) -> tuple[int, int, Any] | None:
    """The outermost JSON value in a text that has all these words: its begin, its end and the value."""
    at = 0
    while (match := re.compile(r"[{\[]").search(text, at)) is not None:
        end, complete = json_end(text, match.start())
        part = text[match.start() : end]
        if complete and all(word in part for word in words):
            try:
                return match.start(), end, json.loads(part)
            except ValueError:
                pass  # a mark such as [TOOL_CALLS] is not JSON
        at = match.end()
    return None


def _common_end(a: str, b: str) -> str:
    return common(a[::-1], b[::-1])[::-1]


def _loose(text: str) -> str:
    """A pattern for a text with any white space at its ends and between its lines."""
    return "".join(_SPACE + re.escape(word) for word in text.split()) + _SPACE


def is_distinct(mark: str) -> bool:
    """Whether a text can serve as a mark: it is not blank, not a word, and not mere punctuation."""
    mark = mark.strip()
    return len(mark) >= 3 and any(c.isalnum() for c in mark) and any(not c.isalnum() and not c.isspace() for c in mark)
