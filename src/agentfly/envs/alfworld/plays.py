"""Commands that win a game by searching for things instead of knowing where they are.

Dialogues made from the oracle would teach a model to guess. Here a receptacle is visited and opened before a thing is taken
from it, and seen things are remembered. `listed_order` searches receptacles as the room lists them, those named by the task
last; `plausible_order` draws receptacles that fit the thing and finds it after a limited number of misses.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from .engine import State
from .oracle import Work

Order = Callable[[Work, set[int], Sequence[int]], int | None]
"""From the plan so far, the searched receptacles and the wanted things to the receptacle to search next."""


def searched(state: State, order: Order) -> list[str] | None:
    """Commands that win, each based on what was seen before it; None if the order ends before the things are found."""
    search = _Search(state, order)
    things, targets, lamps = state.game.goals
    if state.game.goal.lamp:
        won = search.take(things) and search.light(lamps)
    else:
        target = min(targets, key=search.work.distance, default=-1)
        won = target >= 0 and all(search.deliver(things, target) for _ in range(state.game.goal.count))
    return search.work.commands if won or search.work.state.won else None


def listed_order(work: Work, looked: set[int], wanted: Sequence[int]) -> int | None:
    """In the order of the room's description, with targets and appliances of the task last."""
    receptacles, marks = work.game.receptacles, work.game.goal.marks
    named = {*work.game.goals[1], *(number for number, item in enumerate(receptacles) if item.appliance & marks)}
    left = [number for number in range(len(receptacles)) if number not in looked]
    return min(left, key=lambda number: (number in named, number), default=None)


def plausible_order(rng: random.Random, max_misses: int) -> Order:
    """Draws receptacles that could hold the thing; after `max_misses` misses, goes to where it is."""
    misses = [max_misses]

    def choose(work: Work, looked: set[int], wanted: Sequence[int]) -> int | None:
        there = [number for number, row in enumerate(work.state.contents) if number not in looked and set(row) & set(wanted)]
        if not there:
            return None
        kinds = {work.game.things[thing].kind for thing in wanted}
        holding = {place for place, kind in work.game.fits if kind in kinds}
        fitting = [number for number, item in enumerate(work.game.receptacles) if item.kind in holding and number not in looked]
        chosen = rng.choice(fitting) if fitting and misses[0] > 0 else rng.choice(there)
        misses[0] -= chosen not in there
        return chosen

    return choose


class _Search:
    """A plan that takes only seen things. Methods return whether they succeeded; all stop once the game is won."""

    def __init__(self, state: State, order: Order) -> None:
        self.work, self.order = Work(state), order
        self.looked: set[int] = set()

    def find(self, things: Sequence[int]) -> tuple[int, int] | None:
        """A wanted thing in a searched receptacle, and that receptacle; None if the order ends first."""
        work = self.work
        while True:
            for number in sorted(self.looked, key=work.distance):
                for thing in things:
                    if thing in work.state.contents[number]:
                        return thing, number
            following = self.order(work, self.looked, things)
            if following is None:
                return None
            work.go(following, reach=True)
            self.looked.add(following)

    def take(self, things: Sequence[int], unlike: int = -1) -> bool:
        target = self.find([thing for thing in things if thing != self.work.state.held])
        return target is not None and self.work.fetch(target[0], unlike)

    def deliver(self, things: Sequence[int], target: int) -> bool:
        """Treat one more thing and bring it to the target."""
        if self.work.state.won:
            return True
        left = [thing for thing in things if not self.work.state.counts(thing, target)]
        if not self.take(left, unlike=target) or not self.work.treat(self.work.state.held, again=True):
            return False
        return self.work.state.won or self.work.put(self.work.state.held, target)

    def light(self, lamps: Sequence[int]) -> bool:
        target = self.find(lamps)
        if target is None:
            return False
        lamp, number = target
        self.work.go(number)
        if not self.work.state.won:
            self.work.do(f"use {self.work.game.things[lamp].name}")
        return self.work.state.won
