"""A waiting line: a FIFO queue of waiters with deadlines, for one event loop.

The owner of a line decides who is served and with what; the line keeps order, deadlines and cancellation.

    join -> waiting -> assigned            `assign`: the waiter's future gets a value
                  \\--> refused             `refuse`, or the deadline passed
                   \\-> cancelled           the task that waits was cancelled

Cancellation has two races, both settled in `wait`:

- `task.cancel()` cancels the waiter's future at once, but the task runs a tick later. In between the waiter still counts as
  waiting, is skipped by `first` and iteration, and newcomers queue behind it. `wait` serves the line once more for them.
- A value may be assigned in the tick of the cancellation. The task never sees it, so `wait` hands it back to the owner.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from .deadlines import Deadlines, deadlines_of

R = TypeVar("R")
T = TypeVar("T")


class Waiter(Generic[R, T]):
    """One place in a line. `request` is what the owner needs to know of it, `since` when it came."""

    __slots__ = ("_line", "deadline", "future", "request", "since", "wanted")

    def __init__(self, line: WaitLine[R, T], request: R, future: asyncio.Future[T], deadline: float) -> None:
        self._line = line
        self.request = request
        self.future = future
        self.deadline = deadline
        self.since = time.monotonic()
        self.wanted = True

    def expire(self) -> None:
        self._line.expire(self)


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
        self.waiting = 0
        """Waiters that are neither served nor refused. Tasks that were cancelled and did not run since are included."""

    def join(self, request: R, deadline: float = math.inf, *, front: bool = False) -> Waiter[R, T]:
        """Queue up, at the end or at the front, until `deadline` (of `time.monotonic`). The caller then awaits `wait`."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._deadlines = loop, deadlines_of(loop)
        waiter = Waiter(self, request, loop.create_future(), deadline)
        if front:
            self._queue.appendleft(waiter)
        else:
            self._queue.append(waiter)
        self.waiting += 1
        if deadline < math.inf:
            self._deadlines.add(deadline, waiter)
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
        self.first()  # drops those that left from the front
        for waiter in self._queue:  # `_trim` replaces this queue and does not change it
            if waiter.wanted and not waiter.future.done():
                yield waiter

    def assign(self, waiter: Waiter[R, T], value: T) -> None:
        """Serve a waiter that `first` or iteration has returned."""
        self._forget(waiter)
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

    def close(self, error: Exception) -> None:
        """Refuse all that wait."""
        for waiter in self:
            self.refuse(waiter, error)
        if self._loop is not None:
            self._deadlines.compact()  # the heap outlives the line and must not keep its owner alive

    def expire(self, waiter: Waiter[R, T]) -> None:
        """The deadline of `waiter` has passed; called by `Deadlines`, which has set `wanted` to False."""
        self.waiting -= 1
        if waiter.future.done():
            return  # cancelled in this tick: `wait` does the rest
        error = self._on_timeout(waiter)
        if error is None:
            waiter.wanted = True
            self.waiting += 1
            self._deadlines.add(waiter.deadline, waiter)
            return
        self.refuse(waiter, error)
        self._trim()
        self._serve()

    def _forget(self, waiter: Waiter[R, T]) -> None:
        if waiter.deadline < math.inf:
            self._deadlines.cancel(waiter)
        waiter.wanted = False
        self.waiting -= 1
        self._trim()

    def _trim(self) -> None:
        """Drop waiters that left from the middle of the queue; amortised over as many that leave."""
        if len(self._queue) > 64 + 2 * self.waiting:
            self._queue = deque(waiter for waiter in self._queue if waiter.wanted)
