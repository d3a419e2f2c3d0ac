"""Writes the reply of a demonstration as the policy would have sampled it: its thought, words and calls in the template's form.

What is written is what follows the prompt. A prompt that opens a thought needs a reply that closes it, also an empty one:

    prompt    ...<|im_start|>assistant\\n<think>\\n
    reply     \\n</think>\\n\\nIt is 84.<|im_end|>
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import ConfigError
from ..types import Message, ToolCall
from .parsers.reply import THINK, Parser
from .parsers.schema_types import type_arguments
from .template_dialect import Dialect, squeeze
from .template_tokens import CUT

Tools = Sequence[Mapping[str, Any]]
_EMPTY = "zqthought"


def reply_text(dialect: Dialect, stops: Iterable[str], before: Sequence[Message], reply: Message, tools: Tools) -> str:
    """The text of a reply, without its end of turn. Raises ConfigError if the template does not show it; TemplateRefused."""
    marks, content = dialect.marks, reply.content
    pairs = marks.thinking or THINK
    thought, said = _split(content, (*pairs, *THINK))
    opening, closing = pairs[0]

    def render(messages: Sequence[Message], generate: bool) -> str:
        return dialect.render(messages, tools or None, generate, 0).replace(CUT, "")

    prompt = render(before, True)
    opened, closed = prompt.rstrip().endswith(opening), prompt.rstrip().endswith(closing)
    if thought and closed:
        raise ConfigError("the prompt closes the thought before the reply: remove the thought, or change template_args")
    formed = not marks.thinking or (thought is None and any(closing in content for _, closing in pairs))
    if formed and not (reply.tool_calls or marks.responses):
        return content  # the template has no other form for it, or the reply has the form already

    def show(thought: str | None) -> str:
        head = "" if thought is None else f"{opening}\n{thought}\n{closing}\n\n"
        return render([*before, replace(reply, content=head + said)], False)

    text = _after(prompt, show(thought), opening, closing, dialect.finder.units.common)
    if closed and text.startswith(closing):  # the template writes no opening in its history, and the prompt has both
        text = text[len(closing) :]
    if opened and thought is None and closing not in text:
        empty = show(_EMPTY)
        if empty.startswith(prompt) and empty.count(_EMPTY) == 1:
            text = empty[len(prompt) :].replace(_EMPTY, "")
    if thought and not opened and (empty_thought := _empty_thought(text, opening, closing)):
        head, space, rest = empty_thought
        text = f"{head}{space}{thought}{space}{rest}"
    if (opened and closing not in text) or (thought and squeeze(thought) not in squeeze(text)):
        space = prompt[len(prompt.rstrip()) :] if opened else "\n"
        text = f"{'' if opened else opening + space}{thought or ''}{space}{closing}{2 * space}{text.lstrip()}"
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text.rstrip()


def _split(content: str, pairs: Iterable[tuple[str, str]]) -> tuple[str | None, str]:
    """The thought that a reply begins with, None if there is none, and the text after it."""
    for opening, closing in pairs:
        thought, separator, said = content.lstrip().removeprefix(opening).partition(closing)
        if separator and content.lstrip().startswith(opening):
            return thought.strip("\n"), said.lstrip("\n")
    return None, content


def _empty_thought(text: str, opening: str, closing: str) -> tuple[str, str, str] | None:
    """The text before an empty thought, half of the space in it, and the text after; None if it begins with none."""
    head, separator, rest = text.partition(opening)
    space, ends, said = rest.partition(closing)
    if head.strip() or space.strip() or not (separator and ends):
        return None
    return head + opening, space[: len(space) // 2], closing + said


def _after(prompt: str, shown: str, opening: str, closing: str, common: Callable[[str, str], str]) -> str:
    """What the template shows after the prompt; the prompt may end with marks of a thought that it does not repeat."""
    if shown.startswith(prompt):
        return shown[len(prompt) :]
    shared = common(prompt, shown)
    if (rest := prompt[len(shared) :].strip()) and not rest.endswith((opening, closing)):
        raise ConfigError("the chat template does not show a reply where it asks for one: give the reply as plain text")
    return shown[len(shared) :]


def reads_back(parser: Parser, text: str, reply: Message, tools: Tools) -> bool:
    """Whether the parser reads the calls of the reply in the text, and the words beside them are there, too."""
    parsed = parser(text)
    schemas = {str(tool.get("function", tool).get("name")): tool for tool in tools}
    calls = parsed.calls if parsed.typed else tuple(type_arguments(call, schemas.get(call.name, {})) for call in parsed.calls)
    _, said = _split(reply.content, THINK)
    return same_calls(calls, reply.tool_calls) and squeeze(said) in squeeze(text)


def same_calls(found: Sequence[ToolCall], wanted: Sequence[ToolCall]) -> bool:
    """Whether calls have the same names and arguments. A text and a value that is written so count as equal."""
    return len(found) == len(wanted) and all(
        one.error is None and one.name == other.name and _plain(one.arguments) == _plain(other.arguments)
        for one, other in zip(found, wanted, strict=True)
    )


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value.strip() if isinstance(value, str) else json.dumps(value, default=str)
