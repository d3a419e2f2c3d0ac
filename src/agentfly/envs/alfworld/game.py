"""A household and its task, as an immutable `Game` that any number of playthroughs share.

`read_problem` reads the PDDL problem of an ALFRED game as it stands in `game.tw-pddl`; `build` makes a game from `Facts`. Names
follow the original: things with one name are numbered in the reverse order of their ids. Raises DataError, with the location,
for a problem that cannot be played.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from sys import intern

from ...errors import DataError
from .goal import CLEAN, COOL, HOT, MARKS, SLICED, HouseholdGoal, read_goal, type_word

# Abilities of an object as bits. An ability has the bit of the mark that it can receive.
CLEANABLE, HEATABLE, COOLABLE, SLICEABLE, SWITCH, PORTABLE, VESSEL = CLEAN, HOT, COOL, SLICED, 16, 32, 64
ABILITIES = {
    "cleanable": CLEANABLE,
    "heatable": HEATABLE,
    "coolable": COOLABLE,
    "sliceable": SLICEABLE,
    "toggleable": SWITCH,
    "pickupable": PORTABLE,
    "isreceptacleobject": VESSEL,
}
APPLIANCES = {"sink": CLEAN, "sinkbasin": CLEAN, "microwave": HOT, "fridge": COOL}
"""Receptacles that can treat the held thing, and the mark they leave."""
KNIVES = frozenset({"knife", "butterknife"})
_PAIRS = {
    "cancontain", "objecttype", "receptacletype", "inreceptacle", "receptacleatlocation", "objectatlocation",
    "inreceptacleobject", "atlocation",
}  # fmt: skip
_ALONE = {*ABILITIES, *MARKS, "openable", "opened"}
_SECTION = re.compile(r"\(\s*:(objects|init|goal)\b", re.IGNORECASE)
_ATOM = re.compile(r"\(([^()]*)\)")
_COST = re.compile(r"\(\s*=\s*\([^()]*\)\s*[\d.]+\s*\)")


@dataclass(frozen=True, slots=True)
class Receptacle:
    name: str
    kind: str
    place: int
    openable: bool
    appliance: int


@dataclass(frozen=True, slots=True)
class HouseholdThing:
    name: str
    kind: str
    abilities: int
    marks: int
    """At the start."""
    inside: tuple[int, ...] = ()
    """Contents of a vessel: shown by `examine`, never moved."""


@dataclass(slots=True)
class Facts:
    """A household before its things are numbered. Ids sort as those of the original."""

    receptacles: dict[str, str] = field(default_factory=dict)
    """Id to type."""
    things: dict[str, str] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    """Receptacle to its place."""
    openable: set[str] = field(default_factory=set)
    opened: set[str] = field(default_factory=set)
    abilities: dict[str, int] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)
    contents: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of thing and receptacle."""
    nested: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of thing and vessel."""
    lies_at: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of thing and place. Only slicing reads it."""
    fits: set[tuple[str, str]] = field(default_factory=set)
    """Pairs of receptacle type and thing type."""
    start: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Game:
    """Everything that does not change. Receptacles and things are in the order in which the original lists them."""

    id: str
    task: str
    goal: HouseholdGoal
    receptacles: tuple[Receptacle, ...]
    things: tuple[HouseholdThing, ...]
    fits: frozenset[tuple[str, str]]
    start: int
    opened: frozenset[int]
    contents: tuple[tuple[int, ...], ...]
    lies_at: dict[int, frozenset[int]]
    receptacle_at: dict[str, int]
    thing_at: dict[str, int]
    at_place: dict[int, tuple[int, ...]]
    goals: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    """Numbers of the things, targets and lamps that can satisfy the goal."""
    walkthrough: tuple[str, ...] = ()

    @property
    def room(self) -> str:
        """The first observation."""
        return f"You are in the middle of a room. Looking quickly around you, you see {listed(self.receptacles)}."

    @property
    def objective(self) -> str:
        return f"Your task is to: {self.task}."

    @property
    def intro(self) -> str:
        return f"-= Welcome to TextWorld, ALFRED! =-\n\n{self.room}\n\n{self.objective}"


def listed(items: Sequence[Receptacle | HouseholdThing], article: str = "a ") -> str:
    """`a mug 2, a mug 1, and a pen 1`, or `nothing`."""
    names = [f"{article}{item.name}" for item in items]
    return ", ".join(names[:-1]) + f", and {names[-1]}" if len(names) > 1 else names[0] if names else "nothing"


def build(name: str, task: str, goal: HouseholdGoal, facts: Facts, where: str, walkthrough: Sequence[str] = ()) -> Game:
    """Number the household. Raises DataError if its facts contradict each other."""
    numbered = _names([*facts.receptacles, *facts.things])
    places: dict[str, int] = {}
    for place in [facts.start, *facts.places.values(), *(place for _, place in facts.lies_at)]:
        places.setdefault(place, len(places))
    receptacles: list[Receptacle] = []
    receptacle_at: dict[str, int] = {}
    for key in sorted(facts.receptacles, key=str.lower):
        if key not in facts.places:
            raise DataError(f"{where}: the receptacle {key} stands nowhere (receptacleAtLocation)")
        kind = facts.receptacles[key]
        appliance = APPLIANCES.get(kind, 0)
        receptacle_at[key] = len(receptacles)
        receptacles.append(Receptacle(numbered[key], kind, places[facts.places[key]], key in facts.openable, appliance))
    order = sorted(facts.things, key=str.lower)
    thing_at = {key: number for number, key in enumerate(order)}
    contents: list[list[int]] = [[] for _ in receptacles]
    for thing, receptacle in facts.contents:
        if thing not in thing_at or receptacle not in receptacle_at:
            raise DataError(f"{where}: (inReceptacle {thing} {receptacle}) names something that is not declared")
        contents[receptacle_at[receptacle]].append(thing_at[thing])
    inside: dict[str, list[int]] = {}
    for thing, vessel in facts.nested:
        if thing in thing_at:
            inside.setdefault(vessel, []).append(thing_at[thing])
    things = [
        HouseholdThing(
            numbered[key], facts.things[key], facts.abilities.get(key, 0), facts.marks.get(key, 0), _sorted(inside.get(key))
        )
        for key in order
    ]
    lies: dict[int, set[int]] = {}
    for thing, place in facts.lies_at:
        if thing in thing_at and facts.abilities.get(thing, 0) & SLICEABLE:
            lies.setdefault(thing_at[thing], set()).add(places[place])
    at_place: dict[int, list[int]] = {}
    for number, item in enumerate(receptacles):
        at_place.setdefault(item.place, []).append(number)
    return Game(
        id=name,
        task=task,
        goal=goal,
        receptacles=tuple(receptacles),
        things=tuple(things),
        fits=_shared(frozenset(facts.fits)),
        start=places[facts.start],
        opened=frozenset(receptacle_at[key] for key in facts.opened if key in receptacle_at),
        contents=tuple(_sorted(row) for row in contents),
        lies_at={thing: frozenset(where_to) for thing, where_to in lies.items()},
        receptacle_at={item.name: number for number, item in enumerate(receptacles)},
        thing_at={item.name: number for number, item in enumerate(things)},
        at_place={place: tuple(row) for place, row in at_place.items()},
        goals=(
            tuple(number for number, item in enumerate(things) if item.kind == goal.thing),
            tuple(number for number, item in enumerate(receptacles) if item.kind == goal.target),
            tuple(number for number, item in enumerate(things) if item.kind == goal.lamp and item.abilities & SWITCH),
        ),
        walkthrough=tuple(_named(command, numbered) for command in walkthrough),
    )


def read_problem(text: str, name: str, task: str, where: str, walkthrough: Sequence[str] = ()) -> Game:
    """A PDDL problem of the ALFRED domain."""
    if ";" in text:
        text = re.sub(r";[^\n]*", "", text)
    marks = {match[1].lower(): match for match in _SECTION.finditer(text)}
    for section in ("objects", "init", "goal"):
        if section not in marks:
            raise DataError(f"{where}: the PDDL problem has no (:{section} ...)")
    if not marks["objects"].start() < marks["init"].start() < marks["goal"].start():
        raise DataError(f"{where}: the PDDL problem must have objects, init and goal, in this order")
    types = _declared(text[marks["objects"].end() : marks["init"].start()], where)
    facts = _facts(text[marks["init"].end() : marks["goal"].start()], types, where)
    return build(name, task, read_goal(text[marks["goal"].end() :], where), facts, where, walkthrough)


def _declared(text: str, where: str) -> dict[str, str]:
    """Ids and what they are: `mug_1 mug_2 - object`."""
    types: dict[str, str] = {}
    waiting: list[str] = []
    words = iter(text.replace(")", " ").split())
    for word in words:
        if word != "-":
            waiting.append(word)
            continue
        kind = next(words, "").lower()
        if not waiting or not kind:
            raise DataError(f"{where}: the objects of the PDDL problem are not of the form 'name - type'")
        types |= dict.fromkeys(waiting, kind)
        waiting = []
    return types


def _facts(text: str, types: dict[str, str], where: str) -> Facts:
    if "=" in text:
        text = _COST.sub("", text)
    atoms = _ATOM.findall(text)
    if text.count("(") != len(atoms):
        raise DataError(f"{where}: the brackets of the init facts do not match")
    facts = Facts()
    for atom in atoms:
        words = atom.split()
        name, arguments = words[0].lower() if words else "", words[1:]
        if (name in _PAIRS and len(arguments) != 2) or (name in _ALONE and len(arguments) != 1):
            raise DataError(f"{where}: the init fact ({' '.join(words)[:200]}) is about {len(arguments)} things")
        if len(arguments) == 2:
            first, second = arguments
            if name == "cancontain":
                facts.fits.add((type_word(first), type_word(second)))
            elif name == "objecttype":
                facts.things[first] = type_word(second)
            elif name == "receptacletype":
                facts.receptacles[first] = type_word(second)
            elif name == "inreceptacle":
                facts.contents.append((first, second))
            elif name == "receptacleatlocation":
                facts.places[first] = second
            elif name == "objectatlocation":
                facts.lies_at.append((first, second))
            elif name == "inreceptacleobject":
                facts.nested.append((first, second))
            elif name == "atlocation":
                facts.start = second
        elif len(arguments) == 1:
            key = arguments[0]
            if name in ABILITIES:
                facts.abilities[key] = facts.abilities.get(key, 0) | ABILITIES[name]
            elif name in MARKS:
                facts.marks[key] = facts.marks.get(key, 0) | MARKS[name]
            elif name == "openable":
                facts.openable.add(key)
            elif name == "opened":
                facts.opened.add(key)
    if not facts.start or not facts.receptacles:
        raise DataError(f"{where}: the PDDL problem has no {'receptacles' if facts.start else 'place where the agent starts'}")
    for key in (*facts.receptacles, *facts.things):
        if key not in types:
            raise DataError(f"{where}: {key} has a type but is not declared under (:objects")
    return facts


def _names(keys: Sequence[str]) -> dict[str, str]:
    """`Mug_bar_...` to "mug 2". The first id gets the highest number."""
    by_word: dict[str, list[str]] = {}
    for key in sorted(keys, key=str.lower):
        word, *rest = key.split("_bar_")
        if rest and rest[-1].lower().endswith("basin"):
            word = rest[-1]
        by_word.setdefault(word.lower(), []).append(key)
    return {key: intern(f"{word} {len(row) - at}") for word, row in by_word.items() for at, key in enumerate(row)}


def _named(command: str, numbered: Mapping[str, str]) -> str:
    """A command with names in place of ids: "go to Desk_bar__minus_01_dot_2" and "go to Desk|-01.2" are "go to desk 1"."""
    if "_bar_" not in command and "|" not in command:
        return command
    names = {_plain_id(key): name for key, name in numbered.items()}
    return " ".join(names.get(_plain_id(word), word) for word in command.split())


def _plain_id(text: str) -> str:
    for word, sign in (("_bar_", "|"), ("_minus_", "-"), ("_plus_", "+"), ("_dot_", "."), ("_comma_", ",")):
        text = text.replace(word, sign)
    return text.lower()


@lru_cache(maxsize=64)
def _shared(fits: frozenset[tuple[str, str]]) -> frozenset[tuple[str, str]]:
    """One object for equal sets: thousands of games have the same."""
    return fits


def _sorted(numbers: Sequence[int] | None) -> tuple[int, ...]:
    return tuple(sorted(numbers or ()))
