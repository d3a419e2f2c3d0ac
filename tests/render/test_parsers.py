"""What each family's calls look like, and what becomes of replies that are not quite right."""

from __future__ import annotations

import pytest

from agentfly.render.parsers import ParsedReply, get_parser, type_arguments, without_thinking
from agentfly.render.parsers.reply import MAX_CALLS
from agentfly.types import ToolCall

CALLS, CALL, SEP, END, CALLS_END = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
MULTIPLY = ToolCall("multiply", {"a": 12, "b": 7})

# One multiply(12, 7), as each family writes it.
ONE_CALL = {
    "hermes": '<tool_call>\n{"name": "multiply", "arguments": {"a": 12, "b": 7}}\n</tool_call>',
    "qwen": '<tool_call>{"name": "multiply", "arguments": {"a": 12, "b": 7}}</tool_call>',
    "llama3_json": '{"name": "multiply", "parameters": {"a": 12, "b": 7}}',
    "mistral": '[TOOL_CALLS]multiply[ARGS]{"a": 12, "b": 7}',
    "pythonic": "[multiply(a=12, b=7)]",
    "deepseek": f'{CALLS}{CALL}multiply{SEP}{{"a": 12, "b": 7}}{END}{CALLS_END}',
}


def parse(family: str, text: str) -> ParsedReply:
    return get_parser(family)(text)


def only_error(reply: ParsedReply) -> ToolCall:
    """The one call of a reply, which could not be read."""
    assert len(reply.calls) == 1
    assert reply.calls[0].error is not None
    assert reply.calls[0].arguments == {}
    return reply.calls[0]


@pytest.mark.parametrize("family", ONE_CALL)
def test_a_call_is_read(family: str):
    assert parse(family, ONE_CALL[family]) == ParsedReply("", (MULTIPLY,))


@pytest.mark.parametrize("family", ONE_CALL)
def test_a_call_after_thinking_is_read_and_the_thinking_is_dropped(family: str):
    assert parse(family, f"<think>\nI multiply.\n</think>\n\n{ONE_CALL[family]}") == ParsedReply("", (MULTIPLY,))


@pytest.mark.parametrize("family", ONE_CALL)
def test_a_call_inside_thinking_does_not_count(family: str):
    call = ONE_CALL[family]
    assert parse(family, f"<think>{call}</think>84") == ParsedReply("84")
    assert parse(family, f"{call} opened in the prompt</think>84") == ParsedReply("84")
    assert parse(family, f"<think>never closed {call}") == ParsedReply("")


@pytest.mark.parametrize("family", [*ONE_CALL, "qwen3_coder"])
def test_a_reply_without_a_call_is_prose(family: str):
    assert parse(family, "  It is 84.\n") == ParsedReply("It is 84.", typed=family != "qwen3_coder")
    assert parse(family, "").content == ""


# Hermes and Qwen


def test_hermes_prose_around_calls_is_kept_and_calls_keep_their_order():
    text = 'First.\n<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g", "arguments": {"x": [1]}}</tool_call>\nDone.'
    assert parse("hermes", text) == ParsedReply("First.\nDone.", (ToolCall("f"), ToolCall("g", {"x": [1]})))


def test_hermes_a_closing_tag_inside_a_string_does_not_end_the_call():
    text = '<tool_call>{"name": "write", "arguments": {"text": "a </tool_call> \\" b <think> {"}}</tool_call>'
    assert parse("hermes", text).calls == (ToolCall("write", {"text": 'a </tool_call> " b <think> {'}),)


def test_hermes_arguments_may_be_json_in_a_string():
    text = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert parse("hermes", text).calls == (ToolCall("f", {"a": 1}),)


def test_hermes_a_line_break_inside_a_string_is_let_through():
    text = '<tool_call>{"name": "run", "arguments": {"code": "x = 1\nprint(x)"}}</tool_call>'
    assert parse("hermes", text).calls == (ToolCall("run", {"code": "x = 1\nprint(x)"}),)


def test_hermes_a_call_that_is_not_closed_is_told_to_the_model():
    call = only_error(parse("hermes", '<tool_call>\n{"name": "multiply", "arguments": {"a": 12'))
    assert call.name == "multiply"
    assert call.error == "This tool call could not be read: the JSON is not valid at its end: expecting ',' delimiter."
    call = only_error(parse("hermes", '<tool_call>{"name": "f", "arguments": {}}'))
    assert (call.name, call.error) == ("f", "This tool call could not be read: it is not closed with </tool_call>.")


def test_hermes_a_broken_call_does_not_hide_the_good_one_after_it():
    good = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    for bad in (
        "<tool_call>f()</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "never closed}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}}} and so on</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}}',
    ):
        first, second = parse("hermes", bad + good).calls
        assert first.error, bad
        assert second == ToolCall("g"), bad


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("[1]", "arguments must be a JSON object, not a list"),
        ("7", "arguments must be a JSON object, not a number"),
        ('"text"', "arguments must be a JSON object, not a string"),
        ('{"a": NaN}', "NaN is not JSON; use a number or null"),
        ('{"a": -Infinity}', "-Infinity is not JSON; use a number or null"),
        ('{"a": 1e999}', "a number is too large"),
        ('{"a": 1, "a": 2}', "the key 'a' is given twice"),
        ('{"a": "\\ud800"}', "the JSON has half a surrogate pair (\\ud800 to \\udfff), which is no character"),
        ('{"a": ' + "9" * 5000 + "}", "a number has more than 1000 digits"),
        ('{"a": ' + "[" * 80 + "]" * 80 + "}", "the JSON is nested deeper than 64 levels"),
        ("{'a': 1}", "the JSON is not valid at character 29: expecting property name enclosed in double quotes"),
    ],
)
def test_json_traps_become_short_sentences(arguments: str, complaint: str):
    call = only_error(parse("hermes", f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'))
    assert (call.name, call.error) == ("f", f"This tool call could not be read: {complaint}.")


def test_a_call_needs_a_name():
    for body in ('{"arguments": {}}', '{"name": 7}', '{"name": ""}', '{"name": "' + "x" * 500 + '"}', "[]", "{}"):
        assert only_error(parse("hermes", f"<tool_call>{body}</tool_call>")).name == "", body


def test_a_reply_with_too_many_calls_is_read_in_part_and_says_so():
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert len(parse("hermes", text * MAX_CALLS).calls) == MAX_CALLS
    calls = parse("hermes", text * (MAX_CALLS + 5)).calls
    assert len(calls) == MAX_CALLS + 1
    assert calls[-1].error == f"This tool call could not be read: only the first {MAX_CALLS} calls of a reply are read."


# Qwen3-Coder

CODER = """I look.
<tool_call>
<function=search>
<parameter=query>
rivers
of <b>Peru</b>
</parameter>
<parameter=limit>
3
</parameter>
</function>
</tool_call>"""


def test_coder_values_are_raw_text_until_the_schema_types_them():
    reply = parse("qwen3_coder", CODER)
    assert reply == ParsedReply(
        "I look.", (ToolCall("search", {"query": "rivers\nof <b>Peru</b>", "limit": "3"}),), typed=False
    )
    properties = {"query": {"type": "string"}, "limit": {"type": "integer"}}
    schema = {"type": "function", "function": {"name": "search", "parameters": {"properties": properties}}}
    assert type_arguments(reply.calls[0], schema).arguments == {"query": "rivers\nof <b>Peru</b>", "limit": 3}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("12", {"type": "string"}, "12"),
        ("12", {"type": "number"}, 12),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": ["boolean", "null"]}, False),
        ("None", {"type": ["string", "null"]}, None),
        ("None", {"type": "string"}, "None"),
        ("null", {"anyOf": [{"type": "array"}, {"type": "null"}]}, None),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ('{"x": 1}', {"$ref": "#/$defs/Point"}, {"x": 1}),
        ("twelve", {"type": "integer"}, "twelve"),
        ("12", {}, "12"),
    ],
)
def test_coder_values_become_what_the_schema_asks_for(text: str, schema: dict, value: object):
    typed = type_arguments(ToolCall("f", {"a": text}), {"function": {"parameters": {"properties": {"a": schema}}}})
    assert typed.arguments["a"] == value
    assert type(typed.arguments["a"]) is type(value)


def test_coder_calls_without_the_outer_tag_and_without_parameters_are_read():
    assert parse("qwen3_coder", "<function=f>\n</function>").calls == (ToolCall("f"),)
    two = "<tool_call><function=f></function></tool_call>\n<tool_call><function=g></function></tool_call>"
    assert parse("qwen3_coder", two).calls == (ToolCall("f"), ToolCall("g"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("<tool_call>\nf()\n</tool_call>", "after <tool_call> comes <function= and the name of a tool"),
        ("<function=f", "after <function= comes the name of a tool"),
        ("<function=f><parameter=a>1", "the parameter 'a' is not closed with </parameter>"),
        (
            "<function=f><parameter=a>1<parameter=b>2</parameter></function>",
            "the parameter 'a' is not closed with </parameter>",
        ),
        ("<function=f><parameter=>1</parameter></function>", "after <parameter= comes the name of a parameter"),
        ("<function=f>" + "<parameter=a>1</parameter>" * 2 + "</function>", "the parameter 'a' is given twice"),
        ("<function=f><parameter=a>1</parameter>", "it is not closed with </function>, or has text outside its parameters"),
    ],
)
def test_coder_broken_calls_are_told_to_the_model(text: str, complaint: str):
    assert only_error(parse("qwen3_coder", text)).error == f"This tool call could not be read: {complaint}."


def test_coder_a_broken_call_does_not_hide_the_good_one_after_it():
    calls = parse("qwen3_coder", "<function=f>oops</function><function=g></function>").calls
    assert (calls[0].name, bool(calls[0].error), calls[1]) == ("f", True, ToolCall("g"))


# Llama 3


def test_llama_several_calls_are_set_apart_by_semicolons_after_the_tag():
    text = '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}'
    assert parse("llama3_json", text).calls == (ToolCall("f", {"a": 1}), ToolCall("g"))


def test_llama_text_before_the_tag_and_after_the_call_is_prose():
    text = 'I call.<|python_tag|>{"name": "f", "parameters": {}}'
    assert parse("llama3_json", text) == ParsedReply("I call.", (ToolCall("f"),))
    text = '{"name": "f", "parameters": {}}\nThis calls f.'
    assert parse("llama3_json", text) == ParsedReply("This calls f.", (ToolCall("f"),))


def test_llama_an_answer_that_is_json_is_not_a_call():
    for answer in ('{"answer": 84}', '{"name": "Lima"}', '{"answer": ', "{not json}"):
        assert parse("llama3_json", answer) == ParsedReply(answer.strip())


def test_llama_broken_calls_are_told_to_the_model():
    call = only_error(parse("llama3_json", '{"name": "f", "parameters": {"a": 1}'))
    assert call.name == "f"
    assert "parameters" in (only_error(parse("llama3_json", '{"name": "f", "parameters": [1]}')).error or "")
    assert "after <|python_tag|> comes" in (only_error(parse("llama3_json", "<|python_tag|>print(1)")).error or "")


# Mistral


def test_mistral_the_older_list_form_is_read_with_its_ids():
    text = '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}, "id": "9Ae3bDc2F"}, {"name": "g", "arguments": {}}]'
    assert parse("mistral", text).calls == (ToolCall("f", {"a": "]"}, "9Ae3bDc2F"), ToolCall("g"))


def test_mistral_the_newer_form_is_read_with_and_without_an_id():
    text = 'Wait.[TOOL_CALLS]f[CALL_ID]9Ae3bDc2F[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}'
    assert parse("mistral", text) == ParsedReply("Wait.", (ToolCall("f", {"a": 1}, "9Ae3bDc2F"), ToolCall("g")))
    assert parse("mistral", '[TOOL_CALLS]f{"a": 1}').calls == (ToolCall("f", {"a": 1}),)


def test_mistral_broken_calls_are_told_to_the_model_and_the_next_is_read():
    for bad in ('[TOOL_CALLS]f[ARGS]{"a": 1', "[TOOL_CALLS]f[ARGS]", '[TOOL_CALLS][{"name": "f", "arguments": {}'):
        first, second = parse("mistral", f"{bad}[TOOL_CALLS]g[ARGS]{{}}").calls
        assert (first.name, bool(first.error)) == ("f", True), bad
        assert second == ToolCall("g"), bad
    assert only_error(parse("mistral", "[TOOL_CALLS]")).error
    assert only_error(parse("mistral", "[TOOL_CALLS] [7]")).error


# Pythonic


def test_pythonic_plain_values_are_read():
    text = """[f(a=-1, b=2.5e3, c='it\\'s', d="two\\nlines \\u00e9", e=[1, (2, 3)], f={"k": None}, g=True, h=0x1F), g()]"""
    arguments = {"a": -1, "b": 2500.0, "c": "it's", "d": "two\nlines é", "e": [1, [2, 3]], "f": {"k": None}, "g": True, "h": 31}
    assert parse("pythonic", text).calls == (ToolCall("f", arguments), ToolCall("g"))


def test_pythonic_marks_and_triple_quotes_are_read():
    text = 'I run it. <|tool_call_start|>[run(code="""print("a")\nprint(1)""",)]<|tool_call_end|> Done.'
    call = ToolCall("run", {"code": 'print("a")\nprint(1)'})
    assert parse("pythonic", text) == ParsedReply("I run it.\nDone.", (call,))
    assert parse("pythonic", "<|python_start|>[f()]<|python_end|>").calls == (ToolCall("f"),)


def test_pythonic_a_list_that_is_an_answer_is_not_a_call():
    for answer in ("[1, 2, 3]", "[]", "[see (1)]", "f(a=1)"):
        assert parse("pythonic", answer) == ParsedReply(answer)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[f(12)]", "every argument needs its name: tool(argument=value)"),
        ("[f(a=1 + 1)]", "after the argument 'a' comes a comma or )"),
        ("[f(a=open('x'))]", "a value must be a plain number, string, list, dict, True, False or None"),
        ("[f(a='x)]", "a string is not closed"),
        ("[f(a=1", "after the argument 'a' comes a comma or )"),
        ("[f(a=1)", "the calls of a list are set apart by commas and closed with ]"),
        ("[f(a=1, a=2)]", "the argument 'a' is given twice"),
        ("[f(a={1: 2})]", "the keys of a dict must be strings, each given once"),
        ("[f(a=1e999)]", "a number is too large"),
        ("[f(a=" + "9" * 2000 + ")]", "a number has more than 1000 digits"),
        ("[f(a=" + "[" * 100 + ")]", "a value is nested deeper than 64 levels"),
        ("[f(a='\\ud800')]", "a string has half a surrogate pair, which is no character"),
        ("[f(a='\\Uffffffff')]", "a string has an escape that is no character"),
    ],
)
def test_pythonic_what_would_have_to_be_computed_is_refused(text: str, complaint: str):
    call = only_error(parse("pythonic", text))
    assert (call.name, call.error) == ("f", f"This tool call could not be read: {complaint}.")


def test_pythonic_good_calls_before_a_broken_one_are_kept():
    calls = parse("pythonic", "[f(a=1), g(2)]").calls
    assert calls[0] == ToolCall("f", {"a": 1})
    assert (calls[1].name, bool(calls[1].error)) == ("g", True)


# DeepSeek


def test_deepseek_the_fenced_form_is_read():
    one = f'{CALL}function{SEP}multiply\n```json\n{{"a": 12, "b": 7}}\n```{END}'
    two = f"{CALL}function{SEP}now\n```json\n{{}}\n```{END}"
    assert parse("deepseek", f"I see.{CALLS}{one}\n{two}{CALLS_END}") == ParsedReply("I see.", (MULTIPLY, ToolCall("now")))


def test_deepseek_the_plain_form_is_read_several_times():
    text = f'{CALLS}{CALL}multiply{SEP}{{"a": 12, "b": 7}}{END}{CALL}now{SEP}{{}}{END}{CALLS_END}'
    assert parse("deepseek", text).calls == (MULTIPLY, ToolCall("now"))


def test_deepseek_broken_calls_are_told_to_the_model_and_the_next_is_read():
    good = f"{CALL}g{SEP}{{}}{END}"
    for bad in (
        f'{CALL}f{SEP}{{"a": 1{END}',
        f"{CALL}f{SEP}nothing{END}",
        f"{CALL}f{END}",
        f"{CALL}f{SEP}{{}}",
        f"{CALL}f{SEP}{{}} more{END}",
        f'{CALL}function{SEP}f\n```json\n{{"a": "\n```{END}',
    ):
        first, second = parse("deepseek", bad + good).calls
        assert first.error, bad
        assert second == ToolCall("g"), bad


# Thinking


def test_thinking_is_cut_wherever_it_stands():
    assert without_thinking("<think>a</think>b<think>c</think>d") == "b\nd"
    assert without_thinking("opened in the prompt</think>b") == "b"
    assert without_thinking("b<think>never closed") == "b"
    assert without_thinking("no tags") == "no tags"
