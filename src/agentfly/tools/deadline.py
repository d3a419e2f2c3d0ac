"""A coroutine in, its value out, or `Expired` when it takes too long.

`within` drives the coroutine's first step by hand and arms a timer only if it really suspends, so a tool that never waits
pays for no timer. A coroutine that ignores its cancellation is given a short grace and then closed and left behind: nothing
waits for ever. Cancellation from outside is told apart from the deadline by the task's own count (`Task.cancelling`), as
`asyncio.timeout` does. It can stop only what gives way to the event loop: code that blocks belongs in a thread (see
`threads`).
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
import types
import weakref
from collections.abc import Coroutine, Generator
from typing import Any

log = logging.getLogger(__name__)
GRACE_S = 2.0
"""How long a cancelled coroutine may take to clean up."""


class Expired(Exception):
    """The deadline passed."""


class _Deadlines:
    """The deadlines of one event loop in one heap, with a timer for the next of them only.

    A timer of asyncio's own for every call would be compared in Python with all the others. Most deadlines never come: one
    that is no longer wanted stays in the heap until it is due, or until half of the heap is such.
    """

    __slots__ = ("_count", "_heap", "_next", "_unwanted")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, _Alarm]] = []
        self._next = math.inf
        self._count = 0
        self._unwanted = 0

    def add(self, when: float, alarm: _Alarm) -> None:
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, alarm))
        if when < self._next:
            self._arm(when)  # an older timer for a later time is left to fire: it finds nothing due

    def drop_one(self) -> None:
        """One more entry is no longer wanted."""
        self._unwanted += 1
        if self._unwanted > 64 and self._unwanted * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].wanted]
            heapq.heapify(self._heap)
            self._unwanted = 0

    def _arm(self, when: float) -> None:
        self._next = when
        asyncio.get_running_loop().call_at(when, self._wake)

    def _wake(self) -> None:
        self._next = math.inf
        now = asyncio.get_running_loop().time() + 1e-3
        while self._heap and (self._heap[0][0] <= now or not self._heap[0][2].wanted):
            alarm = heapq.heappop(self._heap)[2]
            if alarm.wanted:
                alarm.ring()
            else:
                self._unwanted = max(0, self._unwanted - 1)
        if self._heap:
            self._arm(self._heap[0][0])


_deadlines: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Deadlines] = weakref.WeakKeyDictionary()


class _Alarm:
    """Cancels the task at the deadline, and again after the grace; `rings` counts how often."""

    __slots__ = ("_deadlines", "_task", "before", "rings", "wanted")

    def __init__(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        if task is None:
            raise RuntimeError("a tool that waits must be called from a task")
        deadlines = _deadlines.get(loop)
        if deadlines is None:
            deadlines = _deadlines[loop] = _Deadlines()
        self._deadlines = deadlines
        self._task = task
        self.before = task.cancelling()
        self.rings = 0
        self.wanted = True
        deadlines.add(loop.time() + timeout_s, self)

    def ring(self) -> None:
        self.rings += 1
        self._task.cancel()
        if self.rings < 2:
            self._deadlines.add(asyncio.get_running_loop().time() + GRACE_S, self)

    def stop(self) -> bool:
        """Take back our own cancellations. Whether someone else has cancelled the task too."""
        if self.rings < 2:
            self.wanted = False
            self._deadlines.drop_one()
        for _ in range(self.rings):
            self._task.uncancel()
        return self._task.cancelling() > self.before


@types.coroutine
def within(coroutine: Coroutine[Any, Any, Any], timeout_s: float) -> Generator[Any, Any, Any]:
    """Await `coroutine` for at most `timeout_s` seconds."""
    try:
        waiting = coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    alarm = _Alarm(timeout_s)
    try:
        while True:
            try:
                sent = yield waiting
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as error:
                if alarm.rings >= 2:
                    _leave(coroutine)
                    raise
                waiting = coroutine.throw(error)
            else:
                waiting = coroutine.send(sent)
    except StopIteration as stop:
        value = stop.value
    except BaseException as error:
        cancelled_outside = alarm.stop()
        if not alarm.rings or cancelled_outside:
            raise
        raise Expired from error
    if alarm.stop() and alarm.rings:
        raise asyncio.CancelledError
    if alarm.rings:
        raise Expired  # it swallowed our cancellation; what it returned came too late
    return value


def _leave(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Close a coroutine that would not be cancelled."""
    outcome = "closed"
    try:
        coroutine.close()
    except BaseException as error:  # noqa: BLE001 - it has had its chance; whatever it raises now is only worth a word
        outcome = f"left behind ({error})"
    log.warning("%s ignored its deadline and was %s", getattr(coroutine, "__qualname__", coroutine), outcome)
