"""The deadlines of one event loop, in one heap and under one timer.

A timer of asyncio per deadline would be slower: asyncio compares its timer handles in Python. Most deadlines never pass, so
removal is lazy: a cancelled entry stays in the heap until it is due, or until half of the heap is cancelled. Times are those
of `time.monotonic`.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from typing import Protocol

SLACK_S = 1e-3
"""A timer may fire this much early: event loops round."""


class Expiring(Protocol):
    """Something with a deadline. `wanted` is True while the deadline counts."""

    wanted: bool

    def expire(self) -> None:
        """The deadline has passed. `wanted` is False when this is called."""


class Deadlines:
    """The heap of one event loop; see `deadlines_of`."""

    __slots__ = ("_cancelled", "_count", "_heap", "_loop", "_next", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._heap: list[tuple[float, int, Expiring]] = []
        self._next = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._count = 0
        self._cancelled = 0

    def add(self, when: float, item: Expiring) -> None:
        self._count += 1  # breaks ties: items are not comparable
        heapq.heappush(self._heap, (when, self._count, item))
        if when < self._next:
            self._arm(when)

    def cancel(self, item: Expiring) -> None:
        """Cancel the deadline of an item that was added and is still wanted."""
        item.wanted = False
        self._cancelled += 1
        if self._cancelled > 64 and self._cancelled * 2 > len(self._heap):
            self.compact()

    def compact(self) -> None:
        """Remove cancelled entries, and with them the last reference to their owners."""
        self._heap = [entry for entry in self._heap if entry[2].wanted]
        heapq.heapify(self._heap)
        self._cancelled = 0

    def __len__(self) -> int:
        return len(self._heap)

    def _arm(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._next = when
        self._timer = self._loop.call_later(when - time.monotonic(), self._wake)

    def _wake(self) -> None:
        self._next, self._timer = math.inf, None
        now = time.monotonic() + SLACK_S
        # `expire` may add, cancel and compact, so `self._heap` is read anew in each round.
        while self._heap and (self._heap[0][0] <= now or not self._heap[0][2].wanted):
            item = heapq.heappop(self._heap)[2]
            if item.wanted:
                item.wanted = False
                item.expire()
            else:
                self._cancelled = max(0, self._cancelled - 1)
        if self._heap and self._heap[0][0] < self._next:
            self._arm(self._heap[0][0])


_by_loop: dict[asyncio.AbstractEventLoop, Deadlines] = {}


def deadlines_of(loop: asyncio.AbstractEventLoop) -> Deadlines:
    """The heap of `loop`, made on first use."""
    found = _by_loop.get(loop)
    if found is None:
        # Weak keys would never be collected: entries of the heap refer to tasks, and tasks to their loop.
        for closed in [each for each in list(_by_loop) if each.is_closed()]:
            _by_loop.pop(closed, None)
        found = _by_loop[loop] = Deadlines(loop)
    return found
