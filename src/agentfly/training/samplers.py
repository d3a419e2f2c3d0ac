"""The built-in samplers of tasks: which row is drawn next. See `agentfly.protocols.TaskSampler`."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from ..protocols import GroupResult
from ..schema import Bounds, read
from ..types import Task

Share = Annotated[float, Bounds(low=0, high=1)]


class EpochSampler:
    """Every row once before any comes again, each time in a new seeded order (`data.shuffle`)."""

    def __init__(self, tasks: Sequence[Task], seed: int, *, shuffle: bool = True) -> None:
        self._num_rows, self._seed, self._shuffle = len(tasks), seed, shuffle
        self.epoch = 0
        self.position = 0
        self._order = self._new_order(self.epoch)

    def draw(self) -> int:
        if self.position == self._num_rows:
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._new_order(self.epoch)
        self.position += 1
        return self._order[self.position - 1]

    def row_at(self, epoch: int, position: int) -> int:
        """Returns the row that is drawn there."""
        return self._new_order(epoch)[position]

    def state(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._order = self._new_order(self.epoch)

    def _new_order(self, epoch: int) -> list[int]:
        order = list(range(self._num_rows))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


class CurriculumSampler:
    """Rows of middling success more often: in proportion to floor + (1 - floor) * 4p(1 - p), p the estimated success.

    p is (successes + prior) / (chains + 1), over the chains of the row so far. Each new group multiplies the counts before it
    by `memory`, because older weights sampled them. A row is not drawn again while it is in flight, unless all rows are.
    """

    def __init__(
        self, tasks: Sequence[Task], seed: int, *, floor: float = 0.1, prior: float = 0.5, memory: float = 0.5
    ) -> None:
        self._seed = seed
        self._floor: float = read("the option floor", floor, Annotated[float, Bounds(low=0.001, high=1)])
        self._prior: float = read("the option prior", prior, Share)
        self._memory: float = read("the option memory", memory, Share)
        self._drawn = 0
        self._in_flight: Counter[int] = Counter()
        self._counts: dict[int, tuple[float, float]] = {}  # successes and chains of the rows that were trained
        self._weights = [self._weight(0.0, 0.0)] * len(tasks)

    def draw(self) -> int:
        chance, num_rows = random.Random(f"{self._seed}/{self._drawn}"), len(self._weights)
        while True:  # no weight is above 1, so rows are accepted in proportion to theirs
            row = chance.randrange(num_rows)
            waits = row in self._in_flight and len(self._in_flight) < num_rows
            if not waits and chance.random() < self._weights[row]:
                break
        self._drawn += 1
        self._in_flight[row] += 1
        return row

    def learn(self, result: GroupResult) -> None:
        self._in_flight[result.row] -= 1
        self._in_flight += Counter()  # drops zeros
        if not result.successes:
            return
        successes, chains = self._counts.get(result.row, (0.0, 0.0))
        successes, chains = (
            self._memory * successes + sum(result.successes), self._memory * chains + len(result.successes),
        )  # fmt: skip
        self._counts[result.row] = successes, chains
        self._weights[result.row] = self._weight(successes, chains)

    def state(self) -> dict[str, Any]:
        return {"drawn": self._drawn, "in_flight": dict(self._in_flight), "counts": dict(self._counts)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._drawn, self._in_flight, self._counts = state["drawn"], Counter(state["in_flight"]), dict(state["counts"])
        for row, counts in self._counts.items():
            self._weights[row] = self._weight(*counts)

    def _weight(self, successes: float, chains: float) -> float:
        success = (successes + self._prior) / (chains + 1)
        return self._floor + (1 - self._floor) * 4 * success * (1 - success)
