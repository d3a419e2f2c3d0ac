"""Parsers against anything: they never raise, what they return can be written down, their work grows in step with the text."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.render.parsers import ParsedReply, get_parser
from agentfly.render.parsers.reply import MAX_CALLS

FAMILIES = ["hermes", "qwen3_coder", "llama3_json", "mistral", "pythonic", "deepseek"]
DEEP = "<｜tool▁call▁begin｜>f<｜tool▁sep｜>"

# How a call begins, per family; hostile text follows, and it is repeated whole as well.
OPENINGS = {
    "hermes": ["", "<tool_call>", '<tool_call>{"name": "f", "arguments": {"a": '],
    "qwen3_coder": ["", "<tool_call><function=f>", "<function=f><parameter=a>"],
    "llama3_json": ["", '{"name": "f", "parameters": ', "<|python_tag|>{}"],
    "mistral": ["", "[TOOL_CALLS][", '[TOOL_CALLS]f[ARGS]{"a": '],
    "pythonic": ["", "[f(a=", "<|tool_call_start|>[f(a="],
    "deepseek": ["", DEEP, DEEP + '{"a": '],
}
UNITS = [
    *("<tool_call>", "</tool_call>", '<tool_call>{"', '<tool_call>{\\"</tool_call>', '<tool_call>{"a</tool_call>'),
    *("<tool_call>{}</tool_call>", "<think>", "</think>", "<think></think>", "[", "{", "{}", '{"a":', "\\", '"', '\\"', "'"),
    *("[f(", '[f(a="', "[f(a='''", "[f(a=1)]", "[f(a='\\n", "<|tool_call_start|>[f(a='<|tool_call_end|>", "<function=f>"),
    *("<function=f><parameter=a>", "<parameter=a></parameter>", "[TOOL_CALLS]", "[TOOL_CALLS][{", '[TOOL_CALLS]f[ARGS]{"'),
    *(
        "<｜tool▁call▁begin｜>",
        DEEP,
        DEEP + "{",
        '<|python_tag|>{"',
        '{"name": "f", "parameters": {}};',
        " ",
        "1",
        "-",
        "\ud800",
    ),
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


@pytest.mark.timeout(120)  # a quadratic parser needs minutes for the first of these
@pytest.mark.parametrize("family", FAMILIES)
def test_a_megabyte_of_anything_is_read(family: str):
    parse = get_parser(family)
    for unit in (
        "<tool_call>",
        "<think>",
        "[",
        "\\",
        '"',
        '{"a":',
        "[f(a='\\n",
        "[TOOL_CALLS]",
        DEEP,
        "<function=f><parameter=a>",
    ):
        check(parse(OPENINGS[family][-1] + unit * (1_000_000 // len(unit))))


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
    parse = get_parser(family)
    for opening in OPENINGS[family]:
        for unit in UNITS:
            once, twice = (effort(parse, opening + unit * (size // len(unit))) for size in SIZES)
            assert twice < 2.2 * once + SLACK, (opening, unit, once, twice)


def test_the_count_of_work_sees_a_parser_that_is_quadratic():
    def rescan(text: str) -> None:
        for start in range(0, len(text), 40):  # as often as a long unit comes
            text.find("never", start)

    once, twice = (effort(rescan, "x" * size) for size in SIZES)
    assert twice > 3.5 * once
    assert twice > 1.5 * (2.2 * once + SLACK)


pieces = st.one_of(
    st.sampled_from(UNITS),
    st.sampled_from([opening for openings in OPENINGS.values() for opening in openings]),
    st.sampled_from(
        ["</function>", "</parameter>", "<｜tool▁call▁end｜>", "<|tool_call_end|>", "[ARGS]", "[CALL_ID]", "}}", ")]", ", "]
    ),
    st.sampled_from(
        ['"name"', '"arguments"', '"parameters"', ":", "f", "true", "null", "NaN", "1e999", "0x1", "```json\n", "\n"]
    ),
    st.text(max_size=6),
    st.characters(codec=None, categories=["Cs"]),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(pieces, max_size=40).map("".join))
def test_no_text_makes_a_parser_raise(text: str):
    for family in FAMILIES:
        check(get_parser(family)(text))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(max_size=10), values, max_size=4), st.booleans())
def test_whatever_arguments_are_written_are_read_back(arguments: dict[str, Any], escaped: bool):
    written = json.dumps(arguments, ensure_ascii=escaped)
    texts = {
        "hermes": f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>',
        "llama3_json": f'{{"name": "f", "parameters": {written}}}',
        "mistral": f"[TOOL_CALLS]f[ARGS]{written}",
        "deepseek": f"{DEEP}{written}<｜tool▁call▁end｜>",
    }
    for family, text in texts.items():
        if "</think>" not in text:
            (call,) = get_parser(family)(text).calls
            assert (call.name, call.error, call.arguments) == ("f", None, arguments), family


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True), values, max_size=4))
def test_whatever_arguments_python_writes_are_read_back(arguments: dict[str, Any]):
    text = "[f(" + ", ".join(f"{name}={value!r}" for name, value in arguments.items()) + ")]"
    if "</think>" not in text:
        (call,) = get_parser("pythonic")(text).calls
        assert (call.error, call.arguments) == (None, arguments)
