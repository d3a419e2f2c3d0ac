"""Who asks next, at a rate: those who want to ask come in, one after the other they go out.

Turns are given in the order of asking, the first at once. Nobody holds a turn before it is due: whoever gives up while waiting,
or in the very moment of being called, leaves it to the next, so what is asked is asked at the full rate however many give up.
One whose turn would come too late is refused at once. One event loop only; nothing is asked here.
"""

from __future__ import annotations

import asyncio
from collections import deque


class TooLate(Exception):
    """The turn would come `seconds` from now, which is after the deadline."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class Turns:
    """`rate` turns in a second."""

    def __init__(self, rate: float) -> None:
        self._gap_s = 1 / rate
        self._free_at = 0.0
        self._given = 0.0
        """What `_free_at` became with the last turn that was called: another value is somebody's rest."""
        self._line: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, until: float, *, again: bool = False) -> None:
        """Wait for a turn, by the loop's clock before `until`. `again`: it had one before and goes to the front."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if not self._line and now >= self._free_at:
            self._free_at = now + self._gap_s
            return
        due = max(now, self._free_at) + (0 if again else len(self._line)) * self._gap_s
        if due > until:
            raise TooLate(due - now)
        ticket: asyncio.Future[None] = loop.create_future()
        if again:
            self._line.appendleft(ticket)
        else:
            self._line.append(ticket)
        self._arm()
        try:
            await ticket
        except asyncio.CancelledError:
            if ticket in self._line:
                self._line.remove(ticket)
            elif not ticket.cancelled() and self._free_at == self._given:  # it was called in this very moment
                self._free_at = min(self._free_at, loop.time())
            self._arm()
            raise

    def rest(self, seconds: float) -> None:
        """Give no turn for so long."""
        self._free_at = max(self._free_at, asyncio.get_running_loop().time() + seconds)
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._line:
            self._timer = asyncio.get_running_loop().call_at(self._free_at, self._call)

    def _call(self) -> None:
        self._timer = None
        while self._line:
            ticket = self._line.popleft()
            if not ticket.done():
                # From now, not from when it was due: a loop that was busy must not send what it missed in a burst.
                self._free_at = self._given = asyncio.get_running_loop().time() + self._gap_s
                ticket.set_result(None)
                break
        self._arm()
