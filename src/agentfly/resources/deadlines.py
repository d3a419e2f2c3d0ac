"""Many deadlines in, one timer of the event loop: what has one is told when it passes.

One heap per owner, with a timer for the next deadline only. Most never come: one that is no longer wanted stays in the heap
until it is due, or until half of the heap is such. An item has `wanted` and `expire()`; whoever sets `wanted` to False calls
`drop_one`. A `Line` keeps its own items in the order of their deadlines, as a queue in which all wait equally long does; it is
only asked for its first one, so its items cost the heap nothing. Times are of `time.monotonic`.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from typing import Protocol


class Item(Protocol):
    wanted: bool

    def expire(self) -> None: ...


class Line(Protocol):
    def expire_until(self, now: float) -> float:
        """Tell those whose deadline has passed; the deadline of the first that is left, or infinity."""


class Deadlines:
    """The deadlines of one owner, on one loop."""

    __slots__ = ("_count", "_heap", "_loop", "_next", "_timer", "_unwanted", "lines")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._heap: list[tuple[float, int, Item]] = []
        self._next = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._count = 0
        self._unwanted = 0
        self.lines: list[Line] = []

    def wake_by(self, when: float) -> None:
        """A line has an item with this deadline."""
        if when < self._next:
            self._arm(when)

    def add(self, when: float, item: Item) -> None:
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, item))
        if when < self._next:
            self._arm(when)

    def drop_one(self) -> None:
        """One more entry is no longer wanted."""
        self._unwanted += 1
        if self._unwanted > 64 and self._unwanted * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].wanted]
            heapq.heapify(self._heap)
            self._unwanted = 0

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._heap, self._next, self.lines = [], math.inf, []

    def __len__(self) -> int:
        return len(self._heap)

    def _arm(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._next = when
        self._timer = self._loop.call_later(when - time.monotonic(), self._wake)

    def _wake(self) -> None:
        self._next, self._timer = math.inf, None
        now = time.monotonic() + 1e-3
        first = min((line.expire_until(now) for line in self.lines), default=math.inf)
        heap = self._heap
        while heap and (heap[0][0] <= now or not heap[0][2].wanted):
            item = heapq.heappop(heap)[2]
            if item.wanted:
                item.wanted = False
                item.expire()
            else:
                self._unwanted = max(0, self._unwanted - 1)
            heap = self._heap  # `expire` may have had it compacted
        if heap:
            first = min(first, heap[0][0])
        if first < self._next:
            self._arm(first)
