"""Questions about the invented encyclopaedia, with their answers and the paths to them.

A question follows one fact ("In which town was Mael Dorn born?") or two ("Which river flows through the town where Mael Dorn
was born?"). Its split is a hash of its subject's name, so no subject is asked about in two splits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from ...task_sets import split_of
from .world import RELATIONS, TEXTS, Entity, make_world

ASKS: dict[str, dict[str, list[str]]] = TEXTS["asks"]
"""Per kind and relation: the questions for a fact; {x} is a name or a description."""
DESCRIBED: dict[str, dict[str, str]] = TEXTS["described"]
"""Per kind and relation: the description of an entity through a fact of another."""
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


@lru_cache(maxsize=4)
def all_questions(seed: int = 0) -> tuple[Question, ...]:
    """Every question of a world, in every wording."""
    world = make_world(seed)
    questions: list[Question] = []
    for entity in world.values():
        for relation, target in RELATIONS[entity.kind].items():
            questions += _ask(world, entity, (relation,))
            for onward in RELATIONS.get(target, {}):
                questions += _ask(world, entity, (relation, onward))
    return tuple(questions)


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
        for ask in ASKS[at.kind][relations[-1]]
    ]
    # The question must not contain its answer, as on a path that leads back to its subject.
    return [question for question in asked if answer not in question.text and len(set(pages)) == len(pages)]


def _named(entity: Entity) -> str:
    return f"the {entity.name}" if entity.kind in WITH_ARTICLE else entity.name


def _described(entity: Entity, relation: str, shown: str) -> str:
    text = DESCRIBED[entity.kind][relation].format(x=shown)
    if entity.kind == "work" and relation == "author":
        return text.replace("author", FORMS.get(entity.traits["form"], "author"), 1)
    return text
