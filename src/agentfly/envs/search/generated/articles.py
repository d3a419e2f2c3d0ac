"""The articles of the invented encyclopaedia: written from entities in several wordings, and read again.

Every fact of an entity is in exactly one sentence of its article. `read_fact` finds it with the patterns that wrote it; the
solver reads with it. Articles may mention other entities, but no question depends on a mention.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from functools import lru_cache

from ..retrieve.types import Passage
from .world import Entity, make_world

# Per kind: groups of sentences; an article has one sentence of each group. A slot is a fact, a trait or the name.
SENTENCES: dict[str, tuple[tuple[str, ...], ...]] = {
    "region": (
        ("{name} is one of the eight regions of the Long Coast.", "{name} is a region of wide valleys and old roads."),
        ("Its capital is {capital}.", "It is governed from {capital}, its capital.", "The capital of {name} is {capital}."),
        ("Every spring a fair is held on the border.", "Travellers praise its orchards.", "The winters there are mild."),
    ),
    "mountain": (
        ("{name} is a mountain in the region of {region}.", "{name} rises in {region}, far from the sea."),
        ("It is {height} metres high.", "Its summit lies at {height} metres.", "Surveyors give its height as {height} metres."),
        ("Shepherds keep a hut below the pass.", "The northern face is steep.", "Snow stays on it until early summer."),
    ),
    "river": (
        ("The {name} rises on {source}.", "The {name} has its source on {source}.", "The {name} springs from {source}."),
        ("It is {length} kilometres long.", "Over {length} kilometres it makes its way to the sea."),
        ("Barges carry timber on it.", "Its water is cold and clear.", "Herons nest along the banks."),
    ),
    "town": (
        (
            "{name} is a town in {region}, founded in {founded}.",
            "{name}, founded in {founded}, is a town in {region}.",
            "Founded in {founded}, the town of {name} lies in {region}.",
        ),
        ("It stands on the {river}.", "The {river} flows through it.", "Its old quarter lies on both banks of the {river}."),
        ("The town is known for its {craft}.", "Its people live mainly by {craft}.", "{name} made its name by {craft}."),
        ("About {people} people live there.", "The last count found {people} inhabitants."),
    ),
    "person": (
        (
            "{name}, born in {birthplace} in {born}, was a noted {occupation}.",
            "{name} was {an} {occupation} who was born in {born} in {birthplace}.",
            "The {occupation} {name} was born in {birthplace} in the year {born}.",
        ),
        (
            "{He} was taught by {teacher}.",
            "{He} learned the trade from {teacher}.",
            "{He} spent {his} youth as a pupil of {teacher}.",
        ),
        (
            "{His} mother was {parent}.",
            "{He} came from a family of modest means.",
            "{He} is said to have walked to work every day.",
            "Letters that {He_low} wrote are kept to this day.",
        ),
    ),
    "work": (
        ("{name} is {a_form} by {author}.", "{name} is the best known {form} of {author}.", "{author} made the {form} {name}."),
        ("It was finished in {year}.", "It was first shown to the public in {year}.", "It dates from {year}."),
        ("It is set in {setting}.", "Its scene is the town of {setting}.", "The whole of it takes place in {setting}."),
        ("Critics were slow to praise it.", "It has been copied many times.", "A second version is lost."),
    ),
    "event": (
        ("The {name} took place in {place} in {year}.", "In {year} the {name} took place in {place}."),
        ("It was led by {leader}.", "{leader} stood at its head.", "Its leader was {leader}."),
        ("It lasted {days} days.", "After {days} days it was over.", "People speak of it still."),
    ),
    "school": (
        ("The {name} is a place of learning in {town}.", "The {name} stands in {town}, near the old gate."),
        ("{founder} founded it, and it opened in {opened}.", "It was founded by {founder} and opened in {opened}."),
        ("It has {pupils} pupils.", "Its library is open to all.", "Its tower can be seen from afar."),
    ),
}
_SUBJECT = "\x00"
"""Replaces the name of an article's subject while the article is read."""
MENTIONS = {
    ("birthplace", "person"): ("Among its sons and daughters is {other}.", "A street there is named after {other}."),
    ("author", "work"): ("One of the best known works is {other}.", "{other} made the name known abroad."),
    ("source", "river"): ("Nearby the {other} begins.",),
}


def write_article(entity: Entity, rng: random.Random, mentions: Mapping[str, tuple[str, str]]) -> str:
    """The text of one article. `mentions` maps an entity's name to a relation and the entity that names it."""
    slots = _slots(entity)
    text = [rng.choice(group).format_map(slots) for group in SENTENCES[entity.kind]]
    if entity.name in mentions:
        relation, other = mentions[entity.name]
        kind = next(kind for name, kind in MENTIONS if name == relation)
        text.append(rng.choice(MENTIONS[relation, kind]).format(other=other))
    return " ".join(text)


def encyclopaedia_passages(seed: int = 0) -> list[Passage]:
    """One passage per entity, in random order."""
    world, rng = make_world(seed), random.Random(f"articles {seed}")
    mentions: dict[str, tuple[str, str]] = {}
    for entity in world.values():
        for relation, kind in MENTIONS:
            if kind == entity.kind and rng.random() < 0.7:
                mentions[entity.facts[relation]] = (relation, entity.name)
    order = list(world.values())
    rng.shuffle(order)
    return [Passage(str(number), each.name, write_article(each, rng, mentions)) for number, each in enumerate(order, 1)]


def read_fact(kind: str, name: str, relation: str, text: str) -> str | None:
    """The value of a relation in the article of its subject; None if the text does not contain it."""
    text = text.replace(name, _SUBJECT)
    for pattern in _patterns(kind, relation):
        if found := pattern.search(text):
            return found["found"].replace(_SUBJECT, name)
    return None


@lru_cache(maxsize=256)
def _patterns(kind: str, relation: str) -> tuple[re.Pattern[str], ...]:
    slot = "{" + relation + "}"
    return tuple(
        re.compile(r"(?:^|(?<=\. ))" + _pattern(sentence, relation))
        for group in SENTENCES[kind]
        for sentence in group
        if slot in sentence
    )


def _pattern(sentence: str, relation: str) -> str:
    """A sentence as a regular expression: the wanted slot is a group, other slots match any words."""
    made = ""
    for part in re.split(r"(\{\w+\})", sentence):
        if part == "{name}":
            made += _SUBJECT
        elif part == "{" + relation + "}":
            made += "(?P<found>[^.,]+?)"
        elif part.startswith("{"):
            made += "[^.]+?"
        else:
            made += re.escape(part)
    return made


def _slots(entity: Entity) -> dict[str, str]:
    slots = {"name": entity.name, **entity.facts, **entity.traits}
    if "He" in slots:
        slots |= {"His": slots["his"].capitalize(), "He_low": slots["He"].lower(), "an": _an(slots["occupation"])}
        slots["parent"] = f"{_an(slots['parent'])} {slots['parent']}"
    if "form" in slots:
        slots["a_form"] = f"{_an(slots['form'])} {slots['form']}"
    return slots


def _an(noun: str) -> str:
    return "an" if noun[0] in "aeiou" else "a"
