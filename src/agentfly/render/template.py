"""One Jinja chat template, compiled once.

A template that refuses its input (`raise_exception`, or an error in it) raises `TemplateRefused`. Templates are untrusted code:
they run in Jinja's sandbox on plain data, with a fixed clock, so that a prompt does not change at midnight, and with a budget.

`literals` are the strings that the template searches for in contents ("</think>", "<tool_response>"); `words` are the strings
it compares whole values with (roles, tool names); `message_keys` are names of fields that may hold the thought of a reply.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from ..errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# For tokenizers without a template: `chat_template="chatml"`. `turn_end` is <|im_end|> where that is a token, else eos.
CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + turn_end + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# Methods that search a text for their argument.
_SEARCHES = {"startswith", "endswith", "split", "rsplit", "partition", "rpartition", "replace", "find", "index", "count"}


MAX_STEPS = 200_000
MAX_CHARS = 10_000_000
"""What a rendering of nothing may spend; the messages add to it."""
MAX_WIDTH = 1_000_000
_WRITES = frozenset(("tojson", "string", "join", "pprint", "format", "format_map", "%", "xmlattr", "urlencode"))
_FORMATS = frozenset(("format", "format_map", "%"))
_COPIES = frozenset((
    "replace", "join", "translate", "wordwrap", "indent", "expandtabs", "urlize", "batch", "slice", "center", "ljust",
    "rjust", "zfill",
))  # fmt: skip
_COMPARES = frozenset((
    "sort", "unique", "groupby", "min", "max", "dictsort", "in", "eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan", "gt",
    ">", "greaterthan", "le", "<=", "ge", ">=",
))  # fmt: skip
"""Filters and tests that compare or hash values, however deep."""
_READ = 16  # characters or items that are read for each one that is written
_WIDTH = re.compile(r"(?:%[^%a-zA-Z]{0,20}|\{[^}]{0,200}?)(?:\d{7}|\*|\{)")
_FAILURES = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError,
)  # fmt: skip


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


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a budget for each rendering: loops and calls spend steps, texts that are made spend characters."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, now: datetime) -> None:
        # The settings of transformers, which templates are written for.
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=self._output)
        self.filters.update({name: self._bounded(name, made) for name, made in {**self.filters, "tojson": _tojson}.items()})
        tests: dict[str, Any] = self.tests
        tests.update({name: self._bounded(name, made) for name, made in tests.items() if name in _COMPARES})
        self.filters.update(read=self._read, counted=partial(_Counted, self), concatenated=self._concatenated)
        self.globals.update(raise_exception=_refuse, strftime_now=now.strftime)
        self.globals.pop("lipsum")
        self.begin(0)

    def begin(self, chars: int) -> None:
        """Starts a rendering of messages and tools with so many characters."""
        self.steps, self.chars = MAX_STEPS + 10 * chars, MAX_CHARS + 100 * chars

    def spend(self, chars: int = 0) -> None:
        self.steps -= 1
        self.chars -= chars
        if self.steps < 0 or self.chars < 0:
            raise TemplateRefused("the template loops or grows without end: its loops, calls or texts exceed their limit")

    def measure(self, value: object) -> None:
        """Spends the length of a value's text, before it is written: a list may hold another one many times over."""
        if type(value) is str:
            return self.spend(len(value))
        if isinstance(value, Mapping):
            for item in value.items():
                self.measure(item)
        elif isinstance(value, list | tuple):
            for item in value:
                self.measure(item)
        return self.spend(10)

    def admit(self, name: str, values: Sequence[Any], widths: Sequence[Any]) -> None:
        """Spends what a call may write: a copy of a text for each character or item of another one, or a width."""
        self.spend(sum(len(value) // (_READ if isinstance(value, str) else 1) for value in values if hasattr(value, "__len__")))
        if name in _COMPARES:
            for value in values:
                self._read(value)
        if any(type(value) is int and abs(value) > MAX_WIDTH for value in widths):
            raise TemplateRefused(f"the template asks for a width or a number above {MAX_WIDTH:,}")
        if name in _WRITES:
            self.measure(list(values))
        elif name not in _COPIES:
            return
        texts = [value for value in values if isinstance(value, str)]
        if name in _FORMATS and any(map(_WIDTH.search, texts)):
            raise TemplateRefused(f"the template asks for a width or a number above {MAX_WIDTH:,}")
        if name in _FORMATS and texts:
            parts = [part for value in values for part in _parts(value) if isinstance(part, str)]
            self.spend(max(text.count("{") + text.count("%") for text in texts) * max(map(len, parts)))
        if name == "replace" and len(texts) == 3:
            self.spend(texts[0].count(texts[1]) * len(texts[2]))
        elif name in _COPIES:
            items = [value for value in values if isinstance(value, list | tuple | Mapping)]
            lengths = sorted([*map(len, texts), *map(len, items), *(value for value in widths if isinstance(value, int))])
            inner = [
                len(text) for item in items if isinstance(item, Mapping) for text in item.values() if isinstance(text, str)
            ]
            self.spend(math.prod(max(1, size) for size in [*lengths[-2:], *sorted(inner)[-1:]]))

    def _read(self, value: object) -> Any:
        """Spends what a comparison or a hash may read: a list may hold another one many times over."""
        if isinstance(value, str):
            self.spend(len(value) // _READ)
        elif isinstance(value, range):
            self.spend(len(value))
        elif isinstance(value, list | tuple | Mapping):
            self.measure(value)
        return value

    def _made(self, value: object) -> Any:
        if isinstance(value, Iterator):
            return iter(_Counted(self, value, 0))
        self.spend(len(value) if isinstance(value, str | list | tuple) else 0)
        return value

    def _bounded(self, name: str, made: Callable[..., Any]) -> Callable[..., Any]:
        """A filter within the budget. It keeps the marks by which Jinja hands over its context."""

        @functools.wraps(made)
        def bounded(*args: object, **kwargs: object) -> Any:
            self.admit(name, [*args, *kwargs.values()], [*args[1:], *kwargs.values()])
            return self._made(made(*args, **kwargs))

        return bounded

    def _output(self, value: object) -> Any:
        self.measure(value)
        return value

    def _concatenated(self, parts: list[Any]) -> str:
        for part in parts:
            self.measure(part)
        return "".join(map(str, parts))

    def call(self, context: Any, function: object, *args: Any, **kwargs: Any) -> Any:
        if isinstance(function, LoopContext) and args:  # a recursive loop
            args = (_Counted(self, args[0], 0), *args[1:])
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)  # the sandbox wraps `str.format`
        given = [*args, *kwargs.values()]
        self.admit(getattr(function, "__name__", ""), [owner, *given], given if isinstance(owner, str) else [])
        return self._made(super().call(context, function, *args, **kwargs))

    def getitem(self, obj: object, argument: object) -> Any:
        return super().getitem(obj, self._read(argument))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":  # both operands are within the budget
            return self._made(left + right)
        self.admit(operator, [left, right], [])
        sizes = [len(one) if hasattr(one, "__len__") else int(abs(one)) for one in (left, right) if operator in ("*", "**")]
        if sizes and (math.prod(sizes) if operator == "*" else max(sizes) * 1000) > MAX_WIDTH:
            raise TemplateRefused(f"the template asks for a width or a number above {MAX_WIDTH:,}")
        return self._made(super().call_binop(context, operator, left, right))

    def compiled(self, source: str) -> jinja2.Template:
        """The template, with a count in every loop."""
        tree = self.parse(source)
        for loop in tree.find_all(nodes.For):
            chars = sum(len(text.data) for text in loop.find_all(nodes.TemplateData))
            loop.iter = nodes.Filter(loop.iter, "counted", [nodes.Const(chars)], [], None, None, lineno=loop.lineno)
        return self.from_string(_Joined().visit(tree))


class _Joined(NodeTransformer):
    """Makes `a ~ b` a filter, because Jinja does not hand it to `call_binop`, and counts what comparisons and keys read."""

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802 - Jinja's name
        self.generic_visit(node)
        node.expr = _read(node.expr)
        for operand in node.ops:
            operand.expr = _read(operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802 - Jinja's name
        self.generic_visit(node)
        return _read(node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:  # noqa: N802 - Jinja's name
        self.generic_visit(node)
        node.key = _read(node.key)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - Jinja's name
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "concatenated", [], [], None, None, lineno=node.lineno)


def _parts(value: object) -> Sequence[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list | tuple) else [value]


def _read(node: nodes.Expr) -> nodes.Expr:
    if isinstance(node, nodes.Const):
        return node
    return nodes.Filter(node, "read", [], [], None, None, lineno=node.lineno)


class _Counted:
    """The items of a loop with `chars` characters of text in its body."""

    def __init__(self, environment: _Environment, items: Any, chars: int) -> None:
        self.environment, self.items, self.chars = environment, items, chars

    def __iter__(self) -> Iterator[Any]:
        for item in self.items:
            self.environment.spend(self.chars)
            yield item

    def __len__(self) -> int:
        return len(self.items)


class ChatTemplate:
    """The compiled template and its fixed variables (special tokens, `enable_thinking`, `date_string`, ...)."""

    def __init__(self, source: str, variables: Mapping[str, Any], now: datetime | None = None) -> None:
        self._environment = environment = _Environment(now or datetime.now())
        try:
            tree = environment.parse(source)
            self._template = environment.compiled(source)
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
        contents = (message.get("content") for message in messages)
        chars = sum(len(content) for content in contents if isinstance(content, str))
        self._environment.begin(chars + 1000 * len(messages) + 10_000 * len(tools or ()))
        try:
            return self._template.render(
                messages=messages,
                tools=tools or self.no_tools,
                documents=None,
                add_generation_prompt=generate,
                **self._variables,
            )
        except _FAILURES as error:
            raise TemplateRefused(f"{type(error).__name__}: {error}") from error


def _strings(node: nodes.Node) -> Iterator[str]:
    if isinstance(node, nodes.Const) and isinstance(node.value, str):
        yield node.value
    for const in node.find_all(nodes.Const):
        if isinstance(const.value, str):
            yield const.value


def _literals(tree: nodes.Template) -> Iterator[str]:
    """The strings that are searched for: `x in content`, `content.startswith(x)`, and constants in variables."""
    strings: list[str] = []
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _SEARCHES:
            for argument in call.args:
                strings += _strings(argument)
    for compare in tree.find_all(nodes.Compare):
        if any(operand.op in ("in", "notin") for operand in compare.ops):
            strings += _strings(compare.expr)
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.node, nodes.Const):
            strings += _strings(assign.node)
    # A bare word is a key or a role, and a long text is a default message; neither is a mark.
    return (text.strip() for text in strings if len(text.strip()) >= 3 and len(text) <= 64 and not text.strip().isidentifier())


def _words(tree: nodes.Template) -> Iterator[str]:
    for compare in tree.find_all(nodes.Compare):
        yield from _strings(compare)


def _thought_keys(tree: nodes.Template) -> Iterator[str]:
    """The names of attributes and keys that may hold the thought of a reply."""
    names = [node.attr for node in tree.find_all(nodes.Getattr)]
    names += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str) and node.value.isidentifier()]
    return (name for name in names if any(part in name.lower() for part in ("reason", "think", "thought", "tool_plan")))


def sources(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> dict[str, str]:
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
