"""The articles of the invented encyclopaedia: written from entities in several wordings, and read again.

Every fact of an entity is in exactly one sentence of its article. `read_fact` finds it with the patterns that wrote it; the
solver reads with it. Articles may mention other entities, but no question depends on a mention.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ..retrieve.types import Passage
from .world import TEXTS, Entity, make_world

SENTENCES: dict[str, list[list[str]]] = TEXTS["sentences"]
"""Per kind: groups of sentences; an article has one sentence of each group. A slot is a fact, a trait or the name."""
MENTIONS: dict[str, dict[str, Any]] = TEXTS["mentions"]
"""Per kind: the relation to the article that may mention an entity of this kind, and the sentences that mention it."""
_SUBJECT = "\x00"
"""Replaces the name of an article's subject while the article is read."""


def write_article(entity: Entity, rng: random.Random, mentions: Mapping[str, tuple[str, str]]) -> str:
    """The text of one article. `mentions` maps an entity's name to the kind and name of an entity to mention."""
    slots = _slots(entity)
    text = [rng.choice(group).format_map(slots) for group in SENTENCES[entity.kind]]
    if entity.name in mentions:
        kind, other = mentions[entity.name]
        text.append(rng.choice(MENTIONS[kind]["sentences"]).format(other=other))
    return " ".join(text)


def encyclopaedia_passages(seed: int = 0) -> list[Passage]:
    """One passage per entity, in random order."""
    world, rng = make_world(seed), random.Random(f"articles {seed}")
    mentions: dict[str, tuple[str, str]] = {}
    for entity in world.values():
        if entity.kind in MENTIONS and rng.random() < 0.7:
            mentions[entity.facts[MENTIONS[entity.kind]["relation"]]] = (entity.kind, entity.name)
    order = list(world.values())
    rng.shuffle(order)
    return [Passage(str(number), each.name, write_article(each, rng, mentions)) for number, each in enumerate(order, 1)]


def read_fact(kind: str, name: str, relation: str, text: str) -> str | None:
    """The value of a relation in the article of its subject; None if the text does not contain it."""
    text = text.replace(name, _SUBJECT)
    for pattern in _patterns(kind, relation):
        if match := pattern.search(text):
            return match["found"].replace(_SUBJECT, name)
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
