"""ToolAgent: native function calling with the model's chat template.

The tools go into the chat template (or to the chat server) as schemas; results come back as messages of the role "tool". If
the template's call format is unknown, the run raises ConfigError before its first token.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from ..errors import ConfigError
from ..protocols import Engine
from ..render.parsers import ParsedReply, Parser, find_parser, fit_parser, get_parser, type_arguments
from ..types import Action, Completion, ToolCall
from .base import BaseAgent

_MAX_KNOWN, _MAX_LENGTH = 4096, 1024  # replies whose calls are kept, and characters of each
_SCALARS = frozenset((str, int, float, bool, type(None)))


class ToolAgent(BaseAgent):
    """The model calls tools the way it was trained to.

        agent = ToolAgent("Qwen/Qwen2.5-7B-Instruct", tools=[multiply], reward=exact)

    A reply such as `<tool_call>{"name": "multiply", "arguments": {"a": 12, "b": 7}}</tool_call>` makes the call; a reply
    without one is the answer, less its thinking. `parser` is "auto" (the one that reads what the chat template in use
    writes), a name (`agentfly.plugins.names("parsers")`), or a function from the reply's text to a `ParsedReply`.
    """

    observation_role: ClassVar[Literal["user", "tool"]] = "tool"
    native_tools: ClassVar[bool] = True

    def __init__(self, model: str | Path | Engine = "", *, parser: str | Parser = "auto", **options: Any) -> None:
        super().__init__(model, **options)
        self._chosen: Parser | None = None if parser == "auto" else get_parser(parser)
        self._parser: Parser | None = None
        self._recent: dict[str, tuple[ToolCall, ...]] = {}  # the calls of recent replies: sibling chains often call alike

    @property
    def parser(self) -> Parser:
        """The parser of replies. The first access opens the model and renders known calls through its chat template."""
        if self._parser is None:
            source = _source_of(self.renderer) if self.tools else None
            if self._chosen is not None or source is None:
                # A chat server parses the calls itself, and a renderer may have no template: use the most common format.
                self._parser = fit_parser(self._chosen or get_parser("hermes"), source, self.tools)
            else:
                self._parser = find_parser(source, self.tools)
        return self._parser

    def check_model(self) -> None:
        _ = self.parser  # raises if the template's call format is unknown

    def parse(self, completion: Completion) -> Action:
        if completion.tool_calls:
            return Action(calls=_with_ids(completion.tool_calls))
        text = completion.text
        if completion.stop == "length" and self._is_cut_in_thinking(text):
            return Action()
        cached = self._recent.get(text)
        if cached is not None:
            return Action(calls=tuple([ToolCall(call.name, call.arguments.copy(), call.id) for call in cached]))
        reply = self._read(text)
        if not reply.calls:
            return Action(answer=reply.content or None)
        calls = reply.calls
        if not reply.typed:
            schemas = {name: tool.schema for name, tool in self.tools.items()}
            calls = tuple(type_arguments(call, schemas.get(call.name, {})) for call in calls)
        calls = _with_ids(calls)
        if len(text) <= _MAX_LENGTH and self._chosen is None and all(map(_is_flat, calls)):
            self._remember(text, calls)
        return Action(calls=calls)

    def _remember(self, text: str, calls: tuple[ToolCall, ...]) -> None:
        if len(self._recent) >= _MAX_KNOWN:
            self._recent.clear()
        self._recent[text] = tuple([ToolCall(call.name, call.arguments.copy(), call.id) for call in calls])

    def _is_cut_in_thinking(self, text: str) -> bool:
        """Whether a reply that hit its length limit never left the thinking that the prompt may have opened.

        Some templates open the thinking in only some prompts. A call that such a thought quotes must not be executed.
        """
        marks = getattr(self.renderer, "marks", None)
        return marks is not None and marks.opened and not any(closing in text for _, closing in marks.thinking)

    def _read(self, text: str) -> ParsedReply:
        """Parse a reply. Built-in parsers never raise; an exception of a user's parser is a bug and stops the run."""
        try:
            reply = (self._parser or self.parser)(text)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            raise ConfigError(f"the parser raised {type(error).__name__} on a reply: {error}") from error
        if not isinstance(reply, ParsedReply):
            raise ConfigError(f"a parser returns a ParsedReply(content, calls), not {type(reply).__name__}")
        return reply


def _is_flat(call: ToolCall) -> bool:
    """Whether a copy of the arguments shares nothing that a tool could change."""
    return call.error is None and _SCALARS.issuperset(map(type, call.arguments.values()))


def _source_of(renderer: object) -> Any:
    """The renderer if it can render probes, else the text of its chat template for prompts with tools, else None."""
    if hasattr(renderer, "dialect_for"):
        return renderer
    template = getattr(renderer, "chat_template", None) or getattr(getattr(renderer, "tokenizer", None), "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("tool_use") or template.get("default")
    return template if isinstance(template, str) else None


def _with_ids(calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
    """Give every call an id, for templates that put it into the prompt (Mistral expects nine letters or digits).

    The id is derived from the call, so the same reply gives the same prompt in every run.
    """
    return tuple(
        [c if c.id else ToolCall(c.name, c.arguments, _id_of(index, c), c.error) for index, c in enumerate(calls)],
    )


def _id_of(index: int, call: ToolCall) -> str:
    text = f"{index} {call.name} {call.arguments!r}"
    return f"{zlib.crc32(text.encode('utf-8', 'replace')) % 10**9:09d}"
