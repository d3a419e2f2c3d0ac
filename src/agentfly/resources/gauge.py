"""A count that changes over time, with its exact mean and maximum over a window."""

from __future__ import annotations

import time


class Gauge:
    """`value` now, `most` and `mean` since `mark`. Every change is passed on to `total`, the gauge of all pools."""

    __slots__ = ("_area", "_marked_at", "_since", "most", "total", "value")

    def __init__(self, total: Gauge | None = None) -> None:
        self.value = self.most = 0
        self.total = total
        self._area = 0.0
        """The integral of the value over time, from the mark to the last change."""
        self._marked_at = self._since = time.monotonic()

    def add(self, change: int) -> None:
        """Change the value by `change`, from now on."""
        self._add(change, time.monotonic())

    def _add(self, change: int, now: float) -> None:
        self._area += self.value * (now - self._since)
        self._since = now
        self.value += change
        if self.value > self.most:
            self.most = self.value
        if self.total is not None:
            self.total._add(change, now)

    def mark(self) -> None:
        """Begin a new window."""
        self.most, self._area = self.value, 0.0
        self._marked_at = self._since = time.monotonic()

    @property
    def mean(self) -> float:
        """The mean over time since the mark; the value itself if no time has passed."""
        now = time.monotonic()
        seconds = now - self._marked_at
        return (self._area + self.value * (now - self._since)) / seconds if seconds > 0 else float(self.value)
