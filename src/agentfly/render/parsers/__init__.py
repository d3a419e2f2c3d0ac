"""Tool-call parsers: the text of a reply to prose and calls, one small file per family of models.

In: text, whatever it is. Out: `ParsedReply(content, calls)`. A parser never raises and takes linear time on any input: a call
that cannot be read becomes a `ToolCall` with an `error`, a short sentence that is told to the model. The names are in the table
of `agentfly.plugins` under "parsers"; `detect_parser` chooses one by what the model's chat template says. Refuses to guess: a
template whose format is not known here is an error that says so.
"""

from __future__ import annotations

from typing import NamedTuple

from ... import plugins
from ...errors import ConfigError
from .reply import ParsedReply, Parser, after_thinking, without_thinking

__all__ = ["ParsedReply", "Parser", "after_thinking", "detect_parser", "get_parser", "without_thinking"]


class Signs(NamedTuple):
    """What a chat template shows of a family: any of `has`, and none of `lacks`."""

    parser: str
    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()


# In this order: the first row that fits decides. Other XML dialects write <tool_call> too, and mean something else by it.
FAMILIES = (
    Signs("qwen3_coder", ("<function=",)),
    Signs("deepseek", ("<｜tool▁call▁begin｜>",)),
    Signs("mistral", ("[TOOL_CALLS]",)),
    Signs("pythonic", ("<|tool_call_start|>", "<|tool_list_start|>", "<|python_start|>", "List of tools: [", "func_name1(")),
    Signs("hermes", ("<tool_call>",), lacks=("<arg_key>", "<invoke", "DSML")),
    Signs("llama3_json", ("<|python_tag|>", '{"name": function name, "parameters":')),
)


def detect_parser(chat_template: str) -> str:
    """The name of the parser for a chat template."""
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
    """A parser by name, or a function as it is."""
    if isinstance(parser, str):
        found: Parser = plugins.resolve("parsers", parser)
        return found
    if not callable(parser):
        raise ConfigError(f"a parser is a name or a function of the reply's text, not {type(parser).__name__}")
    return parser
