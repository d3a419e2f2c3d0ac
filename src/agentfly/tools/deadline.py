"""A coroutine in, its value out, or `Expired` when it takes too long.

`within` drives the coroutine's first step by hand and arms a timer only if it really suspends, so a tool that never waits
pays for no timer. A coroutine that ignores its cancellation is given a short grace and then closed and left behind: nothing
waits for ever. Cancellation from outside is told apart from the deadline by the task's own count (`Task.cancelling`), as
`asyncio.timeout` does. It can stop only what gives way to the event loop: code that blocks belongs in a thread (see
`threads`).
"""

from __future__ import annotations

import asyncio
import logging
import types
from collections.abc import Coroutine, Generator
from typing import Any

log = logging.getLogger(__name__)
GRACE_S = 2.0
"""How long a cancelled coroutine may take to clean up."""


class Expired(Exception):
    """The deadline passed."""


class _Alarm:
    """Cancels the task at the deadline, and again after the grace; `rings` counts how often."""

    __slots__ = ("_handle", "_loop", "_task", "before", "rings")

    def __init__(self, timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a tool that waits must be called from a task")
        self._task = task
        self.before = task.cancelling()
        self.rings = 0
        self._handle = self._loop.call_later(timeout_s, self._ring)

    def _ring(self) -> None:
        self.rings += 1
        self._task.cancel()
        if self.rings < 2:
            self._handle = self._loop.call_later(GRACE_S, self._ring)

    def stop(self) -> bool:
        """Take back our own cancellations. Whether someone else has cancelled the task too."""
        self._handle.cancel()
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
