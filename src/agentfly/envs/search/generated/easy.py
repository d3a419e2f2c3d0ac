"""The small world for small models: people with short names, and one page with two facts for each.

    Bolo     The friend of Bolo is Kadi. The city of Bolo is Lumo.
    asked    What is the city of Bolo?       What is the color of the friend of Bolo?

The people of a split know only each other, so no page of one split contains a fact of another split.
"""

from __future__ import annotations

import random
from functools import lru_cache
from itertools import product

from ..retrieve.types import Passage
from .questions import Question
from .world import Entity

LINKS = ("friend", "teacher", "boss")
VALUES = ("city", "color", "number")
COLORS = ("red", "green", "blue", "yellow")
SIZES = {"train": 1000, "validation": 160, "test": 160}
ONE_FACT = ("What is the {value} of {x}?", "Tell me the {value} of {x}.")
TWO_FACTS = ("What is the {value} of the {link} of {x}?", "Tell me the {value} of the {link} of {x}.")


@lru_cache(maxsize=4)
def easy_world(seed: int = 0) -> dict[str, dict[str, Entity]]:
    """The people of each split, by name."""
    rng = random.Random(f"easy search {seed}")
    syllables = ["".join(pair) for pair in product("bdfgklmnprstvz", "aeiou")]
    names = [f"{one}{other}".capitalize() for one, other in product(syllables, repeat=2) if one != other]
    rng.shuffle(names)
    cities = [names.pop() for _ in range(300)]
    world = {}
    for split, size in SIZES.items():
        people = [names.pop() for _ in range(size)]
        world[split] = {name: _person(rng, name, people, cities) for name in people}
    return world


def _person(rng: random.Random, name: str, people: list[str], cities: list[str]) -> Entity:
    other = rng.choice(people)
    while other == name:
        other = rng.choice(people)
    drawn = {"city": rng.choice(cities), "color": rng.choice(COLORS), "number": str(rng.randint(2, 99))}
    value = rng.choice(VALUES)
    return Entity(name, "person", {rng.choice(LINKS): other, value: drawn[value]})


def easy_passages(seed: int = 0) -> list[Passage]:
    """One page per person, in random order."""
    rng = random.Random(f"easy pages {seed}")
    people = [person for split in easy_world(seed).values() for person in split.values()]
    rng.shuffle(people)
    passages = []
    for number, person in enumerate(people, 1):
        facts = [f"The {relation} of {person.name} is {value}." for relation, value in person.facts.items()]
        rng.shuffle(facts)
        passages.append(Passage(str(number), person.name, " ".join(facts)))
    return passages


@lru_cache(maxsize=4)
def easy_questions(split: str, seed: int = 0) -> tuple[Question, ...]:
    """Every question about the people of a split, as many of one fact as of two."""
    people = easy_world(seed)[split]
    questions = []
    for person in people.values():
        (link, other), (value, relation) = person.facts.items()
        onward, answer = list(people[other].facts.items())[1]
        for asks, relations, said, pages in (
            (ONE_FACT, (value,), relation, (person.name,)),
            (TWO_FACTS, (link, onward), answer, (person.name, other)),
        ):
            texts = [ask.format(value=relations[-1], link=link, x=person.name) for ask in asks]
            questions += [Question(text, said, "/".join(relations), (person.name, *relations), pages) for text in texts]
    return tuple(questions)
