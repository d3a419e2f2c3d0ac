"""Chooses the parser of a chat template: the one that reads known calls back as the template writes them.

1. Known calls are rendered through the template (`ParserProbe`).
2. Each parser of the kind "parsers" reads them. The best that reads all required calls is taken.
3. If none does, a parser is derived from the marks that the template writes (`derive`), and must read them, too.
4. A template that writes no calls at all (the reply brings its own text) is recognised by what it says about tools.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ... import plugins
from ...errors import ConfigError
from ...types import Message
from .derive import derive, is_distinct
from .json_calls import JsonCalls
from .probe import PROBE_TOOLS, ParserProbe, Render
from .reply import CallParser, Pairs, Parser


class Signs(NamedTuple):
    """A chat template of this family contains one of `has` and none of `lacks`."""

    parser: str
    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()


# For templates that do not write calls. The first row that fits decides.
FAMILIES = (
    Signs("kimi", ("<|tool_call_argument_begin|>", "<|im_system|>tool_declare<|im_middle|>")),
    Signs("deepseek", ("<｜tool▁call▁begin｜>",)),
    Signs("mistral", ("[TOOL_CALLS]",)),
    Signs("pythonic", ("<|tool_call_start|>", "<|tool_list_start|>", "<|python_start|>", "List of tools: [", "func_name1(")),
    Signs("glm", ("<arg_key>",)),
    Signs("qwen3_coder", ("<parameter=",)),
    Signs("firefunction", ("functools[",)),
    Signs("hermes", ("<tool_call>",), lacks=("<invoke", "DSML", "<function=")),
    Signs("llama3_json", ("<|python_tag|>", '{"name": function name, "parameters":')),
)


def find_parser(renderer: object, names: Iterable[str] = ()) -> Parser:
    """The parser for the chat template that a renderer uses (or for the text of a template), set up as by `fit_parser`.

    Raises ConfigError if no parser reads what the template writes.
    """
    source, render = _access(renderer)
    return fit_parser(_choose(source, ParserProbe(render)), renderer, names)


def fit_parser(parser: Parser, renderer: object, names: Iterable[str] = ()) -> Parser:
    """A built-in parser with what is known here: the tools, and the marks of thinking and of prose found in the template."""
    if not isinstance(parser, CallParser):
        return parser
    parser = replace(parser, names=frozenset(names) or None)
    if not isinstance(renderer, str) and not hasattr(renderer, "dialect_for"):
        return parser
    marks = getattr(renderer, "marks", None)
    marked = ((opening.strip(), closing.strip()) for opening, closing in getattr(marks, "thinking", ()))
    thinking: Pairs = tuple(dict.fromkeys((*(pair for pair in marked if all(pair)), *parser.thinking)))
    around = (mark.strip() for pair in getattr(marks, "responses", ()) for mark in pair)
    drop = tuple(dict.fromkeys((*parser.drop, *(mark for mark in around if is_distinct(mark)))))
    stops = {text.strip() for text in getattr(renderer, "stop_texts", ())}
    pairs: Pairs = getattr(parser, "marks", ()) or ((getattr(parser, "opening", ""), getattr(parser, "closing", "")),)
    final = next((pair for pair in pairs if pair[1] in stops), ("", ""))
    probe = ParserProbe(_access(renderer)[1])
    left = probe.leaves(replace(parser, thinking=thinking, drop=drop))
    drop = (*drop, *(mark for mark in left if is_distinct(mark)))
    return replace(parser, thinking=thinking, drop=drop, opened=probe.opened(thinking), final=final)


def _choose(source: str, probe: ParserProbe) -> Parser:
    best: tuple[int, Parser | None] = 0, None
    if probe.shows_calls:
        for parser in _candidates():
            # A template never writes a call in a fence, so a parser that reads fences as well has no advantage.
            score = probe.score(replace(parser, fenced=False) if isinstance(parser, JsonCalls) else parser)
            if score > best[0]:
                best = score, parser
        derived = derive(probe.write)
        if derived is not None and best[1] is None and probe.score(derived):
            return derived
    if best[1] is not None:
        return best[1]
    if probe.drops_calls:
        for name in _families(source):
            resolved: Parser = plugins.resolve("parsers", name)
            return resolved
    raise ConfigError(_refusal(source, probe))


def _families(source: str) -> list[str]:
    """The parsers of the formats that a template speaks of."""
    return [
        row.parser
        for row in FAMILIES
        if any(sign in source for sign in row.has) and not any(sign in source for sign in row.lacks)
    ]


def _candidates() -> list[Parser]:
    """Every parser, the built-in ones in the order of their table."""
    order = [*plugins.BUILTIN["parsers"], *plugins.names("parsers")]
    parsers = dict.fromkeys(plugins.resolve("parsers", name) for name in dict.fromkeys(order))
    return list(parsers)


def _refusal(source: str, probe: ParserProbe) -> str:
    if "tools" not in source and "tool_calls" not in source:
        return "the model's chat template says nothing about tools: use ReactAgent, or give a parser by name or function"
    near = [name for name in plugins.names("parsers") if probe.reads_names(plugins.resolve("parsers", name))]
    if near:
        return (
            "the model's chat template does not write every argument of a tool call so that it can be read back. "
            f"parser={near[0]!r} reads the names of the calls and of their arguments: give it if the model writes such calls, "
            "or a function from the reply's text to a ParsedReply"
        )
    if families := _families(source):
        return (
            "the model's chat template does not write a tool call so that it can be read back, but speaks of the format of "
            f"parser={families[0]!r}: give it if the model writes such calls, or a function from the reply's text to a "
            "ParsedReply"
        )
    names = ", ".join(plugins.names("parsers"))
    return (
        "the tool calls of the model's chat template are in a format not known here: give parser= one of "
        f"{names}, or a function from the reply's text to a ParsedReply"
    )


def _access(renderer: Any) -> tuple[str, Render]:
    """The text of the template for prompts with tools, and a function that renders with it."""
    if isinstance(renderer, str):
        from ..template import ChatTemplate
        from ..template_dialect import Dialect

        template = ChatTemplate(renderer, {"bos_token": "", "eos_token": ""})
        dialect = Dialect(template, _NoTokens())  # type: ignore[arg-type]
    else:
        dialect = renderer.dialect_for(PROBE_TOOLS)
    return dialect.template.source, _rendering(dialect)


def _rendering(dialect: Any) -> Render:
    from ..template import TemplateRefused
    from ..template_tokens import CUT

    def render(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], generate: bool) -> str:
        try:
            text: str = dialect.render(messages, tools or None, generate, 0)
        except (TemplateRefused, RecursionError) as refused:
            raise ConfigError(f"the chat template refuses the probe: {refused}") from refused
        return text.replace(CUT, "")

    return render


class _NoTokens:
    """Stands in for a tokenizer: no text is a control token."""

    control: Mapping[str, int] = {}

    def guard(self, text: str) -> str:
        return text

    guard_reply = guard

    def guard_data(self, value: object) -> Any:
        return value
