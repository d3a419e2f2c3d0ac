"""A rate limit for one provider: requests are admitted in order, a fixed time apart.

A waiter that is cancelled uses no turn, even if its turn comes in the tick of the cancellation, so cancelled requests do not
lower the rate. A request whose turn would come after its deadline is refused at once. For one event loop.
"""

from __future__ import annotations

import asyncio

from ....aio.wait_line import Waiter, WaitLine


class TooLate(Exception):
    """The turn would come `seconds` from now, which is after the deadline."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class RateLimit:
    """Admits `rate` requests per second."""

    def __init__(self, rate: float) -> None:
        self._gap_s = 1 / rate
        self._free_at = 0.0
        """When the next request may be sent, in the loop's time."""
        self._line: WaitLine[None, float] = WaitLine(self._serve, self._hand_back, _no_timeout)
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, until: float, *, again: bool = False) -> None:
        """Wait for a turn. `again`: a retry, which goes to the front. Raises TooLate if the turn comes after `until`."""
        now = asyncio.get_running_loop().time()
        ahead = 0 if again else self._line.waiting
        due = max(now, self._free_at) + ahead * self._gap_s
        if due > until:
            raise TooLate(due - now)
        waiter = self._line.join(None, front=again)
        self._serve()
        await self._line.wait(waiter)

    def pause(self, seconds: float) -> None:
        """Admit no request for this time."""
        self._free_at = max(self._free_at, asyncio.get_running_loop().time() + seconds)
        self._serve()

    def _serve(self) -> None:
        """Admit the first waiter if its turn has come, and set the timer for the next."""
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiter = self._line.first()
        if waiter is not None and loop.time() >= self._free_at:
            # Counted from now and not from when it was due: a loop that was busy must not send a burst afterwards.
            self._free_at = loop.time() + self._gap_s
            self._line.assign(waiter, self._free_at)
            waiter = self._line.first()
        if waiter is not None:
            self._timer = loop.call_at(self._free_at, self._serve)

    def _hand_back(self, free_at: float) -> None:
        # If `_free_at` has changed since, a pause was asked for in the same tick: it stays in force.
        if self._free_at == free_at:
            self._free_at = min(free_at, asyncio.get_running_loop().time())


def _no_timeout(waiter: Waiter[None, float]) -> Exception | None:
    return None  # waiters join without a deadline: `take` refuses those that would be late
