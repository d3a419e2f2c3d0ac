"""One controller: whether a chain may start now, asked before it does.

Three budgets are looked at together: how many chains the environments can hold (`slots`), how many the engine can serve
(`engine_capacity`), and how far ahead of the weights a chain may be (`max_lag`: a chain of training step s starts only when
at least s - max_lag steps are done). Chains that may not start wait in line, first come first served, each with a deadline;
nothing piles up behind the environments. Pure asyncio; knows nothing of pools: `slots` is any function, such as `lambda:
manager.capacity(kinds)`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from ..errors import ConfigError, DeadlineError, InvariantError
from .deadlines import Deadlines

TIMEOUT_S = 3600.0


class _Waiter:
    __slots__ = ("admission", "future", "step", "wanted")

    def __init__(self, admission: Admission, step: int, future: asyncio.Future[None]) -> None:
        self.admission = admission
        self.step = step
        self.future = future
        self.wanted = True

    def expire(self) -> None:
        if not self.future.done():
            self.future.set_exception(DeadlineError(self.admission.explain(self.step)))
            self.future.exception()  # it may be cancelled before it looks


class Admission:
    """`done` is the number of training steps that are finished; `running` the chains admitted and not yet ended."""

    def __init__(
        self,
        slots: Callable[[], int | None] | None = None,
        engine_capacity: int | None = None,
        max_lag: int = 0,
        *,
        done: int = 0,
    ) -> None:
        if engine_capacity is not None and engine_capacity < 1:
            raise ConfigError(f"engine_capacity must be at least 1, not {engine_capacity}")
        if max_lag < 0:
            raise ConfigError(f"max_lag must be 0 or more, not {max_lag}")
        self.engine_capacity = engine_capacity
        self.max_lag = max_lag
        self.done = done
        self.running = 0
        self._slots = slots
        self._line: deque[_Waiter] = deque()
        self._deadlines: Deadlines | None = None

    @property
    def waiting(self) -> int:
        return sum(waiter.wanted and not waiter.future.done() for waiter in self._line)

    @property
    def limit(self) -> int | None:
        """How many chains may run now."""
        slots = self._slots() if self._slots is not None else None
        limits = [limit for limit in (slots, self.engine_capacity) if limit is not None]
        return min(limits) if limits else None

    def allows(self, step: int) -> bool:
        limit = self.limit
        return step - self.done <= self.max_lag and (limit is None or self.running < limit)

    async def admit(self, step: int = 0, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until a chain of training step `step` may start. Each admitted chain calls `leave` once."""
        if not self._line and self.allows(step):
            self.running += 1
            return
        loop = asyncio.get_running_loop()
        if self._deadlines is None:
            self._deadlines = Deadlines(loop)
        waiter = _Waiter(self, step, loop.create_future())
        self._line.append(waiter)
        self._deadlines.add(time.monotonic() + timeout_s, waiter)
        self.wake()
        try:
            await waiter.future
        except asyncio.CancelledError:
            if waiter.wanted:
                waiter.wanted = False
                self._deadlines.drop_one()
            elif not waiter.future.cancelled() and waiter.future.exception() is None:
                self.running -= 1  # admitted and cancelled in the same moment: the next one takes its place
            self.wake()
            raise
        except DeadlineError:
            self.wake()
            raise

    def leave(self) -> None:
        """A chain has ended."""
        if self.running < 1:
            raise InvariantError("more chains left than were admitted")
        self.running -= 1
        self.wake()

    def advance(self, done: int) -> None:
        """So many training steps are finished."""
        self.done = done
        self.wake()

    def wake(self) -> None:
        """Admit from the front of the line what may start. Call it when `slots` has risen."""
        line = self._line
        while line:
            waiter = line[0]
            if waiter.wanted and not waiter.future.done():
                if not self.allows(waiter.step):
                    return
                waiter.wanted = False
                if self._deadlines is not None:
                    self._deadlines.drop_one()
                self.running += 1
                waiter.future.set_result(None)
            line.popleft()

    @asynccontextmanager
    async def slot(self, step: int = 0, timeout_s: float = TIMEOUT_S) -> AsyncIterator[None]:
        """`async with admission.slot(step):` around a chain."""
        await self.admit(step, timeout_s)
        try:
            yield
        finally:
            self.leave()

    def explain(self, step: int) -> str:
        lag = (
            f"step {step} waits for step {step - self.max_lag} to be trained ({self.done} are)"
            if step - self.done > self.max_lag
            else ""
        )
        full = f"{self.running} chains run and {self.limit} may"
        return f"a chain was not admitted in time: {lag or full}; {self.waiting} more wait"

    def close(self) -> None:
        """Drop the timer; whoever waits is told."""
        for waiter in self._line:
            if waiter.wanted and not waiter.future.done():
                waiter.wanted = False
                waiter.future.set_exception(DeadlineError("the controller was closed"))
                waiter.future.exception()
        self._line.clear()
        if self._deadlines is not None:
            self._deadlines.close()
