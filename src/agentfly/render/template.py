"""One Jinja chat template, compiled once.

In: messages and tools as plain dicts. Out: the text that the template makes of them. A template that refuses its input (its
own `raise_exception`, or an error inside it) is a `TemplateRefused` with the reason, never a traceback. Templates are
foreign code: they run in Jinja's sandbox, see plain data alone, and get one fixed clock, so that a prompt does not change
over midnight.

`literals` are the strings that the template looks for inside contents ("</think>", "<tool_response>"): where one of them
stands in a content, what the template does may depend on it. `words` are the strings it compares whole values with (roles,
tool names).
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

# What a template may do to a text: methods and filters whose arguments it searches for.
_SEARCHES = {"startswith", "endswith", "split", "rsplit", "partition", "rpartition", "replace", "find", "index", "count"}


class TemplateRefused(Exception):
    """The template does not take these messages; the text is its reason."""


class _Generation(Extension):
    """`{% generation %}` marks replies for masks made from templates. Ours are made where tokens are sampled: pass through."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(reason: str) -> str:
    raise TemplateRefused(reason)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment(now: datetime) -> ImmutableSandboxedEnvironment:
    # The settings that templates are written for: those of transformers.
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
        self.no_tools: list[Any] | None = None  # how "no tools" is said; some templates want a list all the same
        self.literals = tuple(sorted(set(_literals(tree))))
        self.words = frozenset(_words(tree))
        # Every piece of text the template can write, for finding which added tokens it uses as marks.
        self.written = "\0".join(
            [node.data for node in tree.find_all(nodes.TemplateData)]
            + [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        )

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, generate: bool) -> str:
        """The text of a conversation; with `generate`, up to where the next reply begins."""
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
    """Strings searched for: `x in content`, `content.startswith(x)`, and those first put in a variable."""
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
    # A bare word (a key, a role) is no mark, and neither is white space; a whole sentence is a default text.
    return (text.strip() for text in found if len(text.strip()) >= 3 and len(text) <= 64 and not text.strip().isidentifier())


def _words(tree: nodes.Template) -> Iterator[str]:
    for compare in tree.find_all(nodes.Compare):
        yield from _strings(compare)


def sources(tokenizer: Any, chat_template: str | None) -> dict[str, str]:
    """Template texts by name, "default" among them."""
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
