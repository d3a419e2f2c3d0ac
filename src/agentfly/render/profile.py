"""Shapes: messages without their words, and conversations reduced to the turns that matter to a template.

The decisions of a template (strip thinking, move the tool list, the text between messages) depend on roles, marks and order,
not on words. A result for one shape therefore holds for all conversations of that shape. Placeholder messages are generated
from a shape; their words do not occur in real text:

    shape     (assistant, <think> "" </think> "", one call), tool
    message   <think>zqr1rqz</think>zqr3rqz + call zqn0nqz(x=zqa0aqz), then tool zqc0cqz

A history is the opening and the last occurrence of each kind of turn, in order. It preserves which kinds follow the last user
message, which templates test, and stays small in long conversations.

Shapes are named tuples, not dataclasses: they are cache keys of every turn, and tuples are hashed and compared several times as
fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from ..types import Message, Role, ToolCall
from .template_dialect import Dialect
from .template_reply import Skeleton, Skeletons, fill_skeleton


class Shape(NamedTuple):
    """One message without its words."""

    role: Role
    skeleton: Skeleton
    num_calls: int = 0


Unit = tuple[Shape, ...]  # a reply and what came back


class History(NamedTuple):
    """A conversation reduced to its opening and its kinds of turns."""

    opening: Unit = ()
    units: tuple[Unit, ...] = ()

    def then(self, unit: Unit) -> History:
        units = self.units
        if units and units[-1] == unit:
            return self
        return History(self.opening, (*[known for known in units if known != unit], unit))

    def messages(self, times: int = 1) -> list[Message]:
        """Placeholder messages of this history, with each kind of turn repeated `times`."""
        return placeholders([*self.opening, *(shape for unit in self.units for _ in range(times) for shape in unit)], "zqh")


def placeholders(shapes: Sequence[Shape], word: str) -> list[Message]:
    """Messages of these shapes. Results answer calls in order.

    Each message has a different word, because some templates find the last user message by comparing messages.
    """
    made: list[Message] = []
    ids: list[str] = []
    for n, shape in enumerate(shapes):
        content = fill_skeleton(shape.skeleton, lambda _, n=n: f"{word}{n}z")  # type: ignore[misc]
        if shape.role == "assistant":
            ids = [f"{word}{i:05d}q" for i in range(shape.num_calls)]
            made.append(Message("assistant", content, tuple(ToolCall("zqtool", {"x": "zqv"}, i) for i in ids)))
        elif shape.role == "tool" and ids:
            made.append(Message("tool", content, name="zqtool", tool_call_id=ids.pop(0) if len(ids) > 1 else ids[0]))
        else:
            made.append(Message(shape.role, content))
    return made


class Shaper:
    """Messages to shapes, for one template."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self.skeletons = Skeletons((*dialect.template.literals, *dialect.marks.in_replies))

    def of(self, messages: Sequence[Message]) -> list[Shape]:
        return [self.one(message) for message in messages]

    def one(self, message: Message) -> Shape:
        if message.role != "assistant":
            return Shape(message.role, self.skeletons.of(message.content))
        parts, structured = self._dialect.read(message)
        return Shape("assistant", self.skeletons.of(parts.head), len(message.tool_calls) if structured else 0)

    def unit(self, messages: Sequence[Message]) -> Unit:
        """The shapes of a reply and what came back."""
        return thinned(self.of(messages))

    def history(self, messages: Sequence[Message]) -> History:
        """All of a conversation, from its beginning."""
        replies = [i for i, message in enumerate(messages) if message.role == "assistant"]
        first = replies[0] if replies else len(messages)
        history = History(self.unit(messages[:first]))
        for start, end in pairwise([*replies, len(messages)]):
            history = history.then(self.unit(messages[start:end]))
        return history


def thinned(shapes: Sequence[Shape]) -> Unit:
    """At most two calls in a reply and two equal messages in a row: a template treats more of them alike."""
    if len(shapes) <= 3 and max([shape.num_calls for shape in shapes], default=0) <= 2:
        return tuple(shapes)
    unit: list[Shape] = []
    for shape in shapes:
        if shape.num_calls > 2:
            shape = Shape(shape.role, shape.skeleton, 2)
        if unit[-2:] != [shape, shape]:
            unit.append(shape)
    return tuple(unit)


class ReplyLink(NamedTuple):
    """How a new message refers to the reply: the call it answers (-1: none), and whether it has another id or name."""

    call: int = -1
    own_id: bool = False
    own_name: bool = False


class TurnShape(NamedTuple):
    """A reply and the messages after it, without their words: what an extension depends on."""

    reply: Shape
    new: Unit
    links: tuple[ReplyLink, ...]

    def reply_words(self) -> list[str]:
        """The words that locate the placeholder reply in rendered text, in order."""
        words = [_word("r", i) for i, piece in enumerate(self.reply.skeleton) if not piece]
        return words + [_word("a", i) for i in range(self.reply.num_calls)]

    def content_words(self) -> list[str]:
        return [_word("c", k) for k in range(len(self.new))]

    def make(self, values: Mapping[str, str]) -> list[Message]:
        """The placeholder reply and the new messages, with `values` in place of placeholders."""

        def value(word: str) -> str:
            return values.get(word, word)

        calls = tuple(
            ToolCall(value(_word("n", i)), {"x": _word("a", i)}, value(_id("d", i))) for i in range(self.reply.num_calls)
        )
        made = [Message("assistant", fill_skeleton(self.reply.skeleton, lambda i: _word("r", i)), calls)]
        for k, (shape, link) in enumerate(zip(self.new, self.links, strict=True)):
            word = _word("c", k)
            content = values[word] if word in values else fill_skeleton(shape.skeleton, lambda _, word=word: word)  # type: ignore[misc]
            identity = value(_id("e", k)) if link.own_id else value(_id("d", link.call)) if link.call >= 0 else None
            name = value(_word("m", k)) if link.own_name else None
            made.append(Message(shape.role, content, name=name, tool_call_id=identity))
        return made

    def values(self, reply: Message, new: Sequence[Message]) -> dict[str, str]:
        """The values of the placeholders in a real turn."""
        values: dict[str, str] = {}
        for i, call in enumerate(reply.tool_calls[: self.reply.num_calls]):
            values[_word("n", i)] = call.name
            values[_id("d", i)] = call.id or f"call_{i}"
        for k, (message, (_, own_id, own_name)) in enumerate(zip(new, self.links, strict=True)):
            values[_word("c", k)] = message.content
            if own_id:
                values[_id("e", k)] = message.tool_call_id or ""
            if own_name:
                values[_word("m", k)] = message.name or ""
        return values


def turn_shape(shaper: Shaper, reply: Message, new: Sequence[Message]) -> TurnShape:
    shape = shaper.one(reply)
    calls = reply.tool_calls[: shape.num_calls]
    links: list[ReplyLink] = []
    waiting = list(range(len(calls)))
    for message in new:
        place, wanted = -1, message.tool_call_id
        if calls and message.role == "tool":
            if wanted:
                for i, call in enumerate(calls):
                    if call.id == wanted:
                        place = i
                        break
            elif waiting:
                place = waiting[0]
            if place in waiting:
                waiting.remove(place)
        own_name = message.name is not None and (place < 0 or message.name != calls[place].name)
        links.append(ReplyLink(place, place < 0 and wanted is not None, own_name))
    return TurnShape(shape, tuple([shaper.one(message) for message in new]), tuple(links))


@lru_cache(maxsize=1024)
def _word(kind: str, i: int) -> str:
    return f"zq{kind}{i}{kind}qz"


@lru_cache(maxsize=1024)
def _id(kind: str, i: int) -> str:
    # Nine letters and digits, because some templates check this.
    return f"zq{kind}{i:05d}q"


def is_id(word: str) -> bool:
    return word.endswith("q")


def is_content(word: str) -> bool:
    return word.startswith("zqc")
