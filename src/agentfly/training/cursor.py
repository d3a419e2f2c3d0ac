"""The order of tasks: seeded, and exactly restorable from two integers."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ..types import Task


class TaskCursor:
    """Draws tasks without repetition until all were seen, then in a new order."""

    def __init__(self, tasks: Sequence[Task], *, shuffle: bool, seed: int) -> None:
        self._tasks = tasks
        self._shuffle = shuffle
        self._seed = seed
        self.epoch = 0
        self.position = 0
        self._order = self._new_order()

    def take(self, count: int) -> list[Task]:
        taken: list[Task] = []
        while len(taken) < count:
            if self.position == len(self._order):
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._new_order()
            taken.append(self._tasks[self._order[self.position]])
            self.position += 1
        return taken

    def state(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def restore(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._new_order()

    def _new_order(self) -> list[int]:
        order = list(range(len(self._tasks)))
        if self._shuffle:
            random.Random(f"{self._seed}/{self.epoch}").shuffle(order)
        return order
