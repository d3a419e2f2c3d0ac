"""Means that are gathered piece by piece.

In: sums with the count they are over. Out: one mean per name. Numbers stay on the device until the end, so that gathering
them does not make a GPU wait.
"""

from __future__ import annotations

from torch import Tensor


class Totals:
    """Sums and counts by name."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}
        self._counts: dict[str, Tensor | float] = {}

    def add(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + total
        self._counts[name] = self._counts.get(name, 0.0) + count

    def take(self, other: Totals) -> None:
        """All that another has gathered."""
        for name, total in other._sums.items():
            self.add(name, total, other._counts[name])

    def means(self) -> dict[str, float]:
        """The mean under each name; a name that counted nothing is left out."""
        counts = {name: float(count) for name, count in self._counts.items()}
        return {name: float(total) / counts[name] for name, total in self._sums.items() if counts[name]}
