"""A sampled reply as an Answer: its thinking, its text and its calls, read in the format of the model's chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..protocols import Renderer
from ..render.parsers import Parser, after_thinking, find_parser, get_parser, type_arguments
from ..render.parsers.reply import THINK, CallParser, Pairs
from ..types import Completion, Message, Sampling, ToolCall
from .calls import Answer, Call
from .wire import new_id

_MAX_KNOWN = 256


class Replies:
    """Reads the replies of one model. `parser` is "auto" (that of the chat template), a name, or a function of the text."""

    def __init__(self, renderer: Renderer | None, parser: str | Parser = "auto") -> None:
        self._renderer = renderer
        self._chosen: Parser | None = None if parser == "auto" else get_parser(parser)
        self._parsers: dict[tuple[str, ...], Parser] = {}
        marks = getattr(renderer, "marks", None)
        self.thinking: Pairs = tuple(getattr(marks, "thinking", ())) or THINK
        self._opened = bool(getattr(marks, "opened", False))

    def read(
        self,
        completion: Completion,
        tools: Sequence[Mapping[str, Any]],
        stops: Sequence[str],
        prompt_tokens: int,
        *,
        said: bool = False,
    ) -> Answer:
        """The answer to a call with these tools. A call that cannot be read stays text. `stops` end the text.

        `said`: its text has been told as it was sampled, so nothing of it is taken as thinking any more.
        Raises ConfigError if there are tools and the template's format of calls is unknown.
        """
        text = completion.text
        for stop in stops:
            text = text.partition(stop)[0]
        thought, shown = ("", text) if said else self._split(text, completion.stop == "length")
        calls: tuple[ToolCall, ...] = completion.tool_calls  # of a chat server
        if tools and not calls and shown:
            parsed = self.parser(tools)(text)
            if parsed.calls and not any(call.error for call in parsed.calls):
                shown, calls = parsed.content, parsed.calls
                if not parsed.typed:
                    schemas = {tool["function"]["name"]: tool for tool in tools}
                    calls = tuple(type_arguments(call, schemas.get(call.name, {})) for call in calls)
        calls = tuple(ToolCall(call.name, call.arguments, new_id("call")) for call in calls if call.error is None)
        return Answer(
            message=Message("assistant", shown, calls),
            finish="length" if completion.stop == "length" else "tool_calls" if calls else "stop",
            thinking=thought,
            prompt_tokens=prompt_tokens or completion.prompt_tokens,
            completion_tokens=completion.num_sampled,
        )

    def parser(self, tools: Sequence[Mapping[str, Any]]) -> Parser:
        """The parser of calls of these tools. Raises ConfigError."""
        names = tuple(str(tool["function"]["name"]) for tool in tools)
        found = self._parsers.get(names)
        if found is None:
            if self._chosen is None:
                self._chosen = find_parser(self._renderer)
            # What the choice found out about the template stays; only the names of the tools differ.
            found = replace(self._chosen, names=frozenset(names)) if isinstance(self._chosen, CallParser) else self._chosen
            if len(self._parsers) >= _MAX_KNOWN:
                self._parsers.clear()
            self._parsers[names] = found
        return found

    def with_thinking(self, call: Call) -> list[Message]:
        """The messages of a call, the thinking that the client sent back in its place."""
        (opening, closing), *_ = self.thinking
        messages = list(call.messages)
        for at, thought in call.thinking.items():
            content = f"{opening}\n{thought}\n{closing}\n\n{messages[at].content}"
            messages[at] = replace(messages[at], content=content)
        return messages

    def sayer(self, call: Call, sampling: Sampling) -> Sayer | None:
        """What tells the text of a reply as it is sampled; None if only the whole reply shows what of it is text."""
        if call.on_text is None or call.tools or sampling.stop or self._opened:
            return None
        return Sayer(call.on_text, tuple(opening for opening, _ in self.thinking))

    def _split(self, text: str, is_cut: bool) -> tuple[str, str]:
        """The thinking at the beginning of a reply, and what it says after it."""
        if self._opened and is_cut and not any(closing in text for _, closing in self.thinking):
            return text.strip(), ""
        at = after_thinking(text, self.thinking)
        if not at:
            return "", text
        thought = text[:at]
        for opening, closing in self.thinking:
            thought = thought.removeprefix(opening).removesuffix(closing)
        return thought.strip(), text[at:].lstrip("\n")


class Sayer:
    """Passes the pieces of a reply on, unless it begins with thinking: `begun` says that it does not."""

    def __init__(self, say: Callable[[str], None], openings: Sequence[str]) -> None:
        self.begun = False
        self._say, self._openings = say, openings
        self._held = ""

    def hear(self, piece: str) -> None:
        if self.begun:
            self._say(piece)
            return
        self._held += piece
        head = self._held.lstrip()
        if not any(opening.startswith(head) or head.startswith(opening) for opening in self._openings):
            self.begun = True
            self._say(self._held)
