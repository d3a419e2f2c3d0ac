"""The solver of the shop: a goal in, the actions that buy it out.

It knows which product is meant. It searches with the words of the instruction, then with those of the product's name, turns at
most five pages, opens the product, clicks the options of the goal and buys. On catalogues that are made here this has the full
score for every goal; on the original's, a few goals cannot be met (their own product does not match what they ask for).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ...errors import ConfigError
from ...types import Task
from .catalogue.goals import ShopGoal
from .shop.visit import MAX_RESULTS, Visit

# What an instruction says beside what is wanted.
_FILLER = re.compile(r"^(?:find me|i am looking for|i need|i would like|buy an?)\s+", re.IGNORECASE)
_BOUND = re.compile(r",? (?:and price lower than|below) [\d.]+ dollars\.?$")
_BRACKETS = re.compile(r"[\[\]]")


def queries(goal: ShopGoal) -> list[str]:
    """What to search for, the likeliest first."""
    asked = asked_for(goal)
    plain = [asked.partition(" with color:")[0].partition(" with size:")[0], asked, goal.name, f"{goal.name} {asked}"]
    return list(dict.fromkeys(_BRACKETS.sub(" ", text).strip() for text in plain if text.strip()))


def asked_for(goal: ShopGoal) -> str:
    """The instruction without its opening and its price: what is wanted, with its options."""
    return _FILLER.sub("", _BOUND.sub("", goal.instruction))


def solve(visit: Visit) -> Iterator[str]:
    """Actions, to be taken one by one: the next depends on the page that the last led to."""
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
    """The goal's option values that the open product has, in the order of its page."""
    goal = visit.goal
    wanted = list(goal.options.values()) if isinstance(goal.options, dict) else list(goal.options)
    product = visit.shelves.product(goal.asin)
    return [value for values in product.options.values() for value in values if value in wanted]


def play(visit: Visit) -> list[tuple[str, str]]:
    """Play a visit to its end: each action with the page that it led to."""
    return [(action, visit.step(action).observation) for action in solve(visit)]


async def solve_env(env: Any, task: Task) -> float:
    """Play an environment that was reset to the task, beside a visit of its own that says what comes next."""
    from .catalogue.catalogue import open_catalogue

    catalogue = open_catalogue(task.fields.get("catalogue", "generated"))
    visit = Visit(catalogue, ShopGoal.from_dict(task.fields["goal"]))
    for action in solve(visit):
        await env.step(action)
        visit.step(action)
    return float(env.score)
