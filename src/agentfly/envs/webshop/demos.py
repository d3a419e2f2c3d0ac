"""Visits of `ReactAgent` with `webshop_step`, for supervised training; all of the train split.

The query is made from the instruction, as a model could make it; every observation is the shop's answer. `mistakes` is the
share of visits with one of `SLIPS`, which is played out.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

from ...errors import DataError
from ...tools.text import clean
from .catalogue.catalogue import open_catalogue
from .catalogue.easy import MATERIALS
from .catalogue.goals import ShopGoal
from .shop.visit import Visit
from .solver import asked_for, chosen_options, queries
from .tasks import easy_webshop_tasks, webshop_data_brief_tasks, webshop_data_tasks, webshop_tasks

TOOL = "webshop_step"
MAX_PAGES = 2
SLIPS = ("no options", "one option less", "wrong option", "wrong product", "vague search", "give up")
Tasks = Callable[[str, int | None, int], list[dict[str, Any]]]


def webshop_demos(count: int, seed: int = 0, *, mistakes: float = 0.0) -> list[dict[str, Any]]:
    """Goals of the generated catalogue."""
    return _rows(webshop_tasks, count, seed, mistakes)


def easy_webshop_demos(count: int, seed: int = 0, *, mistakes: float = 0.0) -> list[dict[str, Any]]:
    """Goals of the easy shop; beyond their number they repeat."""
    return _rows(easy_webshop_tasks, count, seed, mistakes)


def webshop_data_demos(count: int, seed: int = 0, *, mistakes: float = 0.0) -> list[dict[str, Any]]:
    """Goals of the published files, from $WEBSHOP_DATA. Half of the searches name the options too.

    So RL can find out which is better.
    """
    return _rows(webshop_data_tasks, count, seed, mistakes, whole=0.5)


def webshop_data_brief_demos(count: int, seed: int = 0, *, mistakes: float = 0.0) -> list[dict[str, Any]]:
    """The same with brief pages."""
    return _rows(webshop_data_brief_tasks, count, seed, mistakes, whole=0.5)


def _rows(tasks: Tasks, count: int, seed: int, mistakes: float, *, whole: float = 0.0) -> list[dict[str, Any]]:
    """Goals whose product is not among the first results of the query are skipped."""
    rng = random.Random(f"webshop demos {seed}")
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        before = len(rows)
        for row in tasks("train", None if count > 2_000 else 2 * count + 50, seed):
            made = _row(row, rng, mistakes, whole)
            rows += [made] if made is not None else []
            if len(rows) == count:
                return rows
        if len(rows) == before:
            raise DataError("no demonstration can be made: none of the goals can be found by the words of its instruction")
    return rows


def _row(row: dict[str, Any], rng: random.Random, mistakes: float, whole: float) -> dict[str, Any] | None:
    goal = ShopGoal.from_dict(row["goal"])
    visit = Visit(open_catalogue(row["catalogue"]), goal, brief=row.get("brief"))
    slip = rng.choice(SLIPS) if rng.random() < mistakes else ""
    query = _whole_query(goal) if whole and rng.random() < whole else _query(goal)
    if not _findable(visit, goal, query):
        return None
    messages = [{"role": "user", "content": row["question"]}]
    for thought, action in _actions(visit, goal, query, slip, rng):
        call = json.dumps({"action": action}, ensure_ascii=False)
        messages.append({"role": "assistant", "content": f"Thought: {thought}\nAction: {TOOL}\nInput: {call}"})
        visit.step(action)
        if not visit.done:
            messages.append({"role": "user", "content": f"Observation: {clean(visit.told)}"})
    if not visit.done:
        messages.append({"role": "assistant", "content": "Thought: it is not here\nAnswer: none"})
    return {**{key: row[key] for key in ("catalogue", "goal", "brief") if key in row}, "messages": messages}


def _findable(visit: Visit, goal: ShopGoal, query: str) -> bool:
    results = visit.shelves.search(query)
    return goal.asin in results[: MAX_PAGES * visit.shelves.page_size]


def _query(goal: ShopGoal) -> str:
    """The instruction without options and price; in the easy shop the product's name."""
    if goal.category == "easy":
        return goal.name
    return re.sub(r"\s+", " ", queries(goal)[0]).lower()


def _whole_query(goal: ShopGoal) -> str:
    """The instruction with its options, without the price."""
    return re.sub(r"[\s\[\]]+", " ", asked_for(goal)).strip().lower()


def _actions(visit: Visit, goal: ShopGoal, query: str, slip: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Thoughts and actions. Each action must be taken before the next is asked for."""
    if slip == "vague search":
        words = [word for word in _query(goal).split() if word not in MATERIALS] or [query]
        query = words[-1]
    yield "search", f"search[{query}]"
    target = goal.asin.lower()
    while target not in visit.clickables and visit.number < MAX_PAGES and slip != "vague search":
        yield "not here", "click[next >]"
    if slip == "give up":
        return
    results = {asin.lower() for asin in visit.results}
    shown = [asin for asin in visit.clickables if asin in results]
    if not shown:  # a vague query may find nothing
        return
    if target not in shown or (slip == "wrong product" and len(shown) > 1):
        target = rng.choice([asin for asin in shown if asin != target] or [target])
    yield "open it", f"click[{target.upper()}]"  # as the page writes it, so that the model can copy it
    for value in _options(visit, slip, rng):
        yield f"choose {value}", f"click[{value}]"
    yield "buy", "click[buy now]"


def _options(visit: Visit, slip: str, rng: random.Random) -> list[str]:
    product = visit.shelves.product(visit.asin)
    offered = [value for values in product.options.values() for value in values]
    wanted = [value for value in chosen_options(visit) if value in offered]
    if slip == "no options":
        return []
    if slip == "one option less" and wanted:
        wanted.remove(rng.choice(wanted))
    if slip == "wrong option" and wanted:
        place = rng.randrange(len(wanted))
        siblings = next(values for values in product.options.values() if wanted[place] in values)
        wanted[place] = rng.choice([value for value in siblings if value != wanted[place]] or [wanted[place]])
    return wanted
