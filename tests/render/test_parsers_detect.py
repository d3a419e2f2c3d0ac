"""Which parser belongs to which chat template, and what a renderer adds: the tools and the marks of thinking."""

from __future__ import annotations

from typing import Any

import pytest
from parser_formats import FORMATS, written
from render_families import make_tokenizer, template_text

from agentfly import plugins
from agentfly.errors import ConfigError, UnknownName
from agentfly.render import HFRenderer
from agentfly.render.parsers import ParsedReply, detect_parser, find_parser, fit_parser, get_parser
from agentfly.render.parsers.reply import CallParser
from agentfly.types import Message, ToolCall

CALL = ToolCall("search", {"query": "rivers", "limit": 3})
OWN = {  # the templates of the renderer's tests
    "qwen25": "hermes",
    "qwen3": "hermes",
    "llama3": "llama3_json",
    "mistral": "mistral",
    "gptoss": "harmony",
    "glm": "name_and_json",
    "counting": "name_and_json",
}


def found(renderer: object) -> CallParser:
    parser = find_parser(renderer, ["search"])
    assert isinstance(parser, CallParser)
    return parser


@pytest.mark.parametrize("name", OWN)
def test_a_template_is_known_by_how_it_writes_calls(name: str):
    assert detect_parser(template_text(name)) == OWN[name]


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        (
            "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}List of tools: <|tool_list_start|>{{ tools }}",
            "pythonic",
        ),
        ("{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }} Write functools[{...}].", "firefunction"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }} Write <tool_call>{...}</tool_call>.", "hermes"),
    ],
)
def test_a_template_that_writes_no_calls_is_known_by_what_it_says_about_them(template: str, parser: str):
    assert detect_parser(template) == parser


def writing(value: str) -> str:
    """A template whose calls hold `value`, an expression of the argument, in the place of each argument."""
    call = (
        '<tool_call>{"name": "{{ c.function.name }}", "arguments": { '
        '{% for key in c.function.arguments %}"{{ key }}": {{ '
        + value
        + " }}{{ ', ' if not loop.last }}{% endfor %} } }</tool_call>"
    )
    return (
        "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        + call
        + "{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def test_a_template_that_turns_lists_into_text_is_refused_with_the_parser_of_its_names():
    assert detect_parser(writing("c.function.arguments[key] | tojson")) == "hermes"
    with pytest.raises(ConfigError, match=r"does not write every argument .* parser='hermes' reads the names"):
        detect_parser(writing("c.function.arguments[key] | string | tojson"))


def test_a_template_whose_calls_cannot_be_read_names_the_parser_of_the_format_that_it_speaks_of():
    """As the templates for Phi-4-mini and ToolACE, which write arguments with Python's repr."""
    phi = "Formatted as functools[...]. " + writing("c.function.arguments[key]")
    with pytest.raises(ConfigError, match=r"speaks of the format of parser='firefunction': give it if the model"):
        detect_parser(phi)


def test_marks_around_all_calls_are_no_prose():
    """As in MiniMax-M1's template: the calls are JSON objects between two marks, one in a line."""
    template = (
        "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}<tool_calls>\n{% for c in m.tool_calls %}"
        """{{ '{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson + '}\n' }}{% endfor %}"""
        "</tool_calls>{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    parsed = found(HFRenderer(make_tokenizer(template)))(
        '<tool_calls>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_calls>'
    )
    assert [call.arguments for call in parsed.calls] == [{"query": "x"}]
    assert parsed.content == ""


@pytest.mark.parametrize("rule", ["length < 9", "length != 9", "length > 9"])
def test_a_template_that_asks_for_ids_of_some_length_gets_them(rule: str):
    template = (
        "{% for m in messages %}{% if m.tool_calls %}[CALLS]{% for c in m.tool_calls %}{% if c.id | "
        + rule
        + " %}{{ raise_exception('ids!') }}{% endif %}{{ c.function | tojson }}{% endfor %}{% elif m.role == 'tool' %}"
        "{% if m.tool_call_id | "
        + rule
        + " %}{{ raise_exception('ids!') }}{% endif %}[RESULT]{{ m.content }}{% else %}[{{ m.role }}]{{ m.content }}{% endif %}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}{{ tools | tojson if tools else '' }}"
    )
    renderer = HFRenderer(make_tokenizer(template))
    tools = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}]
    call = ToolCall("search", {"query": "rivers"})
    messages = [Message("user", "Hi."), Message("assistant", "", (call,)), Message("tool", "seen"), Message("user", "Go on.")]
    assert "rivers" in renderer.decode(renderer.start(messages, tools))


def test_a_template_without_tools_is_an_error_that_says_what_to_do():
    with pytest.raises(ConfigError, match="says nothing about tools: use ReactAgent, or give a parser by name or function"):
        detect_parser(template_text("chatml"))


def test_a_format_that_is_not_known_is_an_error_that_lists_the_parsers_and_offers_a_function():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"
    with pytest.raises(ConfigError, match=r"give parser= one of apertus, .*qwen3_coder.*, or a function from the reply's text"):
        detect_parser(template)


def test_formats_with_the_same_marks_are_told_apart():
    lists = FORMATS["hermes"].replace("<tool_call>", "<tool_calls>[").replace("</tool_call>", "]</tool_calls>")
    assert detect_parser(lists) == "apriel"
    assert detect_parser(FORMATS["functionary"]) == "functionary"
    assert detect_parser(FORMATS["qwen3_coder"]) == "qwen3_coder"
    assert detect_parser(FORMATS["glm"]) == "glm"


def test_the_template_in_use_counts_and_not_the_one_of_the_tokenizer():
    renderer = HFRenderer(make_tokenizer(template_text("qwen25")), chat_template=FORMATS["functionary"])
    text = written("functionary", CALL)
    assert [call.arguments for call in found(renderer)(text).calls] == [CALL.arguments]
    own = HFRenderer(make_tokenizer(template_text("qwen25")))
    assert not found(own)(text).calls


def test_the_template_for_tools_counts():
    tokenizer = make_tokenizer(None)
    tokenizer.chat_template = {"default": template_text("chatml"), "tool_use": FORMATS["kimi"]}
    assert [call.name for call in found(HFRenderer(tokenizer))(written("kimi", CALL)).calls] == ["search"]


THINKING = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{%- if m.reasoning_content %}<acme:muse>{{ m.reasoning_content }}</acme:muse>{% endif %}{{ m.content or '' }}"
    "{%- for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>\n'
    "{%- endfor %}{% if tools %}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\nOPENED{% endif %}"
)


def test_the_marks_of_thinking_are_those_of_the_template():
    parser = found(HFRenderer(make_tokenizer(THINKING.replace("OPENED", ""))))
    call = '<tool_call>{"name": "search", "arguments": {}}</tool_call>'
    assert ("<acme:muse>", "</acme:muse>") in parser.thinking
    assert parser(f"<acme:muse>{call}</acme:muse>84") == ParsedReply("84")
    assert parser(f"{call}</acme:muse>84") == ParsedReply("84")
    assert parser(f"<acme:muse>plan</acme:muse>{call}").calls == (ToolCall("search"),)


def test_thinking_that_the_prompt_opens_lasts_until_it_is_closed():
    parser = found(HFRenderer(make_tokenizer(THINKING.replace("OPENED", "<acme:muse>\n"))))
    call = '<tool_call>{"name": "search", "arguments": {}}</tool_call>'
    assert parser.opened == "</acme:muse>"
    assert parser(f"I could write {call}") == ParsedReply("")
    assert parser(f"plan</acme:muse>{call}").calls == (ToolCall("search"),)


def test_a_parser_is_found_by_name_or_taken_as_it_is():
    def shout(text: str) -> ParsedReply:
        return ParsedReply(text.upper())

    assert get_parser(shout) is shout
    with pytest.raises(UnknownName, match="did you mean 'hermes'"):
        get_parser("hermess")
    with pytest.raises(ConfigError, match="a name or a function"):
        get_parser(7)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["apertus", "olmo3", "minicpm"])
def test_a_call_whose_closing_mark_ends_the_reply_is_closed_by_the_end_of_the_text(name: str) -> None:
    parser: Any = plugins.resolve("parsers", name)
    opening, closing = parser.marks[0] if getattr(parser, "marks", ()) else (parser.opening, parser.closing)
    calls = {
        "apertus": '[{"multiply": {"a": "x"}}]',
        "olmo3": 'multiply(a="x")',
        "minicpm": '"multiply"><param name="a">x</param>',
    }
    tokenizer = make_tokenizer(
        "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|>", more=[opening, closing], eos=closing
    )
    renderer = HFRenderer(tokenizer)
    reading: Any = fit_parser(parser, renderer, ["multiply"])
    for text in (f"{opening}{calls[name]}", f"{opening}{calls[name]}{closing}"):
        assert [(call.name, call.arguments, call.error) for call in reading(text).calls] == [("multiply", {"a": "x"}, None)], (
            text
        )
    assert reading(f"{opening}{calls[name][:-4]}").calls[0].error
    assert not reading("no call").calls
