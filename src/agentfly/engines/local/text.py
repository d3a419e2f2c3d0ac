"""Token by token to text, without ever showing half a character.

In: a decode function and one id at a time. Out: the text that became certain. A character whose bytes are spread over several
tokens is held back until it is whole; `flush` gives up the rest. Each push decodes a few ids only, however long the reply is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

MAX_HELD = 16  # a model that emits broken bytes without end must not make each push dearer than the last


class TextStream:
    """The text of a growing reply; `ended_by` looks for stop strings across the seams between tokens."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._keep = max((len(stop) for stop in self._stops), default=1) - 1
        self._ids: list[int] = []  # the last ids shown, for the spaces that depend on the left neighbour, then those held back
        self._num_shown = 0
        self._shown = ""
        self._tail = ""
        self.stopped = False

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith("\ufffd") and len(self._ids) - self._num_shown < MAX_HELD:
            return ""
        return self._show(text)

    def flush(self) -> str:
        """What is still held back, as it is."""
        return self._show(self._decode(self._ids)) if len(self._ids) > self._num_shown else ""

    def _show(self, text: str) -> str:
        new = text[len(self._shown) :]
        self._ids = self._ids[self._num_shown :]
        self._num_shown = len(self._ids)
        self._shown = self._decode(self._ids)
        if self._stops and new:
            seen = self._tail + new
            self.stopped = self.stopped or any(stop in seen for stop in self._stops)
            self._tail = seen[-self._keep :] if self._keep else ""
        return new
