"""The published score of a purchase, from 0 to 1, with its parts.

    score = r_type * ((attributes hit + options hit + price ok) / (number of attributes + number of options + 1))

Yao et al., "WebShop: Towards Scalable Real-World Web Interaction with Grounded Language Agents", 2022, section 3; the details
are those of its environment, as recorded episodes show them. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...task_sets import read_table
from ..catalogue.goals import ShopGoal
from ..catalogue.products import ShopProduct
from .fuzzy import token_set_ratio

ALIKE = 85
COLOURS: list[str] = read_table(__package__, "colours.json")


@dataclass(frozen=True, slots=True)
class PurchaseScore:
    """The total and its parts. `options` is 1 if the goal has none."""

    total: float
    type: float
    attributes: float
    options: float
    price: float


def score(
    bought: ShopProduct,
    chosen: Mapping[str, str],
    price: float,
    goal: ShopGoal,
    bought_nouns: Sequence[str],
    goal_nouns: Sequence[str],
) -> PurchaseScore:
    """Score a purchase. The nouns are those of the two product names, in order, with repetitions."""
    kind = type_share(bought, goal, bought_nouns, goal_nouns)
    attributes = attributes_hit(bought, goal.attributes)
    options = options_hit(list(chosen.values()), goal.options)
    affordable = price <= goal.price_upper
    asked = len(goal.attributes) + len(goal.options) + 1
    return PurchaseScore(
        total=kind * ((attributes + options + affordable) / asked),
        type=kind,
        attributes=attributes / len(goal.attributes) if goal.attributes else 1.0,
        options=options / len(goal.options) if goal.options else 1.0,
        price=float(affordable),
    )


def type_share(bought: ShopProduct, goal: ShopGoal, bought_nouns: Sequence[str], goal_nouns: Sequence[str]) -> float:
    """How well the kind of product fits: 1, 0.5, 0.1 or 0."""
    overlap = len(set(bought_nouns) & set(goal_nouns)) / len(goal_nouns) if goal_nouns else 0.2
    if overlap == 0.0:
        return 0.0
    if overlap < 0.1:
        return 0.1
    same_parts = len(_parts(bought.product_category) & _parts(goal.product_category)) >= 2
    return 1.0 if bought.query == goal.query or same_parts or overlap > 0.2 else 0.5


def attributes_hit(bought: ShopProduct, wanted: Sequence[str]) -> int:
    """The number of wanted attributes among those of the product, or in its title, bullets or description."""
    texts = (bought.title.lower(), " ".join(bought.bullets).lower(), bought.description.lower())
    return sum(
        any(token_set_ratio(own, each) > ALIKE for own in bought.attributes) or any(each in text for text in texts)
        for each in wanted
    )


def options_hit(chosen: Sequence[str], wanted: Mapping[str, str] | Sequence[str]) -> int:
    """The number of wanted options that were chosen. Colours are compared by their colour word."""
    have = [colour_of(value) for value in chosen]
    items = wanted.items() if isinstance(wanted, Mapping) else wanted
    return sum(any(token_set_ratio(own, _wanted(each)) > ALIKE for own in have) for each in items)


def _wanted(item: str | tuple[str, str]) -> str:
    if isinstance(item, str):
        return colour_of(item)
    # The original tests whether a colour equals one of the two words, and otherwise compares the repr of the pair.
    return next((colour for colour in COLOURS if colour in item), str(item))


def colour_of(value: str) -> str:
    """The first colour word inside a value, or the value."""
    return next((colour for colour in COLOURS if colour in value), value)


def _parts(category: str) -> set[str]:
    return {part.strip() for part in category.split("›")}
