"""Incremental decoding: token ids in, text out, without ever emitting part of a character.

A character whose bytes span several tokens is held back until it is complete; `flush` emits the rest. Each push decodes a few
ids only, however long the reply is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

MAX_HELD = 16  # ids held back at most: otherwise an endless run of invalid bytes would make every push slower


class TextStream:
    """The text of a growing reply. `stopped` is true once a stop string has appeared, also across token boundaries."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._keep = max((len(stop) for stop in self._stops), default=1) - 1
        self._ids: list[int] = []  # the last ids shown (spaces depend on the left neighbour), then those held back
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
        """The text that is still held back, complete or not."""
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
