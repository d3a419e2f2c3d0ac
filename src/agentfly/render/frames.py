"""Frames: prompts that differ in one content, whose other text is rendered and tokenised once.

    before                          content    after
    ...<|im_start|>user\\n           42         <|im_end|>\\n<|im_start|>assistant\\n
    head    mark, text                         text, closing, tail

A tokenizer tokenises the text between two control tokens separately (`template_pieces`), so only `mark + text + content + text`
is tokenised for a new content. A content that holds a control token, or makes one with its neighbours, has no frame.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..types import Message
from .profile_glue import CHANGES, DIFFICULT
from .template import TemplateRefused
from .template_dialect import Dialect
from .template_pieces import TokenCache
from .template_reply import Skeletons
from .template_tokens import CUT, Codec

_CONTENT = "zqc0cqz"
_MAX_KNOWN = 256  # beginnings of prompts


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """What stands around a content, as ids."""

    around: tuple[str, str]  # the text between the mark and the content, and between the content and the closing mark
    change: Callable[[str], str]  # what the template does to a content
    mark: str
    closing: str
    head: list[int]
    tail: list[int]
    num_control: int  # in the ids between head and tail

    def ids(self, codec: Codec, content: str) -> list[int] | None:
        """The ids of the whole text; None if the content must be tokenised with all of the text around it."""
        before, after = self.around
        ids = codec.pieces.encode_between(self.mark, f"{before}{self.change(content)}{after}", self.closing)
        if ids is None or codec.num_control(ids) != self.num_control:
            return None
        return [*self.head, *ids, *self.tail]


def make_frame(codec: Codec, before: str, after: str, change: Callable[[str], str], stop: int | None = None) -> Frame | None:
    """The frame of these texts, which follow the token `stop` or begin a prompt; None if no control token stands between."""
    pieces = codec.pieces
    left, right = pieces.split(before if stop is None else codec.anchor(stop) + before), pieces.split(after)
    if CUT in before or CUT in after or len(left) < (3 if stop is None else 5) or len(right) < 3:
        return None
    mark, closing = left[-2], right[1]
    head, middle = pieces.encode("".join(left[:-2])), pieces.encode_between(mark, f"{left[-1]}a{right[0]}", closing)
    if middle is None or (stop is not None and head[:1] != [stop]):
        return None
    tail = pieces.encode("".join(right[1:]))
    return Frame((left[-1], right[0]), change, mark, closing, head[stop is not None :], tail, codec.num_control(middle))


class OpeningFrames:
    """The first prompts of tasks, which often differ in the last user message alone.

    A frame is made when a beginning is seen for the second time, and only if difficult contents come through the template in a
    known way, as in `profile_glue`.
    """

    def __init__(self, dialect: Dialect, codec: Codec, skeletons: Skeletons) -> None:
        self._dialect, self._codec, self._skeletons = dialect, codec, skeletons
        self._frames: OrderedDict[Any, tuple[Frame | None, Any]] = OrderedDict()
        self._seen: OrderedDict[Any, Any] = OrderedDict()

    def ids(self, messages: Sequence[Message], tools: object) -> list[int] | None:
        """The ids of the first prompt of a chain, or None if it has no frame. `tools` are guarded."""
        *first, last = messages
        if last.role != "user" or last.name or self._skeletons.of(last.content) != ("",):
            return None
        if any(message.role not in ("system", "user") for message in first):
            return None
        key = (tuple([(message.role, message.content, message.name) for message in first]), id(tools))
        cached = self._frames.get(key)
        if cached is None or cached[1] is not tools:
            cached = self._make(key, messages, tools)
        frame = None if cached is None else cached[0]
        return None if frame is None or CUT in last.content else frame.ids(self._codec, last.content)

    def _make(self, key: object, messages: Sequence[Message], tools: object) -> tuple[Frame | None, Any] | None:
        if self._seen.get(key, self) is not tools:
            _keep(self._seen, key, tools)
            return None
        try:
            entry = self._frame(messages, tools), tools
        except TemplateRefused:
            entry = None, tools
        _keep(self._frames, key, entry)
        return entry

    def _frame(self, messages: Sequence[Message], tools: Any) -> Frame | None:
        *first, last = messages

        def shown(content: str) -> str:
            return self._dialect.render([*first, replace(last, content=content)], tools, True, 0)

        before, separator, after = shown(_CONTENT).partition(_CONTENT)
        if not separator or _CONTENT in after:
            return None
        texts = [(content, shown(content)) for content in (*DIFFICULT, last.content)]
        for change in CHANGES:
            if all(text == f"{before}{change(content)}{after}" for content, text in texts):
                frame = make_frame(self._codec, before, after, change)
                same = frame is not None and frame.ids(self._codec, last.content) == self._codec.encode_start(texts[-1][1])
                return frame if same else None
        return None


class FramedTexts:
    """The ids of recent extensions by frame and content: sibling chains often get the same observation."""

    def __init__(self, codec: Codec, cache: TokenCache) -> None:
        self._codec, self._cache = codec, cache

    def ids(self, frame: Frame, content: str) -> list[int] | None:
        key = (frame, content)
        cached = self._cache.get(key)
        if cached is None:
            cached = frame.ids(self._codec, content)
            if cached is None:
                return None
            self._cache.put(key, content, cached)
        return cached.copy()


def _keep(known: OrderedDict[Any, Any], key: object, value: object) -> None:
    known[key] = value
    if len(known) > _MAX_KNOWN:
        known.popitem(last=False)
