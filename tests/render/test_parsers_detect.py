"""Which parser belongs to which chat template."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentfly.errors import ConfigError, UnknownName
from agentfly.render.parsers import ParsedReply, detect_parser, get_parser

PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "chat_templates"
EXPECTED = {
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-QwQ-32B": "hermes",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "ibm-granite-granite-4.0": "hermes",
    "Qwen3-Coder": "qwen3_coder",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3_json",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3_json",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral",
    "unsloth-mistral-Devstral-Small-2507": "mistral",
    "LFM2-8B-A1B": "pythonic",
    "LFM2.5-8B-A1B": "pythonic",
    "deepseek-ai-DeepSeek-V3.1": "deepseek",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek",
    "GLM-4.6": None,
    "MiniMax-M3": None,
    "deepseek-ai-DeepSeek-V3.2": None,
    "openai-gpt-oss-120b": None,
    "google-gemma-2-2b-it": None,
}


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ('{% for tool in tools %}...{% endfor %}<tool_call>\n{"name": ...}\n</tool_call>', "hermes"),
        ("{{ tools }}<tool_call>\n<function=name>\n<parameter=p>", "qwen3_coder"),
        ("{{ tools }}<|python_tag|>", "llama3_json"),
        ("[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS][TOOL_CALLS]", "mistral"),
        ("{{ tools }}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek"),
        ("List of tools: <|tool_list_start|>[{{ tools }}]<|tool_list_end|>", "pythonic"),
    ],
)
def test_a_template_is_known_by_its_marks(template: str, parser: str):
    assert detect_parser(template) == parser


def test_a_template_without_tools_is_an_error_that_says_what_to_do():
    with pytest.raises(ConfigError, match="says nothing about tools: use ReactAgent"):
        detect_parser("{% for message in messages %}<|im_start|>{{ message.content }}{% endfor %}")


def test_a_format_that_is_not_known_is_an_error_that_lists_the_parsers():
    with pytest.raises(ConfigError, match="not known here: give parser= one of deepseek, hermes"):
        detect_parser("{{ tools }}<tool_call>{function-name}\n<arg_key>{arg-key}</arg_key>")


@pytest.mark.parametrize("name", EXPECTED)
def test_published_templates_are_recognised_or_refused(name: str):
    path = PUBLISHED / f"{name}.jinja"
    if not path.is_file():
        pytest.skip("the published templates are not here")
    if EXPECTED[name] is None:
        with pytest.raises(ConfigError):
            detect_parser(path.read_text(encoding="utf-8"))
    else:
        assert detect_parser(path.read_text(encoding="utf-8")) == EXPECTED[name]


WRITES_NO_CALLS = {"LFM2-8B-A1B"}  # its template leaves the text of a call to the reply


def render(template: str, messages: list[dict], tools: list[dict]) -> str:
    """As transformers does it."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False)
    environment.globals["strftime_now"] = datetime(2025, 1, 1).strftime
    source = template.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    return environment.from_string(source).render(messages=messages, tools=tools, bos_token="", eos_token="</s>")


@pytest.mark.parametrize("name", [name for name, parser in EXPECTED.items() if parser and name not in WRITES_NO_CALLS])
def test_what_a_published_template_writes_is_read_back(name: str):
    path = PUBLISHED / f"{name}.jinja"
    if not path.is_file():
        pytest.skip("the published templates are not here")
    template = path.read_text(encoding="utf-8")
    parameters = {"type": "object", "properties": {"city": {"type": "string", "description": "where"}}, "required": ["city"]}
    schema = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": parameters}}
    call = {"type": "function", "id": "9Ae3bDc2F", "function": {"name": "weather", "arguments": {"city": "São Paulo {[<"}}}
    messages = [
        {"role": "user", "content": "How is the weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    written = render(template, messages, [schema])
    reply = written.rpartition("How is the weather?")[2]
    for turn in ("[/INST]", "<|end_header_id|>", "<｜Assistant｜>", "<|im_start|>assistant"):
        reply = reply.partition(turn)[2] or reply
    (found,) = get_parser(detect_parser(template))(reply).calls
    assert (found.name, found.arguments, found.error) == ("weather", {"city": "São Paulo {[<"}, None)


def test_a_parser_is_found_by_name_or_taken_as_it_is():
    def shout(text: str) -> ParsedReply:
        return ParsedReply(text.upper())

    assert get_parser(shout) is shout
    with pytest.raises(UnknownName, match="did you mean 'hermes'"):
        get_parser("hermess")
    with pytest.raises(ConfigError, match="a name or a function"):
        get_parser(7)  # type: ignore[arg-type]
