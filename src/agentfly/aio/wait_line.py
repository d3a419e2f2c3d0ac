"""A waiting line: a FIFO queue of waiters with deadlines, for one event loop.

The owner of a line decides who is served and with what; the line keeps order, deadlines and cancellation.

    join -> waiting -> assigned            `assign`: the waiter's future gets a value
                  \\--> refused             `refuse`, or the deadline passed
                   \\-> cancelled           the task that waits was cancelled

Cancellation has two races, both settled in `wait`:

- `task.cancel()` cancels the waiter's future at once, but the task runs a tick later. In between the waiter still counts as
  waiting, is skipped by `first` and iteration, and newcomers queue behind it. `wait` serves the line once more for them.
- A value may be assigned in the tick of the cancellation. The task never sees it, so `wait` hands it back to the owner.

Most waiters of a line have the same timeout, so their deadlines are in the order of the queue. For those the line has a single
entry in the heap, for the first of them; a waiter that is due before one in front of it gets a separate entry.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from .deadline import SLACK_S, Deadlines, deadlines_of

R = TypeVar("R")
T = TypeVar("T")


class Waiter(Generic[R, T]):
    """One place in a line. `request` is what the owner needs to know of it, `since` when it came.

    `in_heap` is True if it has a separate entry in the heap of deadlines.
    """

    __slots__ = ("_line", "deadline", "future", "in_heap", "request", "since", "wanted")

    def __init__(self, line: WaitLine[R, T], request: R, future: asyncio.Future[T], deadline: float) -> None:
        self._line = line
        self.request = request
        self.future = future
        self.deadline = deadline
        self.since = time.monotonic()
        self.in_heap = False
        self.wanted = True

    def expire(self) -> None:
        self._line.time_out(self)


class WaitLine(Generic[R, T]):
    """`serve` assigns what is free to waiters; the line calls it when a waiter has left.

    `hand_back` takes a value that was assigned to a waiter in the tick of its cancellation. `on_timeout` returns the error of a
    waiter whose deadline has passed, or None after it has set a later `waiter.deadline`.
    """

    def __init__(
        self,
        serve: Callable[[], None],
        hand_back: Callable[[T], None],
        on_timeout: Callable[[Waiter[R, T]], Exception | None],
    ) -> None:
        self._serve = serve
        self._hand_back = hand_back
        self._on_timeout = on_timeout
        self._queue: deque[Waiter[R, T]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deadlines: Deadlines
        self._latest = -math.inf
        """The latest deadline of the waiters without an entry in the heap."""
        self.wanted = False
        """Whether the line has an entry in the heap."""
        self.waiting = 0
        """Waiters that are neither served nor refused. Tasks that were cancelled and did not run since are included."""

    def join(self, request: R, deadline: float = math.inf, *, front: bool = False) -> Waiter[R, T]:
        """Queue up, at the end or at the front, until `deadline` (of `time.monotonic`). The caller then awaits `wait`."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._deadlines = loop, deadlines_of(loop)
            self._latest, self.wanted = -math.inf, False  # an entry in the heap of another loop is void
        waiter = Waiter(self, request, loop.create_future(), deadline)
        if front:
            self._queue.appendleft(waiter)
        else:
            self._queue.append(waiter)
        self.waiting += 1
        if front or deadline < self._latest:
            self._schedule(waiter)
        elif deadline < math.inf:
            self._latest = deadline
            if not self.wanted:
                self.wanted = True
                self._deadlines.add(deadline, self)
        return waiter

    async def wait(self, waiter: Waiter[R, T]) -> T:
        """Wait for the value that `assign` gives, or raise the error of `refuse` or of the timeout."""
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter.wanted:
                self._forget(waiter)
            elif not waiter.future.cancelled() and waiter.future.exception() is None:
                self._hand_back(waiter.future.result())
            self._serve()
            raise

    def first(self) -> Waiter[R, T] | None:
        """The waiter to serve next."""
        queue = self._queue
        while queue:
            waiter = queue[0]
            if waiter.wanted and not waiter.future.done():
                return waiter
            queue.popleft()
        return None

    def __iter__(self) -> Iterator[Waiter[R, T]]:
        """Those that wait, in order. During the iteration waiters may be assigned and refused; `first` may not be called."""
        self._trim()
        self.first()  # drops those that left from the front
        for waiter in self._queue:  # `_trim` replaces this queue and does not change it
            if waiter.wanted and not waiter.future.done():
                yield waiter

    def assign(self, waiter: Waiter[R, T], value: T) -> None:
        """Serve a waiter that `first` or iteration has returned."""
        if waiter.in_heap:
            self._deadlines.cancel(waiter)
        waiter.wanted = False
        self.waiting -= 1
        waiter.future.set_result(value)

    def refuse(self, waiter: Waiter[R, T], error: Exception) -> None:
        """End a wait with an error."""
        if waiter.wanted:
            self._forget(waiter)
        if not waiter.future.done():
            waiter.future.set_exception(error)
            waiter.future.exception()  # retrieved: the task may be cancelled before it sees the error, which is no bug

    def leave(self, waiter: Waiter[R, T]) -> None:
        """Give up a place that `wait` was not called for."""
        if waiter.wanted:
            self._forget(waiter)
            self._serve()

    def close(self, error: Callable[[], Exception]) -> None:
        """Refuse all that wait, each with an error that `error` makes."""
        for waiter in self:
            self.refuse(waiter, error())
        if self.wanted:
            self._deadlines.cancel(self)
        if self._loop is not None:
            self._deadlines.compact()  # the heap outlives the line and must not keep its owner alive

    def expire(self) -> None:
        """The entry of the line in the heap is due: time out the waiters that are, and wait for the next."""
        now = time.monotonic() + SLACK_S
        for waiter in list(self):  # `time_out` serves the line, which changes the queue
            if waiter.in_heap or not waiter.wanted:
                continue
            if waiter.deadline > now:
                self.wanted = True
                self._deadlines.add(waiter.deadline, self)
                return
            waiter.wanted = False
            self.time_out(waiter)
        self._latest = -math.inf

    def time_out(self, waiter: Waiter[R, T]) -> None:
        """The deadline of `waiter` has passed; `wanted` is False already."""
        self.waiting -= 1
        if waiter.future.done():
            return  # cancelled in this tick: `wait` does the rest
        error = self._on_timeout(waiter)
        if error is None:
            waiter.wanted = True
            self.waiting += 1
            self._schedule(waiter)
            return
        self.refuse(waiter, error)
        self._serve()

    def _schedule(self, waiter: Waiter[R, T]) -> None:
        if waiter.deadline < math.inf:
            waiter.in_heap = True
            self._deadlines.add(waiter.deadline, waiter)

    def _forget(self, waiter: Waiter[R, T]) -> None:
        if waiter.in_heap:
            self._deadlines.cancel(waiter)
        waiter.wanted = False
        self.waiting -= 1
        self._trim()

    def _trim(self) -> None:
        """Drop waiters that left from the middle of the queue; amortised over as many that leave."""
        if len(self._queue) > 64 + 2 * self.waiting:
            self._queue = deque(waiter for waiter in self._queue if waiter.wanted)
