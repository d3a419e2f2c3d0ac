"""Deadlines: `await within(coroutine, timeout_s)` returns its value or raises `Expired`; `TimeLimit` is a context with one.

`within` differs from `asyncio.timeout` in two ways. It drives the first step of the coroutine itself and sets a deadline only
if the coroutine suspends, so a call that never waits costs no timer. And it does not wait forever for a coroutine that
ignores its cancellation: after `GRACE_S` the coroutine is closed. Code that blocks the event loop cannot be stopped here; run
it in a thread (see `threads`).

All deadlines of an event loop are in one heap, under one timer. A timer of asyncio per deadline would be slower: asyncio
compares its timer handles in Python. Most deadlines never pass, so removal is lazy: a cancelled entry stays in the heap until
it is due, or until half of the heap is cancelled. Times are those of `time.monotonic`.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
import time
import types
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any, Protocol

from ..errors import contained

log = logging.getLogger(__name__)
GRACE_S = 2.0
"""How long a cancelled coroutine may take to clean up."""
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
    deadlines = _by_loop.get(loop)
    if deadlines is None:
        # Weak keys would never be collected: entries of the heap refer to tasks, and tasks to their loop.
        for closed in [each for each in list(_by_loop) if each.is_closed()]:
            _by_loop.pop(closed, None)
        deadlines = _by_loop[loop] = Deadlines(loop)
    return deadlines


class TimeLimit:
    """`async with TimeLimit(when) as limit:` cancels the body at `when`, by `time.monotonic`, and raises TimeoutError.

    The same as `asyncio.timeout_at`, for the many limits of chains: they are in the heap of the event loop.
    """

    __slots__ = ("_alarm", "_cancelling", "_deadlines", "_expired", "_task", "_when")
    _alarm: _LimitAlarm

    def __init__(self, when: float) -> None:
        self._when = when
        self._expired = False

    def when(self) -> float:
        return self._when

    def expired(self) -> bool:
        """Whether the body was cancelled because its time was over."""
        return self._expired

    def reschedule(self, when: float) -> None:
        """Set another time, inside the context."""
        self._when = when
        if self._alarm.wanted:
            self._deadlines.cancel(self._alarm)
            self._alarm = _LimitAlarm(self)
            self._deadlines.add(when, self._alarm)

    def expire(self) -> None:
        self._expired = True
        self._task.cancel()

    async def __aenter__(self) -> TimeLimit:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        if task is None:
            raise RuntimeError("a time limit must be entered in a task")
        self._task, self._cancelling = task, task.cancelling()
        self._deadlines = deadlines_of(loop)
        self._alarm = _LimitAlarm(self)
        self._deadlines.add(self._when, self._alarm)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self._alarm.wanted:
            self._deadlines.cancel(self._alarm)
        # A cancellation from outside stays a CancelledError.
        if self._expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error


class _LimitAlarm:
    """The entry of a `TimeLimit` in the heap; a new one for each time that is set."""

    __slots__ = ("_limit", "wanted")

    def __init__(self, limit: TimeLimit) -> None:
        self._limit = limit
        self.wanted = True

    def expire(self) -> None:
        self._limit.expire()


class Expired(Exception):
    """The deadline passed."""


class Alarm:
    """Cancels the current task at the deadline, and once more after the grace period; `rings` counts how often.

    Without a deadline (None), when `expire` is called.
    """

    __slots__ = ("_deadlines", "_task", "before", "rings", "wanted")

    def __init__(self, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        if task is None:
            raise RuntimeError("a coroutine with a deadline must be awaited in a task")
        self._deadlines = deadlines_of(loop)
        self._task = task
        self.before = task.cancelling()
        self.rings = 0
        self.wanted = timeout_s is not None
        if timeout_s is not None:
            self._deadlines.add(time.monotonic() + timeout_s, self)

    def expire(self) -> None:
        self.rings += 1
        self._task.cancel()
        if self.rings < 2:
            self.wanted = True
            self._deadlines.add(time.monotonic() + GRACE_S, self)

    def stop(self) -> bool:
        """Take back the cancellations of this alarm. Returns whether the task was cancelled from outside as well."""
        if self.wanted:
            self._deadlines.cancel(self)
        for _ in range(self.rings):
            self._task.uncancel()
        return self._task.cancelling() > self.before


@types.coroutine
def within(awaitable: Awaitable[Any], timeout_s: float | None, alarm: Alarm | None = None) -> Generator[Any, Any, Any]:
    """Await a coroutine, or any awaitable, for at most `timeout_s` seconds, or until `alarm` is rung.

    Raises `Expired` when the time is over, also if the coroutine swallows its cancellation and returns a value. A
    cancellation from outside stays a `CancelledError`, and wins if both come in the same tick of the loop. KeyboardInterrupt,
    SystemExit and the like out of the coroutine become a `ForeignExit`, because in a task they would end the event loop.
    """
    coroutine: Any = awaitable if hasattr(awaitable, "send") else _await(awaitable)
    try:
        waiting = coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    except BaseException as error:  # noqa: BLE001 - raised again, as an Exception
        raise _failure(error)  # noqa: B904 - `contained` sets the cause
    alarm = alarm or Alarm(timeout_s)
    closed = False
    try:
        while True:
            try:
                sent = yield waiting
            except GeneratorExit:
                closed = True
                coroutine.close()
                raise
            except BaseException as error:
                if alarm.rings >= 2:
                    _abandon(coroutine)
                    raise
                waiting = coroutine.throw(error)
            else:
                waiting = coroutine.send(sent)
    except StopIteration as stop:
        value = stop.value
    except BaseException as error:
        cancelled_outside = alarm.stop()
        if closed:
            raise
        if not alarm.rings or cancelled_outside:
            raise _failure(error)  # noqa: B904 - `contained` sets the cause
        raise Expired from error
    if alarm.stop() and alarm.rings:
        raise asyncio.CancelledError
    if alarm.rings:
        raise Expired
    return value


def _failure(error: BaseException) -> BaseException:
    return error if isinstance(error, asyncio.CancelledError) else contained(error)


async def _await(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _abandon(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Close a coroutine that ignored its cancellation."""
    outcome = "closed"
    try:
        coroutine.close()
    except BaseException as error:  # noqa: BLE001 - RuntimeError if it ignores GeneratorExit too, or any error of its clean-up
        outcome = f"left behind ({error})"
    log.warning("%s ignored its deadline and was %s", getattr(coroutine, "__qualname__", coroutine), outcome)
