"""Tool-call parsers: split a reply into prose and calls, with one file per model family.

A parser never raises and takes linear time on any text: a call that cannot be parsed becomes a `ToolCall` whose `error` is
shown to the model. The kind "parsers" of `agentfly.plugins` lists the names. `detect_parser` chooses one by the chat
template of the model and raises ConfigError if the format is unknown.
"""

from __future__ import annotations

from typing import NamedTuple

from ... import plugins
from ...errors import ConfigError
from .reply import ParsedReply, Parser, after_thinking, without_thinking

__all__ = ["ParsedReply", "Parser", "after_thinking", "detect_parser", "get_parser", "without_thinking"]


class Signs(NamedTuple):
    """A chat template of this family contains one of `has` and none of `lacks`."""

    parser: str
    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()


# The first row that fits decides. Other formats write <tool_call>, too, with another content.
FAMILIES = (
    Signs("qwen3_coder", ("<function=",)),
    Signs("deepseek", ("<｜tool▁call▁begin｜>",)),
    Signs("mistral", ("[TOOL_CALLS]",)),
    Signs("pythonic", ("<|tool_call_start|>", "<|tool_list_start|>", "<|python_start|>", "List of tools: [", "func_name1(")),
    Signs("hermes", ("<tool_call>",), lacks=("<arg_key>", "<invoke", "DSML")),
    Signs("llama3_json", ("<|python_tag|>", '{"name": function name, "parameters":')),
)


def detect_parser(chat_template: str) -> str:
    """The name of the parser for a chat template. Raises ConfigError if its format is unknown."""
    for row in FAMILIES:
        if any(sign in chat_template for sign in row.has) and not any(sign in chat_template for sign in row.lacks):
            return row.parser
    known = ", ".join(plugins.names("parsers"))
    if "tools" not in chat_template:
        raise ConfigError(
            "the model's chat template says nothing about tools: use ReactAgent, or give a parser by name or function"
        )
    raise ConfigError(
        f"the tool calls of the model's chat template are in a format not known here: give parser= one of {known}"
    )


def get_parser(parser: str | Parser) -> Parser:
    """The parser of a name; a function is returned unchanged."""
    if isinstance(parser, str):
        found: Parser = plugins.resolve("parsers", parser)
        return found
    if not callable(parser):
        raise ConfigError(f"a parser is a name or a function of the reply's text, not {type(parser).__name__}")
    return parser
