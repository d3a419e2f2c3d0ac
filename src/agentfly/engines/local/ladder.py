"""Which size of CUDA graph serves a batch: few are recorded at first, those in between once they have been missed.

In: how much room is wanted. Out: the size to use. Recording a graph takes as long as many steps, and a graph that is somewhat
too large costs a little at every step; so the first to be recorded is the next larger of a few coarse sizes, and a size that
fits better follows when it would have served `patience` times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Ladder:
    """Sizes from `coarse` and `fine`, none above `most`."""

    def __init__(self, coarse: Iterable[int], fine: Iterable[int], most: int, patience: int = 24) -> None:
        self._coarse = sorted({size for size in coarse if size < most} | {most})
        self._all = sorted({size for size in fine if size < most} | set(self._coarse))
        self._recorded: set[int] = set()
        self._missed: Counter[int] = Counter()
        self._patience = patience

    def fit(self, wanted: int) -> int:
        """The smallest size that serves `wanted`, recorded or not."""
        return next(size for size in self._all if size >= wanted)

    def pick(self, wanted: int) -> int:
        """The size for `wanted` (at most `most`). One that was not picked before is to be recorded now."""
        best = self.fit(wanted)
        size = min((size for size in self._recorded if size >= wanted), default=None)
        if size is None:
            size = next(size for size in self._coarse if size >= wanted)
        elif size != best:
            self._missed[best] += 1
            if self._missed[best] >= self._patience:
                size = best
        self._recorded.add(size)
        return size
