"""New prompts of chains whose template rewrites history, at a cost that does not grow with the conversation.

A new prompt mostly begins with the text of the chain's last one. The text up to the end of an old message (the anchor) is kept
if placeholder conversations of the same shape show that the template does not change it. Only the messages after the anchor
are rendered, behind placeholders for the history, and only ids after the last control token of the kept text are made anew:

    last prompt   ...user: A<end>assistant: B<end>user: [anchor]<end>assistant:
    rendered      user: zqh0<end>assistant: zqh1<end>user: zqx0z<end>assistant: C<end>user: D<end>assistant:
    new prompt    ...user: A<end>assistant: B<end>user: [anchor] + <end>assistant: C<end>user: D<end>assistant:

Templates that count messages, and anchors with marks in them, are rendered in full.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..types import Message
from .profile import History, Shaper, placeholders
from .template import TemplateRefused
from .template_dialect import Dialect
from .template_tokens import Codec

_WORD = "zqx0z"
_MAX_KNOWN = 1024
_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class _Anchor:
    """The last message of a prompt: the text and the number of messages up to it, and the shapes of these messages.

    The content of the message ends at `end` (-1: not known).
    """

    text: str
    num_messages: int
    history: History
    end: int


@dataclass(slots=True)
class RestartedPrompt:
    """The last prompt that was rendered for a chain: its ids, where tokenisation may be resumed, and its anchors.

    The chain's next prompt takes over the lists and changes them, which saves a copy of all ids.
    """

    ids: list[int]
    places: list[int]  # in the text, after control tokens
    counts: list[int]  # the number of ids up to each place
    anchors: tuple[_Anchor, ...]
    manner: int
    tools: Any

    @property
    def text(self) -> str:
        return self.anchors[0].text


@dataclass(frozen=True, slots=True)
class _Window:
    """Whether the text up to an anchor is kept, the placeholders up to the anchor, and the text after the last word."""

    kept: bool
    before: tuple[Message, ...] = ()
    tail: str | None = None


class Restarter:
    """Renders new prompts with one template."""

    def __init__(self, dialect: Dialect, codec: Codec, shaper: Shaper) -> None:
        self._dialect, self._codec, self._shaper = dialect, codec, shaper
        self._windows: OrderedDict[Any, _Window] = OrderedDict()
        self._compares: bool | None = None

    def prompt(
        self, last: RestartedPrompt | None, messages: Sequence[Message], history: History, tools: Any, manner: int, counts: bool
    ) -> RestartedPrompt:
        """The whole prompt. `last` is the chain's last one, `history` the shape of all messages. Raises TemplateRefused."""
        text = tail = None
        if last is not None and last.manner == manner and last.tools is tools and not counts:
            for anchor in last.anchors:
                is_prefix = anchor.end >= 0 and (anchor is last.anchors[0] or last.text.startswith(anchor.text[: anchor.end]))
                text, tail = self._from_anchor(last, anchor, messages, tools, manner) if is_prefix else (None, None)
                if text is not None:
                    break
        if text is None:
            text = self._dialect.render_somehow(messages, tools, manner)
            tail = None if counts else self._tail(history, tools, manner)
        end = len(text) - len(tail) if tail is not None and text.endswith(tail) and self._is_plain(messages[-1]) else -1
        anchor = _Anchor(text, len(messages), history, end)
        if last is None:
            ids = self._codec.encode_start(text)
            return RestartedPrompt(ids, *self._codec.cuts(text, ids, 0, 0), (anchor,), manner, tools)
        self._encode(text, last)
        return RestartedPrompt(last.ids, last.places, last.counts, (anchor, last.anchors[0]), manner, tools)

    def _from_anchor(
        self, last: RestartedPrompt, anchor: _Anchor, messages: Sequence[Message], tools: Any, manner: int
    ) -> tuple[str | None, str | None]:
        if self._compares is None:
            self._compares = self._asks_equality()
        new = messages[anchor.num_messages :]
        if self._compares:
            return None, None
        shapes = tuple(self._shaper.of(new))
        shown = last.anchors[0].num_messages - anchor.num_messages
        key = (anchor.history, shapes, shown, manner, id(tools))
        window = self._windows.get(key)
        if window is None:
            window = self._window(anchor.history, shapes, shown, tools, manner)
            self._windows[key] = window
            if len(self._windows) > _MAX_KNOWN:
                self._windows.popitem(last=False)
        if not window.kept:
            return None, None
        text = self._dialect.render([*window.before, *new], tools, True, manner)
        return anchor.text[: anchor.end] + text[text.index(_WORD) + len(_WORD) :], window.tail

    def _window(self, history: History, shapes: tuple[Any, ...], shown: int, tools: Any, manner: int) -> _Window:
        """Compares renderings of placeholders: the last prompt with the new one, and the new one behind a longer history."""
        before, longer = (self._with_anchor(history, times) for times in (1, 2))
        new = placeholders(shapes, "zqy")
        try:
            old = self._dialect.render([*before, *new[:shown]], tools, True, manner)
            text = self._dialect.render([*before, *new], tools, True, manner)
            far = self._dialect.render([*longer, *new], tools, True, manner)
        except TemplateRefused:
            return _Window(False)
        heads, rests = zip(*((part[0], part[2]) for part in (one.partition(_WORD) for one in (old, text, far))), strict=True)
        unchanged = heads[0] == heads[1] and rests[1] == rests[2] and all(one.count(_WORD) == 1 for one in (old, text, far))
        return _Window(unchanged, tuple(before), _after_last(text, new))

    def _tail(self, history: History, tools: Any, manner: int) -> str | None:
        """The text after the content of the last message, which is the same for every content."""
        before = self._with_anchor(history, 1)
        try:
            return _after_last(self._dialect.render(before, tools, True, manner), before)
        except TemplateRefused:
            return None

    def _with_anchor(self, history: History, times: int) -> list[Message]:
        made = history.messages(times)
        return [*made[:-1], replace(made[-1], content=_WORD)]

    def _is_plain(self, message: Message) -> bool:
        [shape] = self._shaper.of([message])
        return message.role != "assistant" and shape.skeleton == ("",)

    def _asks_equality(self) -> bool:
        """Whether the template compares messages with each other: then every content matters."""
        user, reply = Message("user", "zqsame"), Message("assistant", "zqreply")
        other = replace(user, content="zqother")
        try:
            same, different = (
                self._dialect.render([user, reply, next_one, reply, last], None, True, 0)
                for next_one, last in ((user, user), (user, other))
            )
        except TemplateRefused:
            return True
        return same != different.replace("zqother", "zqsame")

    def _encode(self, text: str, last: RestartedPrompt) -> None:
        """Changes the ids of the last prompt to those of a text, from the last control token that both texts share."""
        at = bisect_right(last.places, common_length(text, last.text)) - 1
        if at < 0:
            ids = self._codec.encode_start(text)
            place = count = 0
        else:
            place, count = last.places[at], last.counts[at]
            ids = self._codec.encode(text[place:], last.ids[count - 1])
        places, counts = self._codec.cuts(text, ids, place, count)
        last.ids[count:] = ids
        last.places[at + 1 :] = places
        last.counts[at + 1 :] = counts


def _after_last(text: str, messages: Sequence[Message]) -> str | None:
    content = messages[-1].content
    return text.rpartition(content)[2] if content and text.count(content) == 1 else None


def common_length(first: str, second: str) -> int:
    """The length of the common beginning of two texts."""
    size = min(len(first), len(second))
    at = 0
    while at < size and first[at : at + _BLOCK] == second[at : at + _BLOCK]:
        at += _BLOCK
    end = min(at + _BLOCK, size)
    while at < end:
        middle = (at + end + 1) // 2
        if first[at:middle] == second[at:middle]:
            at = middle
        else:
            end = middle - 1
    return min(at, size)
