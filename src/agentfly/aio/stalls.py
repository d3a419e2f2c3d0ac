"""Names a call that holds up an event loop: `with stalls.watch(describe, subject): ...` costs less than a microsecond.
`await stalls.steps(describe, subject, work)` does the same for each part of an awaitable between two waits.

Every `LOOK_S` seconds a thread looks which calls still run, and logs a line at its first look, its second, its fourth, and so
on. It cannot stop them: a call that may block needs a thread with a deadline.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import types
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any, TypeVar

log = logging.getLogger(__name__)
LOOK_S = 5.0
T = TypeVar("T")


class _TimedCall:
    """One call. Nested calls of a thread are named by the outermost."""

    __slots__ = ("describe", "looks", "started", "subject", "watch")

    def __init__(self, watch: StallWatch, describe: Callable[[Any], str], subject: object) -> None:
        self.watch, self.describe, self.subject = watch, describe, subject
        self.started, self.looks = time.monotonic(), 0

    def __enter__(self) -> None:
        self.watch.calls.setdefault(threading.get_ident(), self)

    def __exit__(self, *error: object) -> None:
        if self.watch.calls.get(threading.get_ident()) is self:
            del self.watch.calls[threading.get_ident()]


class StallWatch:
    """The calls that run on event loops now, by thread."""

    def __init__(self) -> None:
        self.calls: dict[int, _TimedCall] = {}
        self.thread: threading.Thread | None = None

    def watch(self, describe: Callable[[Any], str], subject: object) -> _TimedCall:
        """Returns a context. `describe(subject)` names the call, if it has to be named."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._look, name="agentfly-stalls", daemon=True)
            self.thread.start()
        return _TimedCall(self, describe, subject)

    @types.coroutine
    def steps(self, describe: Callable[[Any], str], subject: object, work: Awaitable[T]) -> Generator[Any, Any, T]:
        """Awaits `work` and watches what it does between its waits, which no deadline can interrupt."""
        inner = _await(work)
        step = partial(inner.send, None)
        while True:
            try:
                with self.watch(describe, subject):
                    waited = step()
            except StopIteration as end:
                result: T = end.value
                return result
            try:
                step = partial(inner.send, (yield waited))
            except BaseException as error:  # noqa: BLE001  raised where `work` waits
                step = partial(inner.throw, error)

    def forget(self) -> None:
        """Start empty: the child of a fork has no thread that looks."""
        self.calls, self.thread = {}, None

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_S)
            for call in list(self.calls.values()):
                held_s = time.monotonic() - call.started
                call.looks += held_s >= LOOK_S
                if call.looks and call.looks & (call.looks - 1) == 0 and held_s >= LOOK_S:
                    log.warning(
                        "%s has held up the event loop for %.0f s, and with it all chains; make it a function that is not "
                        "async and runs in a thread (a reward: with a timeout_s or thread=True)",
                        call.describe(call.subject), held_s,
                    )  # fmt: skip


async def _await(work: Awaitable[T]) -> T:
    return await work


stalls = StallWatch()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=stalls.forget)
