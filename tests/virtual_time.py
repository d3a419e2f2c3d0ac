"""Time for tests of one thread that pretends to pass: an event loop with nothing to do goes to its next timer at once.

However busy the machine is, a wait of 0.3 s ends before one of 0.4 s, and no deadline passes while the loop has work to do. Not
for tests that wait for threads, processes or sockets: the time does not know of them.
"""

from __future__ import annotations

import asyncio
import math
import selectors
import threading
import time
from typing import Any

import pytest


class Clock:
    """Begins with the real time, which a default of a dataclass may still read; a whole number, so that sums are exact.

    Only its own thread passes time: one that another test has left behind, and that sleeps in a loop, would pass hours of it.
    """

    def __init__(self) -> None:
        self.now = float(math.ceil(time.monotonic()))
        self._owner, self._sleep = threading.get_ident(), time.sleep

    def read(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        if threading.get_ident() != self._owner:
            self._sleep(seconds)
            return
        self.now += seconds


class _Selector(selectors.DefaultSelector):
    """Never waits for a timer."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            return super().select(60)  # a thread may still call the loop
        ready = super().select(0)
        if not ready and timeout > 0:
            self._clock.sleep(timeout)
        return ready


@pytest.fixture
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all event loops that the test opens, of `time.sleep` and of the clocks of the package."""
    clock = Clock()
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, clock.read)
    for module in ("agentfly.rollout.activity", "agentfly.tools.calls"):
        monkeypatch.setattr(f"{module}.perf_counter", clock.read)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    # How long a loop of Python 3.12 or newer waits at its end for the threads of `to_thread`: the time does not know of them.
    monkeypatch.setattr(asyncio.constants, "THREAD_JOIN_TIMEOUT", None, raising=False)
    monkeypatch.setattr(asyncio.events, "new_event_loop", lambda: asyncio.SelectorEventLoop(_Selector(clock)))
    return clock
