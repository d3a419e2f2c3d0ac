"""Every call format: recognised by its template, read back, never executed when cut off or quoted in thinking."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser_formats import FORMATS, probe, shown, written

from agentfly import plugins
from agentfly.errors import ConfigError
from agentfly.render.parsers import ParsedReply, detect_parser, find_parser, get_parser, type_arguments
from agentfly.render.parsers.reply import MAX_CALLS, CallParser, own_closings
from agentfly.render.template_tokens import CUT
from agentfly.types import ToolCall

NAMES = list(FORMATS)
PROPERTIES = {
    "query": {"type": "string"},
    "limit": {"type": "integer"},
    "ratio": {"type": "number"},
    "exact": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "options": {"type": "object", "properties": {"deep": {"type": "object", "properties": {"level": {"type": "integer"}}}}},
}
SCHEMA = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": PROPERTIES}}}
CALL = ToolCall("search", {"query": "rivers of Peru", "limit": 3}, "zqcall001")
OTHER = ToolCall("search", {"query": "towns", "exact": False}, "zqcall002")
ONE_A_REPLY = {"llama3_json"}  # a second call needs a mark or a separator


def read(name: str, text: str) -> ParsedReply:
    """The reply with typed arguments."""
    reply = get_parser(name)(text)
    if reply.typed:
        return reply
    return ParsedReply(reply.content, tuple(call if call.error else type_arguments(call, SCHEMA) for call in reply.calls))


def executed(reply: ParsedReply) -> list[tuple[str, dict]]:
    return [(call.name, call.arguments) for call in reply.calls if call.error is None]


def parser_of(name: str) -> CallParser:
    found = get_parser(name)
    assert isinstance(found, CallParser)
    return found


def test_every_parser_has_a_template_here():
    assert {*FORMATS, "qwen"} == set(plugins.BUILTIN["parsers"])


@pytest.mark.parametrize("name", NAMES)
def test_the_template_of_a_format_is_recognised(name: str):
    assert detect_parser(FORMATS[name]) == name


@pytest.mark.parametrize("name", NAMES)
def test_two_calls_are_read_in_their_order(name: str):
    assert executed(read(name, written(name, CALL, OTHER))) == [(CALL.name, CALL.arguments), (OTHER.name, OTHER.arguments)]


_CHARACTERS = st.one_of(
    st.sampled_from("\"'<>&{}[]()\\/|:;,=`\n\t #é漢🦊"),
    st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"], exclude_characters=CUT),
)
_TEXTS = st.text(_CHARACTERS, max_size=12)
_ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "query": _TEXTS,
        "limit": st.integers(-(10**9), 10**9),
        "ratio": st.floats(-1e6, 1e6).map(lambda number: round(number, 3)).filter(lambda number: number % 1 != 0),
        "exact": st.booleans(),
        "tags": st.lists(_TEXTS.filter(bool), max_size=3),
        "options": st.just({"deep": {"level": 7}}),
    },
)
# What these formats cannot write: their own quotes and tags; one element "item"; an end of a section inside a text.
_LOSES = {"muse": "<|", "gemma": '<|"|>', "function_gemma": "<escape>", "minimax_m3": "]<]minimax[>["}


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(arguments=_ARGUMENTS, more=_ARGUMENTS)
def test_any_calls_that_a_template_writes_are_read_back(name: str, arguments: dict[str, Any], more: dict[str, Any]):
    calls = [ToolCall("search", arguments, "zqcall001"), ToolCall("search", more, "zqcall002")]
    text = json.dumps([arguments, more], ensure_ascii=False)
    if _LOSES.get(name, "\0") in text or "</" in text or "<![CDATA[" in text or "]]>" in text:
        return
    assert executed(read(name, written(name, *calls))) == [("search", arguments), ("search", more)]


@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_is_cut_off_is_never_executed_with_other_arguments(name: str):
    text = written(name, CALL)
    begun = text.index("search") + len("search")
    complete = 0
    for end in range(len(text)):
        calls = executed(read(name, text[:end]))
        assert calls in ([], [("search", CALL.arguments)]), text[:end]
        complete += bool(calls)
        if calls:
            # Nothing but closing marks is missing.
            assert not set("3}") & set(text[end:].replace("functions", "")) or name in ("granite", "firefunction"), text[end:]
    assert executed(read(name, text)) == [("search", CALL.arguments)]
    middle = text.index("Peru")
    assert begun < middle
    (call,) = read(name, text[:middle]).calls
    assert call.error
    assert complete <= len(text) - text.rindex("3")


@pytest.mark.parametrize("name", NAMES)
def test_a_call_in_thinking_is_not_executed_and_thinking_is_no_answer(name: str):
    if name in ("harmony", "muse"):
        pytest.skip("the thinking is a message of its own; see below")
    parser, text = parser_of(name), written(name, CALL)
    for opening, closing in parser.thinking:
        for thought in (f"{opening}{text}{closing}84", f"{opening}\nI write {text} or\n{text}\n{closing}\n\n84"):
            assert get_parser(name)(thought) == ParsedReply("84", typed=parser.typed), thought
        assert get_parser(name)(f"{opening}{text}") == ParsedReply("", typed=parser.typed)
        opened = replace(parser, opened=closing)
        assert opened(f"{text}{closing}84") == ParsedReply("84", typed=parser.typed)
        assert opened(f"never closed {text}") == ParsedReply("", typed=parser.typed)
        assert executed(read_with(opened, f"I plan.{closing}\n{text}")) == [("search", CALL.arguments)]
    for closing in own_closings(parser.thinking):
        for thought in (text, text * 2, f"the mark {text[:14]} begins a call", text[: len(text) // 2], text * (MAX_CALLS + 2)):
            assert get_parser(name)(f"{thought}{closing}84") == ParsedReply("84", typed=parser.typed), thought


def read_with(parser: CallParser, text: str) -> ParsedReply:
    reply = parser(text)
    return ParsedReply(reply.content, tuple(type_arguments(call, SCHEMA) for call in reply.calls))


@pytest.mark.parametrize("name", NAMES)
def test_marks_of_thinking_inside_arguments_are_text(name: str):
    for opening, closing in parser_of(name).thinking:
        if name == "gigachat" and "message_sep" in closing:
            continue
        call = ToolCall("search", {"query": f"a {closing} b {opening} c", "limit": 3})
        assert executed(read(name, written(name, call))) == [("search", call.arguments)]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("harmony", "muse", "functionary_v3_2", "llama3_json")])
def test_text_around_calls_is_prose(name: str):
    reply = read(name, f"Before.\n{written(name, CALL)}\nAfter.")
    assert executed(reply) == [("search", CALL.arguments)]
    assert reply.content == "Before.\nAfter."


@pytest.mark.parametrize("name", NAMES)
def test_a_reply_without_a_call_is_prose(name: str):
    assert get_parser(name)("  It is 84.\n").content == "It is 84."
    assert get_parser(name)("It is 84, see f(x) and {}.").calls == ()
    assert get_parser(name)("") == ParsedReply("", typed=parser_of(name).typed)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ONE_A_REPLY])
def test_too_many_calls_are_read_in_part_and_said(name: str):
    calls = read(name, written(name, *[CALL] * (MAX_CALLS + 5))).calls
    assert len(calls) == MAX_CALLS + 1
    assert calls[-1].error == f"This tool call could not be read: only the first {MAX_CALLS} calls of a reply are read."


# Channels


def test_harmony_channels_are_thinking_prose_and_calls():
    call = ' to=functions.search<|channel|>commentary json<|message|>{"query": "x"}'
    quoted = "<|channel|>analysis<|message|>I write to=functions.search with {}<|end|><|start|>assistant"
    assert get_parser("harmony")(quoted + call) == ParsedReply("", (ToolCall("search", {"query": "x"}),))
    assert get_parser("harmony")(quoted + "<|channel|>final<|message|>84") == ParsedReply("84")
    assert get_parser("harmony")("<|channel|>analysis<|message|>" + call.replace("<|message|>", " ")) == ParsedReply("")
    newer = '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "x"}<|call|>'
    preamble = "<|channel|>commentary<|message|>I search.<|end|><|start|>assistant"
    assert get_parser("harmony")(preamble + newer) == ParsedReply("I search.", (ToolCall("search", {"query": "x"}),))
    (call_,) = get_parser("harmony")("<|channel|>commentary to=functions.search <|constrain|>js").calls
    assert (call_.name, bool(call_.error)) == ("search", True)
    assert get_parser("muse")(
        ' to=self<|message|><atem:invoke name="f"></atem:invoke><|eom|><|start|>assistant to=user<|message|>84'
    ) == ParsedReply("84", typed=False)


# Fences


FENCED = '```json\n{\n  "name": "search",\n  "arguments": {"query": "rivers"}\n}\n```'


def test_a_fenced_call_of_a_known_tool_is_a_call():
    parser = replace(parser_of("hermes"), names=frozenset({"search"}))
    call = ToolCall("search", {"query": "rivers"})
    assert parser(FENCED) == ParsedReply("", (call,))
    assert parser(f"I search.\n{FENCED}\n") == ParsedReply("I search.", (call,))
    assert parser('{"name": "search", "arguments": {"query": "rivers"}}') == ParsedReply("", (call,))
    assert parser(f"<think>{FENCED}</think>84") == ParsedReply("84")


@pytest.mark.parametrize(
    "text",
    [
        FENCED.replace("search", "shop"),
        '```json\n{"name": "search"}\n```',
        '```json\n{"name": "search", "arguments": {}, "population": 3}\n```',
        '```json\n{"rivers": ["Ucayali"]}\n```',
        "```python\nprint({})\n```",
        '{"answer": 84}',
        'Use {"name": "search", "arguments": {}} for it.',
    ],
)
def test_json_that_is_no_call_of_a_known_tool_is_prose(text: str):
    assert replace(parser_of("hermes"), names=frozenset({"search"}))(text) == ParsedReply(text)


def test_a_fenced_call_that_is_cut_off_is_told_to_the_model():
    parser = replace(parser_of("hermes"), names=frozenset({"search"}))
    for text in (FENCED[:-3], FENCED[:60], FENCED[:-5]):
        (call,) = parser(text).calls
        assert (call.name, bool(call.error)) == ("search", True), text


def test_beside_a_marked_call_a_fence_is_prose():
    marked = '<tool_call>{"name": "search", "arguments": {}}</tool_call>'
    assert shown(parser_of("hermes")(f"{FENCED}\n{marked}").calls) == [("search", {}, False)]


# Formats that no family has


def acme(text: str) -> str:
    """A template with marks of its own in the style of a family."""
    for old, new in (
        ("tool_call", "acme:act"),
        ("function", "acme_do"),
        ("parameter", "acme_in"),
        ("arg_", "acme_"),
        ("name=", "id="),
    ):
        text = text.replace(f"<{old}", f"<{new}").replace(f"</{old}", f"</{new}").replace(f' {old}"', f' {new}"')
    return text


@pytest.mark.parametrize(
    "name", ["hermes", "name_and_json", "qwen3_coder", "glm", "functionary", "minicpm", "pythonic", "apertus"]
)
def test_a_parser_is_derived_from_the_marks_of_the_template(name: str):
    template = acme(FORMATS[name]).replace("<|tool_call_", "<|acme_").replace("<|tools_", "<|acme_")
    assert template != FORMATS[name]
    assert detect_parser(template) == "derived"
    parser = find_parser(template)
    text = probe(template).write(CALL, OTHER)
    assert text is not None
    assert executed(read_with(parser, text)) == [("search", CALL.arguments), ("search", OTHER.arguments)]
    assert parser(f"<think>{text}</think>84").content == "84"
    assert not parser(f"<think>{text}</think>84").calls
    for end in range(text.index("Peru")):
        assert executed(parser(text[:end])) == []


def test_a_format_that_loses_the_names_of_arguments_is_refused():
    template = FORMATS["hermes"].replace(
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}',
        "{{ c.function.name }} {{ c.function.arguments.values() | join(' ') }}",
    )
    with pytest.raises(ConfigError, match=r"does not write a tool call so that it can be read back, .* parser='hermes': give"):
        find_parser(template)
