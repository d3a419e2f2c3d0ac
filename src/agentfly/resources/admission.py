"""Admission: whether a chain may start now.

Three limits count together: how many chains the environments can hold (`slots`), how many the engine can serve
(`engine_capacity`), and how far the chain may be ahead of the weights (`max_lag`: a chain of training step s starts only when
at least s - max_lag steps are trained). Chains that may not start wait here, first come first served. A wait ends in an error
only if the whole run stands still: no chain was admitted, none ended and no step was trained for `timeout_s`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from ..aio.wait_line import Waiter, WaitLine
from ..errors import ConfigError, DeadlineError, InvariantError

TIMEOUT_S = 3600.0
"""Without any progress. Every chain has a deadline, so one that runs ends."""
Request = tuple[int, float]
"""The training step of a chain, and its timeout."""


class Admission:
    """`done` is the number of training steps that are finished, `running` the chains that were admitted and have not left.

    `slots` returns how many chains the environments can hold, such as `lambda: manager.capacity(kinds)`; `holders` says in
    words who holds which environment, for messages.
    """

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
        self._line: WaitLine[Request, None] = WaitLine(self.wake, self._hand_back, self._timed_out)

    @property
    def waiting(self) -> int:
        return self._line.waiting

    @property
    def limit(self) -> int | None:
        """How many chains may run now; None is no limit."""
        slots = self._slots() if self._slots is not None else None
        limits = [limit for limit in (slots, self.engine_capacity) if limit is not None]
        return min(limits) if limits else None

    def allows(self, step: int) -> bool:
        limit = self.limit
        return step - self.done <= self.max_lag and (limit is None or self.running < limit)

    async def admit(self, step: int = 0, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until a chain of training step `step` may start. Each admitted chain calls `leave` once.

        Raises DeadlineError if the run stands still for `timeout_s`.
        """
        if not self._line.waiting and self.allows(step):
            self._enter()
            return
        waiter = self._line.join((step, timeout_s), time.monotonic() + timeout_s)
        self.wake()
        await self._line.wait(waiter)

    def leave(self) -> None:
        """A chain has ended."""
        if self.running < 1:
            raise InvariantError("more chains left than were admitted")
        self.running -= 1
        self.moved_at = time.monotonic()
        self.wake()

    def advance(self, done: int) -> None:
        """`done` training steps are finished."""
        self.done = done
        self.moved_at = time.monotonic()
        self.wake()

    def wake(self) -> None:
        """Admit those at the front of the line that may start. Call it when `slots` has risen."""
        while (waiter := self._line.first()) is not None and self.allows(waiter.request[0]):
            self._enter()
            self._line.assign(waiter, None)

    @asynccontextmanager
    async def slot(self, step: int = 0, timeout_s: float = TIMEOUT_S) -> AsyncIterator[None]:
        """`async with admission.slot(step):` around a chain."""
        await self.admit(step, timeout_s)
        try:
            yield
        finally:
            self.leave()

    def close(self) -> None:
        """Refuse all that wait."""
        self._line.close(lambda: DeadlineError("the admission of chains was closed"))

    def _enter(self) -> None:
        self.running += 1
        self.moved_at = time.monotonic()

    def _hand_back(self, _: None) -> None:
        self.running -= 1

    def _timed_out(self, waiter: Waiter[Request, None]) -> DeadlineError | None:
        step, timeout_s = waiter.request
        due = max(waiter.since, self.moved_at) + timeout_s
        if due > time.monotonic() + 1e-3:
            waiter.deadline = due  # the run has moved since this chain came
            return None
        if step - self.done > self.max_lag:
            why = f"step {step} waits for step {step - self.max_lag} to be trained ({self.done} are)"
        else:
            why = f"{self.running} chains run and {self.limit} may"
        holders = f" ({self._holders()})" if self._holders is not None else ""
        return DeadlineError(
            f"no chain was admitted or ended and no step was trained for {timeout_s:g} s: {why}{holders}; {self.waiting} more "
            f"wait"
        )
