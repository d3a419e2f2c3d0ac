"""The solver of the shop: the actions that buy the product of a goal, which it knows.

It searches with the words of the instruction, then with those of the product's name, turns at most five pages, opens the
product, clicks the options of the goal and buys. It has the full score for every goal of the generated catalogues; in WebShop's
catalogue a few goals cannot be met, because their product does not match what they ask for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ...errors import ConfigError
from ...types import Task
from .catalogue.catalogue import MAX_RESULTS, open_catalogue
from .catalogue.goals import ShopGoal
from .shop.visit import Visit

# Parts of an instruction that do not describe the product.
_FILLER = re.compile(r"^(?:find me|i am looking for|i need|i would like|buy an?)\s+", re.IGNORECASE)
_BOUND = re.compile(r",? (?:and price lower than|below) [\d.]+ dollars\.?$")
_BRACKETS = re.compile(r"[\[\]]")


def queries(goal: ShopGoal) -> list[str]:
    """Search queries, the most promising first."""
    asked = asked_for(goal)
    plain = [asked.partition(" with color:")[0].partition(" with size:")[0], asked, goal.name, f"{goal.name} {asked}"]
    return list(dict.fromkeys(_BRACKETS.sub(" ", text).strip() for text in plain if text.strip()))


def asked_for(goal: ShopGoal) -> str:
    """The instruction without its opening and its price bound."""
    return _FILLER.sub("", _BOUND.sub("", goal.instruction))


def solve(visit: Visit) -> Iterator[str]:
    """Actions. Each must be taken before the next is asked for, because it depends on the page."""
    goal, target = visit.goal, visit.goal.asin.lower()
    for query in queries(goal):
        yield f"search[{query}]"
        pages = -(-min(len(visit.results), MAX_RESULTS) // visit.shelves.page_size)
        for number in range(1, pages + 1):
            if target in visit.clickables:
                break
            if number < pages:
                yield "click[next >]"
        if target in visit.clickables:
            break
    else:
        raise ConfigError(f"the solver does not find {goal.asin} in the catalogue")
    yield f"click[{target}]"
    for value in chosen_options(visit):
        yield f"click[{value}]"
    yield "click[buy now]"


def chosen_options(visit: Visit) -> list[str]:
    """The option values of the goal that the product offers, in the order of its page."""
    goal = visit.goal
    wanted = list(goal.options.values()) if isinstance(goal.options, dict) else list(goal.options)
    product = visit.shelves.product(goal.asin)
    return [value for values in product.options.values() for value in values if value in wanted]


def play(visit: Visit) -> list[tuple[str, str]]:
    """Play a visit to its end. Returns each action with the next page."""
    return [(action, visit.step(action).observation) for action in solve(visit)]


async def solve_env(env: Any, task: Task) -> float:
    """Play an environment that was reset to the task. A second visit determines the actions. Returns the score."""
    catalogue = open_catalogue(task.fields.get("catalogue", "generated"))
    visit = Visit(catalogue, ShopGoal.from_dict(task.fields["goal"]))
    for action in solve(visit):
        await env.step(action)
        visit.step(action)
    return float(env.score)
