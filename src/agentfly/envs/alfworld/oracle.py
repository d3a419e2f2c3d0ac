"""A plan from any state: the commands that win the game from there, or None if no plan is found.

The oracle reads the state, including the contents of closed receptacles, and no stored plan. It combines fetching, treating and
placing for every thing and target of the goal and returns the shortest plan. Each plan is rehearsed on a copy of the state
before it is returned, so a returned plan wins.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

from .engine import TREATMENTS, State
from .game import PORTABLE
from .goal import CLEAN, COOL, HOT, TOGGLED

_ORDER = {mark: verb for verb, mark in TREATMENTS.items()}
MAX_PAIRS = 64
"""Limit on the pairs of things that are tried in tasks about two things."""


def plan(state: State) -> list[str] | None:
    """The shortest plan found; empty if the game is won already."""
    if state.won or state.is_goal():
        return []
    for commands in sorted(_plans(state), key=len):
        rehearsal = state.copy()
        for command in commands:
            rehearsal.step(command)
        if rehearsal.won:
            return commands
    return None


def _plans(state: State) -> Iterator[list[str]]:
    game = state.game
    things, targets, lamps = game.goals
    if game.goal.lamp:
        for thing in things:
            for lamp in lamps:
                for number in range(len(game.receptacles)):
                    if lamp in state.contents[number] and (commands := _lit(state, thing, lamp, number)) is not None:
                        yield commands
        return
    for number in targets:
        there = [thing for thing in things if state.counts(thing, number)]
        missing = game.goal.count - len(there)
        rest = [thing for thing in things if thing not in there]
        for at, chosen in enumerate(permutations(rest, missing)):
            if at >= MAX_PAIRS:
                break
            if (commands := _delivered(state, chosen, number)) is not None:
                yield commands


def _delivered(state: State, things: tuple[int, ...], number: int) -> list[str] | None:
    """Bring things to a receptacle, each treated as the goal requires."""
    work = Work(state)
    for thing in things:
        if not work.fetch(thing, unlike=number) or not work.treat(thing):
            return None
        # A thing that was in two receptacles and was taken from the other is still in this one.
        if not work.state.counts(thing, number) and not work.put(thing, number):
            return None
    return work.commands


def _lit(state: State, thing: int, lamp: int, number: int) -> list[str] | None:
    work = Work(state)
    if not work.fetch(thing):
        return None
    work.go(number)
    if not work.state.marks_of(lamp) & TOGGLED:
        work.do(f"use {state.game.things[lamp].name}")
    return work.commands


class Work:
    """A plan under construction, carried out on a copy of the state. Methods return whether they succeeded."""

    def __init__(self, state: State) -> None:
        self.state = state.copy()
        self.game = state.game
        self.commands: list[str] = []

    def do(self, command: str) -> None:
        self.commands.append(command)
        self.state.step(command)

    def go(self, number: int, *, reach: bool = False) -> None:
        """Go to a receptacle; with `reach`, open it too."""
        receptacle = self.game.receptacles[number]
        if receptacle.place != self.state.place:
            self.do(f"go to {receptacle.name}")
        if reach and not self.state.reachable(number):
            self.do(f"open {receptacle.name}")

    def fetch(self, thing: int, unlike: int = -1) -> bool:
        """Take a thing from the nearest receptacle; from `unlike` only if it is nowhere else."""
        state, item = self.state, self.game.things[thing]
        if state.held == thing:
            return True
        sources = [number for number, row in enumerate(state.contents) if thing in row]
        if not item.abilities & PORTABLE or not sources or (state.held >= 0 and not self.drop()):
            return False
        source = min(sources, key=lambda number: (number == unlike, self.distance(number)))
        self.go(source, reach=True)
        self.do(f"take {item.name} from {self.game.receptacles[source].name}")
        return True

    def drop(self) -> bool:
        """Put the held thing into the nearest receptacle that it fits."""
        held = self.state.held
        kind = self.game.things[held].kind
        fitting = [number for number, item in enumerate(self.game.receptacles) if (item.kind, kind) in self.game.fits]
        if not fitting:
            return False
        return self.put(held, min(fitting, key=self.distance))

    def put(self, thing: int, number: int) -> bool:
        receptacle = self.game.receptacles[number]
        if (receptacle.kind, self.game.things[thing].kind) not in self.game.fits:
            return False
        self.go(number, reach=True)
        self.do(f"move {self.game.things[thing].name} to {receptacle.name}")
        return True

    def treat(self, thing: int, *, again: bool = False) -> bool:
        """Clean, heat or cool the held thing as the goal requires; with `again` also if it has the mark already."""
        wanted = self.game.goal.marks
        for mark in (CLEAN, HOT, COOL):
            if wanted & mark and (again or not self.state.marks_of(thing) & mark):
                places = [number for number, item in enumerate(self.game.receptacles) if item.appliance == mark]
                if not places or not self.game.things[thing].abilities & mark:
                    return False
                number = min(places, key=self.distance)
                self.go(number)
                self.do(f"{_ORDER[mark]} {self.game.things[thing].name} with {self.game.receptacles[number].name}")
        return True

    def distance(self, number: int) -> int:
        """Number of commands until the receptacle can be reached into."""
        away = self.game.receptacles[number].place != self.state.place
        return int(away) + int(not self.state.reachable(number))
