"""Task sets of the shop. Rows are `{"id", "question", "catalogue", "goal"}`.

    webshop         goals of the generated catalogue; each product belongs to one split, and training goals with the question of
                    a validation or test goal are left out
    easy_webshop    goals of the easy shop, with short pages; each goal belongs to one split
    webshop_data    WebShop's files in `$WEBSHOP_DATA`, synthetic goals, with the published split: after the shuffle with seed
                    233 the first 500 are for test, the next 1,000 for validation, the rest for training, but for goals
                    with the question of one of the others
    webshop_human   the same with the instructions that people wrote
    webshop_data_brief     the goals of webshop_data with brief pages, which make a visit a third shorter

The model reads the question; the goal is for the environment and the rewards.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

from ...errors import ConfigError, DataError
from ..task_sets import check_count, check_split, split_of
from .catalogue.catalogue import Catalogue, full_name, open_catalogue
from .catalogue.easy import easy_goals
from .catalogue.goals import PLACES, GoalKind, Goals, ShopGoal

VARIABLE = "WEBSHOP_DATA"


def webshop_tasks(split: str, count: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Buy something in the generated catalogue, such as "Find me machine washable throw blankets ..."."""
    catalogue = open_catalogue("generated")
    goals, wanted = catalogue.goals(), check_split(split)
    splits = [split_of(asin) for asin in catalogue.asins]
    places = [place for place in range(len(goals)) if splits[goals.owner(place)] == wanted]
    held = [place for place in range(len(goals)) if splits[goals.owner(place)] != "train"]
    left_out = _asked_elsewhere(goals, places, held) if wanted == "train" else frozenset()
    return _rows(goals, places, catalogue, split, count, seed, left_out)


def easy_webshop_tasks(split: str, count: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Buy a small thing, such as "Buy a wool hat: red, large, below 20 dollars."."""
    catalogue = open_catalogue("easy")
    goals, wanted = list(easy_goals(list(catalogue.products))), check_split(split)
    places = [place for place, goal in enumerate(goals) if split_of(goal.instruction) == wanted]
    return _rows(goals, places, catalogue, split, count, seed)


def webshop_data_tasks(split: str, count: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Synthetic goals of WebShop's files, in `$WEBSHOP_DATA` (a folder, or `FOLDER/items_shuffle.json#100000`)."""
    return _published(split, count, seed, "synthetic")


def webshop_data_brief_tasks(split: str, count: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """The goals and splits of `webshop_data`, with brief pages: no repeated instruction, and what is chosen is said."""
    return [{**row, "brief": True} for row in webshop_data_tasks(split, count, seed)]


def webshop_human_tasks(split: str, count: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Goals that people wrote (`items_human_ins.json`), over WebShop's files in `$WEBSHOP_DATA`."""
    return _published(split, count, seed, "human")


def row_of(goal: ShopGoal, catalogue: str, number: int) -> dict[str, Any]:
    return {"id": f"{goal.asin}-{number}", "question": goal.instruction, "catalogue": catalogue, "goal": goal.to_dict()}


def _published(split: str, count: int | None, seed: int, kind: GoalKind) -> list[dict[str, Any]]:
    first, end = PLACES[check_split(split)]
    where = os.environ.get(VARIABLE)
    if not where:
        raise ConfigError(
            f"{VARIABLE} is not set: it names the folder with WebShop's files (items_shuffle_1000.json and its companions); "
            f"the task set 'webshop' needs no files"
        )
    catalogue = open_catalogue(where)
    goals = catalogue.goals(kind)
    if not len(goals):
        needs = "items_human_ins.json" if kind == "human" else "items_ins_v2_1000.json (or items_ins_v2.json)"
        raise DataError(f"{where}: no {kind} goals; they come from {needs} beside the products")
    places = range(len(goals))[first:end]
    if not places:
        raise DataError(f"{where}: the split {split!r} begins at goal {first}, but there are only {len(goals)}")
    # Test goals keep the published order; the others are shuffled by the seed. Only the wanted ones are made.
    wanted = check_count(split, count)
    order = list(places) if split == "test" else random.Random(f"webshop {split} {seed}").sample(places, len(places))
    if split == "train":
        left_out = _asked_elsewhere(goals, places, range(first))
        order = [place for place in order if place not in left_out]
    name = full_name(where)
    return [{**row_of(goals[place], name, place), "id": str(place)} for place in order[:wanted]]


def _rows(
    goals: Sequence[ShopGoal],
    places: list[int],
    catalogue: Catalogue,
    split: str,
    count: int | None,
    seed: int,
    left_out: frozenset[int] = frozenset(),
) -> list[dict[str, Any]]:
    """Goals at some of these places, in a seeded order. Only the wanted ones are made."""
    wanted = check_count(split, count)
    random.Random(f"webshop {split} {seed}").shuffle(places)
    places = [place for place in places if place not in left_out]
    return [row_of(goals[place], catalogue.name, place) for place in places[:wanted]]


def _asked_elsewhere(goals: Goals, training: Sequence[int], held: Sequence[int]) -> frozenset[int]:
    """The places of training goals whose question is also one of validation or test: two products can have equal questions."""

    def beginning(place: int) -> str | None:
        """What a synthetic question begins with, without making the goal."""
        return goals.products[goals.owner(place)].instruction if goals.kind == "synthetic" else None

    beginnings, asked = set(map(beginning, held)), {goals[place].instruction for place in held}
    return frozenset(place for place in training if beginning(place) in beginnings and goals[place].instruction in asked)
