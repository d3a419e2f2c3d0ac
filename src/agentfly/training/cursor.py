"""The order of tasks: seeded, and exactly restorable from two integers and a fingerprint of the rows."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ..types import Task


class TaskCursor:
    """Draws tasks without repetition until all were seen, then in a new order."""

    def __init__(self, tasks: Sequence[Task], *, shuffle: bool, seed: int) -> None:
        self._tasks = tasks
        self._shuffle = shuffle
        self._seed = seed
        self.epoch = 0
        self.position = 0
        self._order = self._new_order(self.epoch)

    def take(self, count: int) -> list[Task]:
        """Returns the next `count` tasks."""
        return [self.draw()[1] for _ in range(count)]

    def draw(self) -> tuple[tuple[int, int], Task]:
        """Returns the epoch and the position of the next task, and the task."""
        if self.position == len(self._order):
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._new_order(self.epoch)
        place = (self.epoch, self.position)
        self.position += 1
        return place, self._tasks[self._order[place[1]]]

    def task_at(self, epoch: int, position: int) -> Task:
        """Returns the task that `draw` returned with this epoch and position."""
        return self._tasks[self._new_order(epoch)[position]]

    def state(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, "rows": self._rows}

    def restore(self, state: dict[str, Any]) -> bool:
        """Go on where `state` was taken. If the order was another (other rows, seed), begin a new epoch and return False."""
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        same = state.get("rows", self._rows) == self._rows and self.position <= len(self._tasks)
        if not same:
            self.epoch, self.position = self.epoch + 1, 0
        self._order = self._new_order(self.epoch)
        return same

    @cached_property
    def _rows(self) -> str:
        return f"{fingerprint(self._tasks)} {self._shuffle} {self._seed}"

    def _new_order(self, epoch: int) -> list[int]:
        order = list(range(len(self._tasks)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


def fingerprint(tasks: Sequence[Task]) -> str:
    """Returns a short text that differs if the rows or their order do."""
    digest = hashlib.blake2b(digest_size=8)
    for task in tasks:
        row = [task.id, [(message.role, message.content) for message in task.messages], dict(task.fields)]
        # An object has no stable text; its type is compared.
        digest.update(json.dumps(row, default=lambda value: type(value).__name__, skipkeys=True).encode())
    return f"{len(tasks)}-{digest.hexdigest()}"
