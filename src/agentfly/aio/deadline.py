"""A timeout for one await: `await within(coroutine, timeout_s)` returns its value or raises `Expired`.

`within` differs from `asyncio.timeout` in two ways. It drives the first step of the coroutine itself and sets a deadline only
if the coroutine suspends, so a call that never waits costs no timer. And it does not wait forever for a coroutine that
ignores its cancellation: after `GRACE_S` the coroutine is closed. Code that blocks the event loop cannot be stopped here; run
it in a thread (see `threads`).
"""

from __future__ import annotations

import asyncio
import logging
import time
import types
from collections.abc import Coroutine, Generator
from typing import Any

from .deadlines import deadlines_of

log = logging.getLogger(__name__)
GRACE_S = 2.0
"""How long a cancelled coroutine may take to clean up."""


class Expired(Exception):
    """The deadline passed."""


class _Alarm:
    """Cancels the current task at the deadline, and once more after the grace period; `rings` counts how often."""

    __slots__ = ("_deadlines", "_task", "before", "rings", "wanted")

    def __init__(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        if task is None:
            raise RuntimeError("a coroutine with a deadline must be awaited in a task")
        self._deadlines = deadlines_of(loop)
        self._task = task
        self.before = task.cancelling()
        self.rings = 0
        self.wanted = True
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
def within(coroutine: Coroutine[Any, Any, Any], timeout_s: float) -> Generator[Any, Any, Any]:
    """Await `coroutine` for at most `timeout_s` seconds.

    Raises `Expired` when the time is over, also if the coroutine swallows its cancellation and returns a value. A
    cancellation from outside stays a `CancelledError`, and wins if both come in the same tick of the loop.
    """
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
                    _abandon(coroutine)
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
        raise Expired
    return value


def _abandon(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Close a coroutine that ignored its cancellation."""
    outcome = "closed"
    try:
        coroutine.close()
    except BaseException as error:  # noqa: BLE001 - RuntimeError if it ignores GeneratorExit too, or any error of its clean-up
        outcome = f"left behind ({error})"
    log.warning("%s ignored its deadline and was %s", getattr(coroutine, "__qualname__", coroutine), outcome)
