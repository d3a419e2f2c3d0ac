"""Seeded households: a size and a number in, a `Game` out, the same one for the same number, and proven solvable.

"home" draws a kitchen, bedroom, bathroom or living room with some 6 to 22 receptacles and a task of any of the six kinds.
"easy" draws three or four receptacles with short names and a task of three to six commands. A drawn game is kept only if it is
not won at the start and the oracle wins it; otherwise the next draw of the same number is tried. Nothing is read from files.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ...errors import DataError, InvariantError
from .engine import State
from .game import ABILITIES, PORTABLE, SWITCH, VESSEL, Facts, Game, build
from .goal import CLEAN, COOL, HOT, KIND_OF_MARK, KINDS, HouseholdGoal
from .oracle import plan
from .wording import sentences

SIZES = ("home", "easy")
MAX_DRAWS = 200
KEPT_GAMES = 512
EASY_STEPS = (3, 6)
C, H, K, S = (ABILITIES[name] for name in ("cleanable", "heatable", "coolable", "sliceable"))
OPENABLE = frozenset({"cabinet", "drawer", "fridge", "microwave", "safe"})

TABLES = ("countertop", "diningtable", "desk", "sidetable", "coffeetable", "shelf", "dresser")
STORES = ("cabinet", "drawer")
# A thing: what can be done with it, and what it can be put in or on.
THINGS: dict[str, tuple[int, tuple[str, ...]]] = {
    "mug": (C | H | K | VESSEL, (*TABLES, "cabinet", "fridge", "microwave", "sinkbasin", "coffeemachine")),
    "cup": (C | H | K | VESSEL, (*TABLES, "cabinet", "fridge", "microwave", "sinkbasin")),
    "plate": (C | H | K | VESSEL, (*TABLES, "cabinet", "fridge", "microwave", "sinkbasin")),
    "bowl": (C | K | VESSEL, (*TABLES, "cabinet", "fridge", "sinkbasin")),
    "pan": (C | K | VESSEL, ("countertop", "diningtable", "cabinet", "fridge", "sinkbasin", "stoveburner")),
    "pot": (C | K | VESSEL, ("countertop", "diningtable", "cabinet", "fridge", "sinkbasin", "stoveburner")),
    "fork": (C, (*TABLES[:2], "drawer", "sinkbasin")),
    "spoon": (C, (*TABLES[:2], "drawer", "sinkbasin")),
    "ladle": (C, (*TABLES[:2], *STORES, "sinkbasin")),
    "spatula": (C, (*TABLES[:2], "drawer", "sinkbasin")),
    "knife": (C, (*TABLES[:2], "drawer", "sinkbasin")),
    "apple": (C | H | K | S, (*TABLES[:2], "fridge", "microwave", "sinkbasin", "garbagecan")),
    "potato": (C | H | K | S, (*TABLES[:2], "fridge", "microwave", "sinkbasin", "garbagecan")),
    "tomato": (C | H | K | S, (*TABLES[:2], "fridge", "microwave", "sinkbasin", "garbagecan")),
    "egg": (C | H | K, (*TABLES[:2], "fridge", "microwave", "sinkbasin", "garbagecan")),
    "bread": (H | K | S, (*TABLES[:2], "fridge", "microwave", "garbagecan")),
    "lettuce": (C | K | S, (*TABLES[:2], "fridge", "sinkbasin", "garbagecan")),
    "saltshaker": (0, (*TABLES, *STORES)),
    "peppershaker": (0, (*TABLES, *STORES)),
    "dishsponge": (C, (*TABLES, *STORES, "sinkbasin", "bathtubbasin", "garbagecan", "toilet")),
    "soapbottle": (0, (*TABLES, *STORES, "sinkbasin", "garbagecan", "toilet")),
    "soapbar": (C, (*TABLES, *STORES, "sinkbasin", "bathtubbasin", "garbagecan", "toilet")),
    "spraybottle": (0, (*TABLES, *STORES, "garbagecan", "toilet")),
    "toiletpaper": (0, (*TABLES, *STORES, "garbagecan", "toilet", "toiletpaperhanger")),
    "cloth": (C, (*TABLES, *STORES, "sinkbasin", "bathtubbasin", "garbagecan", "toilet", "laundryhamper")),
    "candle": (0, (*TABLES, *STORES, "toilet")),
    "handtowel": (0, ("handtowelholder", "countertop", "sinkbasin", "garbagecan")),
    "towel": (0, ("towelholder", "bathtubbasin")),
    "tissuebox": (0, (*TABLES, *STORES, "toilet", "garbagecan")),
    "alarmclock": (0, (*TABLES, "drawer")),
    "book": (0, (*TABLES, "drawer", "bed", "sofa", "armchair")),
    "cd": (0, (*TABLES, "drawer", "safe", "garbagecan")),
    "cellphone": (0, (*TABLES, "drawer", "safe", "bed", "sofa", "armchair")),
    "creditcard": (0, (*TABLES, "drawer", "safe", "bed", "sofa", "armchair")),
    "keychain": (0, (*TABLES, "drawer", "safe", "bed", "sofa", "armchair")),
    "laptop": (0, (*TABLES[1:5], "bed", "sofa", "armchair")),
    "newspaper": (0, (*TABLES, "drawer", "bed", "sofa", "armchair", "garbagecan")),
    "pen": (0, (*TABLES, "drawer", "garbagecan")),
    "pencil": (0, (*TABLES, "drawer", "garbagecan")),
    "pillow": (0, ("bed", "sofa", "armchair")),
    "remotecontrol": (0, (*TABLES, "drawer", "sofa", "armchair", "tvstand")),
    "statue": (0, (*TABLES, "safe", "tvstand")),
    "vase": (0, (*TABLES, "safe")),
    "watch": (0, (*TABLES, "drawer", "safe", "sofa")),
    "desklamp": (SWITCH, ("desk", "dresser", "sidetable", "shelf")),
}


@dataclass(frozen=True, slots=True)
class Room:
    """How many of each receptacle there may be, and what lies about."""

    receptacles: dict[str, tuple[int, int]]
    things: tuple[str, ...]


ROOMS = {
    "kitchen": Room(
        {
            "cabinet": (2, 6), "drawer": (1, 4), "countertop": (1, 3), "stoveburner": (2, 4), "fridge": (1, 1),
            "microwave": (1, 1), "sinkbasin": (1, 1), "coffeemachine": (1, 1), "garbagecan": (1, 1), "diningtable": (0, 1),
        },
        (
            *("mug", "cup", "plate", "bowl", "pan", "pot", "fork", "spoon", "ladle", "spatula", "knife", "apple", "potato"),
            *("tomato", "egg", "bread", "lettuce", "saltshaker", "peppershaker", "dishsponge", "soapbottle"),
        ),
    ),
    "bedroom": Room(
        {
            "bed": (1, 1), "desk": (1, 2), "drawer": (2, 5), "shelf": (0, 4), "dresser": (0, 1), "sidetable": (0, 2),
            "garbagecan": (1, 1), "safe": (0, 1), "laundryhamper": (0, 1),
        },
        (
            *("alarmclock", "book", "cd", "cellphone", "creditcard", "keychain", "laptop", "pen", "pencil", "pillow", "mug"),
            *("bowl", "cloth", "desklamp", "desklamp"),
        ),
    ),
    "bathroom": Room(
        {
            "cabinet": (2, 4), "countertop": (1, 1), "sinkbasin": (1, 2), "toilet": (1, 1), "bathtubbasin": (0, 1),
            "garbagecan": (1, 1), "handtowelholder": (1, 2), "towelholder": (0, 1), "toiletpaperhanger": (1, 1),
            "drawer": (0, 3),
        },
        (
            *("candle", "cloth", "handtowel", "soapbar", "soapbottle", "spraybottle", "tissuebox", "toiletpaper", "towel"),
            "dishsponge",
        ),
    ),
    "livingroom": Room(
        {
            "sofa": (1, 1), "armchair": (0, 2), "coffeetable": (1, 1), "sidetable": (1, 2), "shelf": (0, 4), "drawer": (1, 4),
            "tvstand": (0, 1), "garbagecan": (1, 1), "diningtable": (0, 1), "safe": (0, 1), "dresser": (0, 1),
        },
        (
            *("book", "creditcard", "keychain", "laptop", "newspaper", "pillow", "remotecontrol", "statue", "tissuebox"),
            *("vase", "watch", "plate", "desklamp"),
        ),
    ),
}  # fmt: skip

EASY_PLACES = ("bed", "desk", "shelf", "sofa", "table")
EASY_THINGS = dict.fromkeys(("mug", "cup", "plate", "apple", "egg"), C | H | K) | dict.fromkeys(("pen", "book", "key"), 0)
EASY_APPLIANCES = {CLEAN: "sink", HOT: "microwave", COOL: "fridge"}
EASY_KINDS = {KINDS[0]: 34, KINDS[1]: 18, KINDS[2]: 15, KINDS[3]: 12, KINDS[4]: 12, KINDS[5]: 9}


class _Home:
    """Facts as they are drawn, with ids that sort at random within a name."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.facts = rng, Facts(start="start")

    def receptacle(self, kind: str, place: str = "") -> str:
        key = self._key(kind, self.facts.receptacles)
        self.facts.receptacles[key] = kind
        self.facts.places[key] = place or f"at {key}"
        if kind in OPENABLE:
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
    """The game of that size and number; the last few hundred are kept."""
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
    name = rng.choices(list(ROOMS), weights=(45, 25, 15, 15))[0]
    room, home = ROOMS[name], _Home(rng)
    for kind, (low, high) in room.receptacles.items():
        last = ""
        for _ in range(rng.randint(low, high)):
            # Neighbours of a kind may be reached from one place, as in the original's houses.
            place = home.facts.places[last] if last and rng.random() < 0.15 else ""
            last = home.receptacle(kind, place)
    kinds = home.kinds()
    home.facts.fits = {(receptacle, thing) for thing in room.things for receptacle in THINGS[thing][1] if receptacle in kinds}
    for kind in room.things:
        abilities, where = THINGS[kind]
        if places := home.of(where):
            for _ in range(1 if abilities & SWITCH else rng.choices((0, 1, 2, 3), weights=(30, 35, 25, 10))[0]):
                home.thing(kind, abilities, rng.choice(places))
    goal = _choose_goal(rng, home)
    return None if goal is None else (goal, home.facts)


def _choose_goal(rng: random.Random, home: _Home) -> HouseholdGoal | None:
    """A task that the household has the things for. Its kind is drawn first: else there would be little but placing."""
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
    """Three or four places; the thing is in none that the task names, so one or two others must be looked at."""
    kind = rng.choices(list(EASY_KINDS), weights=list(EASY_KINDS.values()))[0]
    home = _Home(rng)
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
