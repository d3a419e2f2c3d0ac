"""One Jinja chat template, compiled once.

A template that refuses its input (`raise_exception`, or an error in it) raises `TemplateRefused`. Templates are untrusted code:
they run in Jinja's sandbox on plain data, with a fixed clock, so that a prompt does not change at midnight.

`literals` are the strings that the template searches for in contents ("</think>", "<tool_response>"); `words` are the strings
it compares whole values with (roles, tool names); `message_keys` are names of fields that may hold the thought of a reply.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import ConfigError

# For tokenizers without a template: `chat_template="chatml"`. `turn_end` is <|im_end|> where that is a token, else eos.
CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + turn_end + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# Methods that search a text for their argument.
_SEARCHES = {"startswith", "endswith", "split", "rsplit", "partition", "rpartition", "replace", "find", "index", "count"}


class TemplateRefused(Exception):
    """The template refuses the messages; the text is its reason."""


class _Generation(Extension):
    """Ignores `{% generation %}`, which marks replies for masks; here masks come from sampling."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(reason: str) -> str:
    raise TemplateRefused(reason)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment(now: datetime) -> ImmutableSandboxedEnvironment:
    # The settings of transformers, which templates are written for.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = now.strftime
    return environment


class ChatTemplate:
    """The compiled template and its fixed variables (special tokens, `enable_thinking`, `date_string`, ...)."""

    def __init__(self, source: str, variables: Mapping[str, Any], now: datetime | None = None) -> None:
        environment = _environment(now or datetime.now())
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"the chat template is not valid Jinja ({error}); give another one with chat_template="
            ) from error
        self.source = source
        self._variables = dict(variables)
        self.no_tools: list[Any] | None = None  # the value of `tools` if there are none; some templates need a list
        self.literals = tuple(sorted(set(_literals(tree))))
        self.words = frozenset(_words(tree))
        self.message_keys = frozenset(_thought_keys(tree))
        # All text that the template can write, to find the added tokens that it uses as marks.
        self.written = "\0".join(
            [node.data for node in tree.find_all(nodes.TemplateData)]
            + [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        )

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, generate: bool) -> str:
        """The text of a conversation; with `generate`, up to the beginning of the next reply. Raises TemplateRefused."""
        try:
            return self._template.render(
                messages=messages,
                tools=tools or self.no_tools,
                documents=None,
                add_generation_prompt=generate,
                **self._variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise TemplateRefused(f"{type(error).__name__}: {error}") from error


def _strings(node: nodes.Node) -> Iterator[str]:
    if isinstance(node, nodes.Const) and isinstance(node.value, str):
        yield node.value
    for const in node.find_all(nodes.Const):
        if isinstance(const.value, str):
            yield const.value


def _literals(tree: nodes.Template) -> Iterator[str]:
    """The strings that are searched for: `x in content`, `content.startswith(x)`, and constants in variables."""
    found: list[str] = []
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _SEARCHES:
            for argument in call.args:
                found += _strings(argument)
    for compare in tree.find_all(nodes.Compare):
        if any(operand.op in ("in", "notin") for operand in compare.ops):
            found += _strings(compare.expr)
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.node, nodes.Const):
            found += _strings(assign.node)
    # A bare word is a key or a role, and a long text is a default message; neither is a mark.
    return (text.strip() for text in found if len(text.strip()) >= 3 and len(text) <= 64 and not text.strip().isidentifier())


def _words(tree: nodes.Template) -> Iterator[str]:
    for compare in tree.find_all(nodes.Compare):
        yield from _strings(compare)


def _thought_keys(tree: nodes.Template) -> Iterator[str]:
    """The names of attributes and keys that may hold the thought of a reply."""
    names = [node.attr for node in tree.find_all(nodes.Getattr)]
    names += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str) and node.value.isidentifier()]
    return (name for name in names if any(part in name.lower() for part in ("reason", "think", "thought", "tool_plan")))


def sources(tokenizer: Any, chat_template: str | None) -> dict[str, str]:
    """The template texts by name, always with "default". Raises ConfigError."""
    if chat_template is None:
        own = getattr(tokenizer, "chat_template", None)
        if not own:
            raise ConfigError(
                f"the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template: "
                "give one, such as chat_template='chatml'"
            )
        if isinstance(own, str):
            return {"default": own}
        return {**own, "default": own.get("default") or next(iter(own.values()))}
    if chat_template == "chatml":
        return {"default": CHATML}
    if chat_template.endswith(".jinja"):
        path = Path(chat_template)
        if not path.is_file():
            raise ConfigError(f"chat_template: there is no file {chat_template!r}")
        return {"default": path.read_text(encoding="utf-8")}
    if "{" not in chat_template:
        raise ConfigError(
            f"chat_template: {chat_template!r} is neither 'chatml', nor a .jinja file, nor the text of a template"
        )
    return {"default": chat_template}
