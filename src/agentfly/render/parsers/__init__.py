"""Tool-call parsers: split a reply into prose and calls, one row of a table per model family.

A parser never raises and takes linear time on any text: a call that cannot be parsed becomes a `ToolCall` whose `error` is
shown to the model. The kind "parsers" of `agentfly.plugins` lists the names. `find_parser` chooses one by rendering known calls
through the chat template of the model, and raises ConfigError if none reads them back.
"""

from __future__ import annotations

from dataclasses import replace

from ... import plugins
from ...errors import ConfigError
from .detect import Signs, find_parser, fit_parser
from .reply import CallParser, ParsedReply, Parser, after_thinking, without_thinking
from .schema_types import type_arguments

__all__ = [
    "ParsedReply",
    "Parser",
    "Signs",
    "after_thinking",
    "detect_parser",
    "find_parser",
    "fit_parser",
    "get_parser",
    "type_arguments",
    "without_thinking",
]


def detect_parser(chat_template: str) -> str:
    """The name of the parser for the text of a chat template, or "derived". Raises ConfigError if its format is unknown."""
    detected = find_parser(chat_template)
    if not isinstance(detected, CallParser):
        return next(name for name in plugins.names("parsers") if plugins.resolve("parsers", name) is detected)
    for name in plugins.BUILTIN["parsers"]:
        parser = plugins.resolve("parsers", name)
        if parser == replace(detected, thinking=parser.thinking, opened=parser.opened, names=None, final=parser.final):
            return name
    return "derived"


def get_parser(parser: str | Parser) -> Parser:
    """The parser of a name; a function is returned unchanged."""
    if isinstance(parser, str):
        resolved: Parser = plugins.resolve("parsers", parser)
        return resolved
    if not callable(parser):
        raise ConfigError(f"a parser is a name or a function of the reply's text, not {type(parser).__name__}")
    return parser
