"""One controller: whether a chain may start now, asked before it does.

Three budgets are looked at together: how many chains the environments can hold (`slots`), how many the engine can serve
(`engine_capacity`), and how far ahead of the weights a chain may be (`max_lag`: a chain of training step s starts only when
at least s - max_lag steps are done). Chains that may not start wait in line, first come first served; nothing piles up behind
the environments. The wait is as long as it has to be while others get on: it ends in an error only when for `timeout_s` no
chain was admitted, none ended and no step was trained, and the error says who holds what. Pure asyncio; knows nothing of
pools: `slots` is any function, such as `lambda: manager.capacity(kinds)`, and `holders` says in words who holds what.
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
"""Without any progress. Every chain has a deadline of its own, so one that is running always ends."""


class _Waiter:
    __slots__ = ("admission", "future", "since", "step", "timeout_s", "wanted")

    def __init__(self, admission: Admission, step: int, timeout_s: float, future: asyncio.Future[None]) -> None:
        self.admission = admission
        self.step = step
        self.timeout_s = timeout_s
        self.since = time.monotonic()
        self.future = future
        self.wanted = True

    def expire(self) -> None:
        if self.future.done():
            return
        due = max(self.since, self.admission.moved_at) + self.timeout_s
        if due > time.monotonic() + 1e-3:
            self.wanted = True  # others have got on meanwhile: a new deadline
            self.admission.wait_until(due, self)
        else:
            self.future.set_exception(DeadlineError(self.admission.explain(self.step, self.timeout_s)))
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
        holders: Callable[[], str] | None = None,
    ) -> None:
        if engine_capacity is not None and engine_capacity < 1:
            raise ConfigError(f"engine_capacity must be at least 1, not {engine_capacity}")
        if max_lag < 0:
            raise ConfigError(f"max_lag must be 0 or more, not {max_lag}")
        self.engine_capacity = engine_capacity
        self.max_lag = max_lag
        self.done = done
        self.running = 0
        self.moved_at = time.monotonic()
        self._slots = slots
        self._holders = holders
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
            self._enter()
            return
        loop = asyncio.get_running_loop()
        if self._deadlines is None:
            self._deadlines = Deadlines(loop)
        waiter = _Waiter(self, step, timeout_s, loop.create_future())
        self._line.append(waiter)
        self.wait_until(waiter.since + timeout_s, waiter)
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
        self.moved_at = time.monotonic()
        self.wake()

    def advance(self, done: int) -> None:
        """So many training steps are finished."""
        self.done = done
        self.moved_at = time.monotonic()
        self.wake()

    def wait_until(self, when: float, waiter: _Waiter) -> None:
        assert self._deadlines is not None
        self._deadlines.add(when, waiter)

    def _enter(self) -> None:
        self.running += 1
        self.moved_at = time.monotonic()

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
                self._enter()
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

    def explain(self, step: int, timeout_s: float) -> str:
        if step - self.done > self.max_lag:
            why = f"step {step} waits for step {step - self.max_lag} to be trained ({self.done} are)"
        else:
            why = f"{self.running} chains run and {self.limit} may"
        holders = f" ({self._holders()})" if self._holders is not None else ""
        return (
            f"no chain was admitted or ended and no step was trained for {timeout_s:g} s: {why}{holders}; {self.waiting} more "
            f"wait"
        )

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
