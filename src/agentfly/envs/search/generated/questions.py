"""Questions about the invented encyclopaedia, with their answers and the paths to them.

A question follows one fact ("In which town was Mael Dorn born?") or two ("Which river flows through the town where Mael Dorn
was born?"). Its split is a hash of its subject's name, so no subject is asked about in two splits.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from .world import RELATIONS, Entity, make_world

# The questions for a fact; {x} is a name or a description.
ASKS: dict[tuple[str, str], tuple[str, ...]] = {
    ("region", "capital"): ("What is the capital of {x}?", "Which town is the capital of {x}?"),
    ("mountain", "region"): ("In which region does {x} rise?", "Which region is {x} in?"),
    ("mountain", "height"): ("How many metres high is {x}?", "What is the height of {x} in metres?"),
    ("river", "source"): ("On which mountain does {x} rise?", "Which mountain is the source of {x}?"),
    ("river", "length"): ("How many kilometres long is {x}?", "What is the length of {x} in kilometres?"),
    ("town", "region"): ("In which region does {x} lie?", "Which region does {x} belong to?"),
    ("town", "river"): ("Which river flows through {x}?", "On which river does {x} stand?"),
    ("town", "founded"): ("In what year was {x} founded?", "When was {x} founded?"),
    ("town", "craft"): ("What craft is {x} known for?", "By which craft do the people of {x} live?"),
    ("person", "birthplace"): ("In which town was {x} born?", "What is the birthplace of {x}?"),
    ("person", "teacher"): ("Who taught {x}?", "Whose pupil was {x}?"),
    ("person", "born"): ("In what year was {x} born?", "When was {x} born?"),
    ("person", "occupation"): ("What was the occupation of {x}?", "What did {x} do for a living?"),
    ("work", "author"): ("Who made {x}?", "Whose work is {x}?"),
    ("work", "setting"): ("In which town is {x} set?", "Where does {x} take place?"),
    ("work", "year"): ("In what year was {x} finished?", "From which year does {x} date?"),
    ("event", "place"): ("In which town did {x} take place?", "Where did {x} take place?"),
    ("event", "leader"): ("Who led {x}?", "Who was the leader of {x}?"),
    ("event", "year"): ("In what year did {x} take place?", "When did {x} take place?"),
    ("school", "town"): ("In which town does {x} stand?", "Where does {x} stand?"),
    ("school", "founder"): ("Who founded {x}?", "Who was the founder of {x}?"),
    ("school", "opened"): ("In what year did {x} open?", "When did {x} open?"),
}
# The description of an entity through a fact of another.
DESCRIBED: dict[tuple[str, str], str] = {
    ("region", "capital"): "the capital of {x}",
    ("mountain", "region"): "the region in which {x} rises",
    ("river", "source"): "the mountain on which {x} rises",
    ("town", "region"): "the region in which {x} lies",
    ("town", "river"): "the river that flows through {x}",
    ("person", "birthplace"): "the town where {x} was born",
    ("person", "teacher"): "the teacher of {x}",
    ("work", "author"): "the author of {x}",
    ("work", "setting"): "the town in which {x} is set",
    ("event", "place"): "the town where {x} took place",
    ("event", "leader"): "the leader of {x}",
    ("school", "town"): "the town where {x} stands",
    ("school", "founder"): "the founder of {x}",
}
FORMS = {"painting": "painter", "opera": "composer", "symphony": "composer", "sculpture": "sculptor"}
WITH_ARTICLE = ("river", "event", "school")


@dataclass(frozen=True, slots=True)
class Question:
    """`path` is the subject and the relations to follow from it; `pages` are the articles on that path, in order."""

    text: str
    answer: str
    kind: str
    path: tuple[str, ...]
    pages: tuple[str, ...]

    @property
    def hops(self) -> int:
        return len(self.path) - 1

    @property
    def split(self) -> str:
        return split_of(self.path[0])


def split_of(subject: str) -> str:
    """The split of a subject: 80 % train, 10 % validation, 10 % test."""
    bucket = zlib.crc32(subject.encode()) % 10
    return "validation" if bucket == 0 else "test" if bucket == 1 else "train"


@lru_cache(maxsize=4)
def all_questions(seed: int = 0) -> tuple[Question, ...]:
    """Every question of a world, in every wording."""
    world = make_world(seed)
    found: list[Question] = []
    for entity in world.values():
        for relation, target in RELATIONS[entity.kind].items():
            found += _ask(world, entity, (relation,))
            for onward in RELATIONS.get(target, {}):
                found += _ask(world, entity, (relation, onward))
    return tuple(found)


def _ask(world: Mapping[str, Entity], entity: Entity, relations: tuple[str, ...]) -> list[Question]:
    shown, at, pages = _named(entity), entity, [entity.name]
    for relation in relations[:-1]:
        shown = _described(at, relation, shown)
        at = world[at.facts[relation]]
        pages.append(at.name)
    answer = at.facts[relations[-1]]
    kind = "/".join((entity.kind, *relations))
    asked = [
        Question(ask.format(x=shown), answer, kind, (entity.name, *relations), tuple(pages))
        for ask in ASKS[at.kind, relations[-1]]
    ]
    # The question must not contain its answer, as on a path that leads back to its subject.
    return [question for question in asked if answer not in question.text and len(set(pages)) == len(pages)]


def _named(entity: Entity) -> str:
    return f"the {entity.name}" if entity.kind in WITH_ARTICLE else entity.name


def _described(entity: Entity, relation: str, shown: str) -> str:
    text = DESCRIBED[entity.kind, relation].format(x=shown)
    if entity.kind == "work" and relation == "author":
        return text.replace("author", FORMS.get(entity.traits["form"], "author"), 1)
    return text
