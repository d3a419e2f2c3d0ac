"""An invented world: entities with facts, generated from a seed.

Eight regions have mountains, rivers and towns; people were born and taught there; they made works, led events and founded
schools. A fact is a value (a year, a craft) or the name of another entity, so facts can be followed. Names are unique, and do
not reveal places or dates. `articles.py` writes the text. The words are those of `encyclopaedia.json`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ...task_sets import read_table

# Per kind and relation: the kind of the entity that the fact names, or "" for a value.
RELATIONS: dict[str, dict[str, str]] = {
    "region": {"capital": "town"},
    "mountain": {"region": "region", "height": ""},
    "river": {"source": "mountain", "length": ""},
    "town": {"region": "region", "river": "river", "founded": "", "craft": ""},
    "person": {"birthplace": "town", "teacher": "person", "born": "", "occupation": ""},
    "work": {"author": "person", "setting": "town", "year": ""},
    "event": {"place": "town", "leader": "person", "year": ""},
    "school": {"town": "town", "founder": "person", "opened": ""},
}
SIZES = {"region": 8, "mountain": 30, "river": 36, "town": 110, "person": 400, "work": 320, "event": 140, "school": 60}
TEXTS: dict[str, Any] = read_table(__package__, "encyclopaedia.json")
"""The words of names and crafts, and the sentences of articles and questions."""
WORDS: dict[str, list[str]] = TEXTS["words"]
OCCUPATIONS: dict[str, str] = TEXTS["occupations"]
"""The occupation that makes each form of work."""


@dataclass(frozen=True, slots=True)
class Entity:
    """One subject of an article. `facts` maps relations to values; `traits` are for the wording, and are never asked about."""

    name: str
    kind: str
    facts: Mapping[str, str]
    traits: Mapping[str, str] = field(default_factory=dict)


@lru_cache(maxsize=4)
def make_world(seed: int = 0) -> dict[str, Entity]:
    """Every entity by its name. The same seed gives the same world."""
    return _Maker(random.Random(f"encyclopaedia {seed}")).make()


class _Maker:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.words: set[str] = set()
        self.world: dict[str, Entity] = {}
        self.names: dict[str, list[str]] = {kind: [] for kind in SIZES}

    def make(self) -> dict[str, Entity]:
        titles = [f"The {adjective} {noun}" for adjective in WORDS["adjectives"] for noun in WORDS["nouns"]]
        events = [f"{noun} {kind}" for noun in (*WORDS["adjectives"], *WORDS["nouns"]) for kind in WORDS["event_kinds"]]
        self.rng.shuffle(titles)
        self.rng.shuffle(events)
        namers: dict[str, Callable[[], str]] = {
            "region": lambda: self.word(3),
            "mountain": lambda: f"Mount {self.word(2)}",
            "river": lambda: f"River {self.word(2)}",
            "town": lambda: self.word(1) + self.rng.choice(WORDS["place_endings"]),
            "person": lambda: f"{self.word(2, fresh=False)} {self.word(2)}",
            "work": titles.pop,
            "event": events.pop,
            "school": lambda: f"{self.word(2)} {self.rng.choice(WORDS['school_kinds'])}",
        }
        for kind, size in SIZES.items():
            while len(self.names[kind]) < size:
                name = namers[kind]()
                if name not in self.names[kind]:
                    self.names[kind].append(name)
        for kind in SIZES:
            for number, name in enumerate(self.names[kind]):
                facts, traits = getattr(self, f"_{kind}")(number)
                self.world[name] = Entity(name, kind, facts, traits)
        return self.world

    def word(self, syllables: int, *, fresh: bool = True) -> str:
        """A word that sounds like a name. A `fresh` word was not used before."""
        while True:
            parts = [self.rng.choice(WORDS["onsets"]) + self.rng.choice(WORDS["vowels"]) for _ in range(syllables)]
            made = ("".join(parts) + self.rng.choice(WORDS["codas"])).capitalize()
            if not fresh:
                return made
            if made not in self.words:
                self.words.add(made)
                return made

    def pick(self, kind: str) -> str:
        return self.rng.choice(self.names[kind])

    def year(self, low: int, high: int) -> str:
        return str(self.rng.randint(low, high))

    def _region(self, number: int) -> tuple[dict[str, str], dict[str, str]]:
        return {"capital": self.names["town"][number]}, {}

    def _mountain(self, number: int) -> tuple[dict[str, str], dict[str, str]]:
        return {"region": self.pick("region"), "height": self.year(812, 4987)}, {}

    def _river(self, number: int) -> tuple[dict[str, str], dict[str, str]]:
        return {"source": self.pick("mountain"), "length": self.year(61, 986)}, {}

    def _town(self, number: int) -> tuple[dict[str, str], dict[str, str]]:
        # The first towns are the capitals, one per region.
        region = self.names["region"][number] if number < SIZES["region"] else self.pick("region")
        facts = {"region": region, "river": self.pick("river"), "founded": self.year(402, 1390)}
        inhabitants = f"{self.rng.randint(9_000, 310_999):,}"
        return {**facts, "craft": self.rng.choice(WORDS["crafts"])}, {"people": inhabitants}

    def _person(self, number: int) -> tuple[dict[str, str], dict[str, str]]:
        """People are listed by age, so a teacher has a lower number; the first ones taught each other."""
        occupation = self.rng.choice([*OCCUPATIONS.values(), *WORDS["others"]])
        people = self.names["person"]
        older = people[max(0, number - 60) : number - 12] if number > 12 else [people[(number + 1) % 13]]
        born = 1402 + number + self.rng.randint(0, 3)
        facts = {
            "birthplace": self.pick("town"),
            "teacher": self.rng.choice(older),
            "born": str(born),
            "occupation": occupation,
        }
        he = self.rng.choice(("He", "She"))
        return facts, {"He": he, "his": "his" if he == "He" else "her", "parent": self.rng.choice(WORDS["others"])}

    def _work(self, number: int) -> tuple[dict[str, str], dict[str, str]]:
        form = self.rng.choice(list(OCCUPATIONS))
        fitting = [name for name in self.names["person"] if self.world[name].facts["occupation"] == OCCUPATIONS[form]]
        author = self.rng.choice(fitting)
        year = int(self.world[author].facts["born"]) + self.rng.randint(22, 61)
        return {"author": author, "setting": self.pick("town"), "year": str(year)}, {"form": form}

    def _event(self, number: int) -> tuple[dict[str, str], dict[str, str]]:
        leader = self.pick("person")
        year = int(self.world[leader].facts["born"]) + self.rng.randint(20, 55)
        return {"place": self.pick("town"), "leader": leader, "year": str(year)}, {"days": str(self.rng.randint(2, 40))}

    def _school(self, number: int) -> tuple[dict[str, str], dict[str, str]]:
        founder = self.pick("person")
        year = int(self.world[founder].facts["born"]) + self.rng.randint(30, 60)
        return {"town": self.pick("town"), "founder": founder, "opened": str(year)}, {"pupils": str(self.rng.randint(40, 900))}
