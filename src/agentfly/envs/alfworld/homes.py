"""Seeded households: the same size and number give the same `Game` everywhere, and every game is proven solvable.

"home" draws a kitchen, bedroom, bathroom or living room with some 6 to 22 receptacles and a task of any of the six kinds.
"easy" draws three or four receptacles with short names and a task of three to six commands. A draw is kept only if it is not
won at the start and the oracle wins it; otherwise the generator draws again. `homes.json` lists rooms, receptacles and things.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ...errors import DataError, InvariantError
from ..task_sets import read_table
from .engine import State
from .game import ABILITIES, PORTABLE, SWITCH, Facts, Game, build
from .goal import CLEAN, COOL, HOT, KIND_OF_MARK, KINDS, HouseholdGoal, sentences
from .oracle import plan

SIZES = ("home", "easy")
MAX_DRAWS = 200
KEPT_GAMES = 512
EASY_STEPS = (3, 6)


def _bits(abilities: Sequence[str]) -> int:
    return sum(ABILITIES[name] for name in abilities)


LISTS: dict[str, Any] = read_table(__package__, "homes.json")
ROOMS: list[dict[str, Any]] = list(LISTS["rooms"].values())
"""The receptacles of a room with the least and greatest number of each, and the things that may lie about."""
THINGS: dict[str, tuple[int, list[str]]] = {
    name: (_bits(row["abilities"]), row["places"]) for name, row in LISTS["things"].items()
}
"""The abilities of a thing, as bits, and the receptacles that it fits."""
EASY_PLACES: list[str] = LISTS["easy"]["places"]
EASY_THINGS = {name: _bits(abilities) for name, abilities in LISTS["easy"]["things"].items()}
EASY_APPLIANCES = {ABILITIES[ability]: name for ability, name in LISTS["easy"]["appliances"].items()}
EASY_KINDS: dict[str, int] = LISTS["easy"]["kinds"]


class _Home:
    """The facts drawn so far. Ids sort at random within a name."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.facts = rng, Facts(start="start")

    def receptacle(self, kind: str, place: str = "") -> str:
        key = self._key(kind, self.facts.receptacles)
        self.facts.receptacles[key] = kind
        self.facts.places[key] = place or f"at {key}"
        if kind in LISTS["openable"]:
            self.facts.openable.add(key)
        return key

    def thing(self, kind: str, abilities: int, receptacle: str) -> str:
        key = self._key(kind, self.facts.things)
        self.facts.things[key] = kind
        self.facts.abilities[key] = abilities | (0 if abilities & SWITCH else PORTABLE)
        self.facts.contents.append((key, receptacle))
        self.facts.lies_at.append((key, self.facts.places[receptacle]))
        if self.facts.receptacles[receptacle] == "fridge" and abilities & COOL:
            self.facts.marks[key] = COOL
        return key

    def kinds(self) -> set[str]:
        return set(self.facts.receptacles.values())

    def of(self, kinds: Sequence[str]) -> list[str]:
        return [key for key, kind in self.facts.receptacles.items() if kind in kinds]

    def _key(self, kind: str, taken: dict[str, str]) -> str:
        while (key := f"{kind}_bar_{self.rng.randrange(10_000):04d}") in taken:
            pass
        return key


def make(size: str, number: int) -> Game:
    """The game of that size and number. The last KEPT_GAMES are cached."""
    if size not in SIZES:
        raise DataError(f"no household is called {size!r}; there are {', '.join(SIZES)}")
    return _make(size, number)


@lru_cache(maxsize=KEPT_GAMES)
def _make(size: str, number: int) -> Game:
    rng = random.Random(f"{size} {number}")
    for _ in range(MAX_DRAWS):
        drawn = _draw_easy(rng) if size == "easy" else _draw_home(rng)
        if drawn is None:
            continue
        goal, facts = drawn
        game = build(f"{size}-{number}", rng.choice(sentences(goal)), goal, facts, f"household {size}-{number}")
        start = State(game)
        if start.is_goal() or (commands := plan(start)) is None:
            continue
        if size != "easy" or EASY_STEPS[0] <= len(commands) <= EASY_STEPS[1]:
            return game
    raise InvariantError(f"household {size}-{number}: none of {MAX_DRAWS} draws can be solved")


def _draw_home(rng: random.Random) -> tuple[HouseholdGoal, Facts] | None:
    home = _Home(rng)
    (room,) = rng.choices(ROOMS, weights=[room["weight"] for room in ROOMS])
    for kind, (low, high) in room["receptacles"].items():
        last = ""
        for _ in range(rng.randint(low, high)):
            # Neighbours of a kind may be reached from one place, as in the original's houses.
            place = home.facts.places[last] if last and rng.random() < 0.15 else ""
            last = home.receptacle(kind, place)
    kinds = home.kinds()
    home.facts.fits = {
        (receptacle, thing) for thing in room["things"] for receptacle in THINGS[thing][1] if receptacle in kinds
    }
    for kind in room["things"]:
        abilities, where = THINGS[kind]
        if places := home.of(where):
            for _ in range(1 if abilities & SWITCH else rng.choices((0, 1, 2, 3), weights=(30, 35, 25, 10))[0]):
                home.thing(kind, abilities, rng.choice(places))
    goal = _choose_goal(rng, home)
    return None if goal is None else (goal, home.facts)


def _choose_goal(rng: random.Random, home: _Home) -> HouseholdGoal | None:
    """A task that the household has the things for. The kind is drawn first; otherwise most tasks would be plain placing."""
    facts = home.facts
    things = [key for key in facts.things if facts.abilities[key] & PORTABLE]
    appliances = {mark for mark, kinds in _APPLIANCES.items() if home.of(kinds)}
    counted = [facts.things[key] for key in things]
    for kind in rng.sample(KINDS, len(KINDS)):
        if kind == "look_at_obj_in_light":
            if lamps := [facts.things[key] for key in facts.things if facts.abilities[key] & SWITCH]:
                return HouseholdGoal(kind, rng.choice(counted), lamp=lamps[0])
            continue
        mark = next((mark for mark, named in KIND_OF_MARK.items() if named == kind), 0)
        count = 2 if kind == "pick_two_obj_and_place" else 1
        if mark and mark not in appliances:
            continue
        able = [facts.things[key] for key in things if facts.abilities[key] & mark == mark]
        able = [thing for thing in able if counted.count(thing) >= count]
        pairs = sorted({(thing, place) for place, thing in facts.fits if thing in able})
        if pairs:
            thing, target = rng.choice(pairs)
            return HouseholdGoal(kind, thing, target, marks=mark, count=count)
    return None


def _draw_easy(rng: random.Random) -> tuple[HouseholdGoal, Facts]:
    """Three or four places. The thing is in none that the task names, so one or two others must be searched."""
    home = _Home(rng)
    (kind,) = rng.choices(list(EASY_KINDS), weights=list(EASY_KINDS.values()))
    mark = next((mark for mark, named in KIND_OF_MARK.items() if named == kind), 0)
    thing = rng.choice([name for name, abilities in EASY_THINGS.items() if abilities & mark == mark])
    others = [name for name in EASY_THINGS if name != thing]
    target, *names = rng.sample(EASY_PLACES, rng.choice((3, 3, 4)) if not mark else 3)
    if mark:
        home.receptacle(EASY_APPLIANCES[mark])
    elif rng.random() < 0.2:
        names[-1] = "drawer"
    targets, places = home.receptacle(target), [home.receptacle(name) for name in names]
    home.facts.fits = {(place, name) for place in (*EASY_PLACES, "drawer") for name in EASY_THINGS}
    home.thing(thing, EASY_THINGS[thing], rng.choice(places))
    for place in (*places, targets):
        for name in rng.sample(others, rng.choice((0, 1, 1))):
            others.remove(name)
            home.thing(name, EASY_THINGS[name], place)
    if kind == "look_at_obj_in_light":
        home.thing("lamp", SWITCH, rng.choice((targets, *places)))
        return HouseholdGoal(kind, thing, lamp="lamp"), home.facts
    if kind == "pick_two_obj_and_place":
        home.thing(thing, EASY_THINGS[thing], targets)
        return HouseholdGoal(kind, thing, target, count=2), home.facts
    return HouseholdGoal(kind, thing, target, marks=mark), home.facts


_APPLIANCES = {CLEAN: ("sinkbasin",), HOT: ("microwave",), COOL: ("fridge",)}
