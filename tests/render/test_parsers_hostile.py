"""Parsers against anything: they never raise, what they return can be written down, their work grows in step with the text."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser_formats import FORMATS, written

from agentfly.render.parsers import ParsedReply, find_parser, get_parser
from agentfly.render.parsers.json_calls import JsonCalls
from agentfly.render.parsers.reply import MAX_CALLS, CallParser
from agentfly.types import ToolCall

CALL = ToolCall("search", {"query": "rivers of Peru", "limit": 3}, "zqcall001")
DERIVED = {
    "derived_json": FORMATS["hermes"].replace("tool_call>", "acme>"),
    "derived_name": FORMATS["functionary"].replace("<function", "<acme").replace("</function", "</acme"),
    "derived_tags": FORMATS["qwen3_coder"]
    .replace("<function", "<acme")
    .replace("</function", "</acme")
    .replace("parameter", "acme_in"),
}
FAMILIES = [*FORMATS, *DERIVED]


@lru_cache
def parser_of(family: str) -> CallParser:
    found = find_parser(DERIVED[family]) if family in DERIVED else get_parser(family)
    assert isinstance(found, CallParser)
    return found


@lru_cache
def openings(family: str) -> list[str]:
    """How a call begins: nothing, up to its name, up to inside its first argument. Hostile text follows."""
    text = written(DERIVED.get(family, family), CALL)
    return ["", text[: text.index("search")], text[: text.index("rivers")]]


@lru_cache
def units(family: str) -> list[str]:
    """Texts that are repeated: marks of this format, of thinking, and what starts strings and nesting."""
    text = written(DERIVED.get(family, family), CALL)
    thinking = [mark for pair in parser_of(family).thinking for mark in pair]
    opened, closed = text[: text.index("rivers")], parser_of(family).thinking[0][1]
    return [
        *(text, text[: text.index("search")], opened, opened + closed, f"{opened}{text}{closed}", text[text.index("Peru") :]),
        *(*thinking, "".join(thinking), text.partition("search")[0] + '{"' + closed, '{"' + closed, "[f(a='" + closed),
        *("[", "{", "{}", '{"a":', "\\", '"', '\\"', "[f(", "[f(a='''", "[f(a=1)]", "```json\n{", '```{"a":"', "a\n{"),
        *(" ", "1", "\ud800"),
    ]


def check(reply: ParsedReply) -> None:
    """What every reply keeps to, whatever the text was."""
    assert len(reply.calls) <= MAX_CALLS + 1
    for call in reply.calls:
        assert len(call.name) <= 128
        call.name.encode()
        if call.error is None:
            assert call.name
            json.dumps(call.arguments, ensure_ascii=False, allow_nan=False)
        else:
            assert call.error.startswith("This tool call could not be read: ")
            assert len(call.error) < 400
            assert call.arguments == {}
            call.error.encode()


@pytest.mark.timeout(600)  # a quadratic parser needs minutes for the first of these
@pytest.mark.parametrize("family", FAMILIES)
def test_a_megabyte_of_anything_is_read(family: str):
    parse = parser_of(family)
    _, named, opened = openings(family)
    for unit in (named or opened, opened + parse.thinking[0][1], '{"a":', "[f(a='\\n"):
        check(parse(opened + unit * (1_000_000 // len(unit))))


class Counted(str):
    """A text that counts how much of it is looked at by searching and cutting."""

    looked_at = 0

    def find(self, sub: str, start: int = 0, end: int | None = None) -> int:  # type: ignore[override]
        at = super().find(sub, start, len(self) if end is None else end)
        self.looked_at += (at if at >= 0 else len(self) if end is None else end) - start + 1
        return at

    def __getitem__(self, key: Any) -> str:
        cut = super().__getitem__(key)
        self.looked_at += len(cut)
        return cut


SIZES = (2_000, 4_000)
"""Small, because every line is traced; large enough for the square to show, and for limits on calls to have been met."""
SLACK = 500
"""What is done once, however long the text is."""


def effort(parse: Callable[[str], Any], text: str) -> int:
    """Lines of Python run, plus characters searched and cut. The same on every machine."""
    counted = Counted(text)
    lines = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        parse(counted)
    finally:
        sys.settrace(before)
    return lines + counted.looked_at


@pytest.mark.parametrize("family", FAMILIES)
def test_twice_the_text_is_at_most_twice_the_work(family: str):
    parse = parser_of(family)
    for opening in openings(family)[::2]:
        for unit in filter(None, units(family)):
            once, twice = (effort(parse, opening + unit * (size // len(unit))) for size in SIZES)
            assert twice < 2.8 * once + SLACK, (opening, unit, once, twice)


def test_the_count_of_work_sees_a_parser_that_is_quadratic():
    def rescan(text: str) -> None:
        for start in range(0, len(text), 40):  # as often as a long unit comes
            text.find("never", start)

    once, twice = (effort(rescan, "x" * size) for size in SIZES)
    assert twice > 3.5 * once
    assert twice > 1.2 * (2.8 * once + SLACK)


pieces = st.one_of(
    st.sampled_from(sorted({unit for family in FAMILIES for unit in units(family)})),
    st.sampled_from([opening for family in FAMILIES for opening in openings(family)]),
    st.sampled_from(["</function>", "</parameter>", "[ARGS]", "[CALL_ID]", "<|message|>", ">>>f\n", "}}", ")]", ", ", "```"]),
    st.sampled_from(
        ['"name"', '"arguments"', '"parameters"', ":", "f", "true", "null", "NaN", "1e999", "0x1", "```json\n", "\n"]
    ),
    st.text(max_size=6),
    st.characters(codec=None, categories=["Cs"]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(pieces, max_size=30).map("".join))
def test_no_text_makes_a_parser_raise(text: str):
    for family in FAMILIES:
        parser = parser_of(family)
        check(parser(text))
        check(replace(parser, opened=parser.thinking[0][1], names=frozenset({"f"}))(text))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=10), values, max_size=4), st.booleans())
def test_whatever_arguments_are_written_are_read_back(arguments: dict[str, Any], escaped: bool):
    body = json.dumps(arguments, ensure_ascii=escaped)
    texts = {
        "hermes": f'<tool_call>\n{{"name": "f", "arguments": {body}}}\n</tool_call>',
        "llama3_json": f'{{"name": "f", "parameters": {body}}}',
        "mistral": f"[TOOL_CALLS]f[ARGS]{body}",
        "deepseek": f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{body}<｜tool▁call▁end｜>",
    }
    for family, text in texts.items():
        (call,) = get_parser(family)(text).calls
        assert (call.name, call.error, call.arguments) == ("f", None, arguments), family


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True), values, max_size=4))
def test_whatever_arguments_python_writes_are_read_back(arguments: dict[str, Any]):
    text = "[f(" + ", ".join(f"{name}={value!r}" for name, value in arguments.items()) + ")]"
    (call,) = get_parser("pythonic")(text).calls
    assert (call.error, call.arguments) == (None, arguments)


JSON_FAMILIES = [family for family in FAMILIES if isinstance(parser_of(family), JsonCalls) and parser_of(family).marks[0][1]]
values = st.recursive(
    st.one_of(st.integers(-9, 99), st.text(st.sampled_from('a"\\}{]é\n '), max_size=6), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("ab"), inner, max_size=2)),
    max_leaves=4,
)


@pytest.mark.parametrize("family", JSON_FAMILIES)
@settings(max_examples=50, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_reply_with_one_call_is_read_as_the_reader_of_all_replies_reads_it(family: str, data: st.DataObject) -> None:
    parser = parser_of(family)
    assert isinstance(parser, JsonCalls)
    opening, closing = parser.marks[0]
    keys = st.sampled_from(["name", "tool_name", "arguments", "parameters", "id", "function"])
    calls = st.dictionaries(keys, st.one_of(values, st.just("search")), max_size=3)
    called = st.builds(lambda value: json.dumps({"name": "search", "arguments": value}), values)
    bodies = st.one_of(
        called, calls.map(json.dumps), values.map(json.dumps), st.sampled_from(["{", '{"name": ', "{}x", "{'a': 1}"])
    )
    marks = st.sampled_from([opening, closing, *parser._others, " ", "\n", "\u00a0", "words ", "{", "}", '"', "```"])
    noise = st.lists(marks, max_size=2).map("".join)
    before, after = data.draw(noise), data.draw(noise)
    text = f"{before}{opening}{data.draw(st.sampled_from(['', chr(10), ' ', closing]))}{data.draw(bodies)}\n{closing}{after}"
    general = replace(parser, fenced=False)
    expected = CallParser.__call__(general, text)
    assert general(text) == expected


def test_a_reply_that_ends_with_its_only_call_takes_the_fast_path() -> None:
    hermes = parser_of("hermes")
    assert isinstance(hermes, JsonCalls)
    call = '<tool_call>\n{"name": "search", "arguments": {"limit": 3}}\n</tool_call>'
    assert hermes._exactly_one(f"Words.\n{call}\n") == ParsedReply("Words.", (ToolCall("search", {"limit": 3}),))
    cut, wrong = call[:-1], call.replace("}}", "}]")
    for other in (f"<think>a</think>{call}", f"a</think>{call}", f"{call} words", f"{call}{call}", cut, wrong):
        assert hermes._exactly_one(other) is None
