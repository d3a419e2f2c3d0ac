"""The published score of a purchase: what was bought and what was asked for in, a number from 0 to 1 out, with its parts.

    score = r_type * (attributes hit + options hit + price ok) / (number of attributes + number of options + 1)

Yao et al., "WebShop: Towards Scalable Real-World Web Interaction with Grounded Language Agents", 2022, section 3; the rules of
detail are those of its environment, as recorded episodes show them. Pure functions: nothing is looked up here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..catalogue.goals import ShopGoal
from ..catalogue.products import ShopProduct
from .fuzzy import token_set_ratio

ALIKE = 85
_COLOURS = """
    alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo caramel
    champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream crystal dark
    denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather indigo ivory ivy
    khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor mushroom
    mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand sapphire
    seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut wheat white
    wine yellow"""
COLOURS = tuple(_COLOURS.split())


@dataclass(frozen=True, slots=True)
class PurchaseScore:
    """`total`, and the shares it is made of; `options` is 1 where none were asked for."""

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
    """Score a purchase. The nouns are those of the two products' names, in order, with repetitions."""
    kind = type_share(bought, goal, bought_nouns, goal_nouns)
    attributes = attributes_hit(bought, goal.attributes)
    options = options_hit(list(chosen.values()), goal.options)
    affordable = price <= goal.price_upper
    asked = len(goal.attributes) + len(goal.options) + 1
    return PurchaseScore(
        total=kind * (attributes + options + affordable) / asked,
        type=kind,
        attributes=attributes / len(goal.attributes) if goal.attributes else 1.0,
        options=options / len(goal.options) if goal.options else 1.0,
        price=float(affordable),
    )


def type_share(bought: ShopProduct, goal: ShopGoal, bought_nouns: Sequence[str], goal_nouns: Sequence[str]) -> float:
    """Is it the kind of thing that was asked for? 1, 0.5, 0.1 or 0."""
    overlap = len(set(bought_nouns) & set(goal_nouns)) / len(goal_nouns) if goal_nouns else 0.2
    if overlap == 0.0:
        return 0.0
    if overlap < 0.1:
        return 0.1
    same_parts = len(_parts(bought.product_category) & _parts(goal.product_category)) >= 2
    return 1.0 if bought.query == goal.query or same_parts or overlap > 0.2 else 0.5


def attributes_hit(bought: ShopProduct, wanted: Sequence[str]) -> int:
    """How many wanted attributes the product has: among its own, or in its title, bullets or description."""
    texts = (bought.title.lower(), " ".join(bought.bullets).lower(), bought.description.lower())
    return sum(
        any(token_set_ratio(own, each) > ALIKE for own in bought.attributes) or any(each in text for text in texts)
        for each in wanted
    )


def options_hit(chosen: Sequence[str], wanted: Mapping[str, str] | Sequence[str]) -> int:
    """How many wanted options were chosen. A named option is compared as "name value", or as its colour where that is one."""
    have = [colour_of(value) for value in chosen]
    items = wanted.items() if isinstance(wanted, Mapping) else wanted
    return sum(any(token_set_ratio(own, _wanted(each)) > ALIKE for own in have) for each in items)


def _wanted(item: str | tuple[str, str]) -> str:
    if isinstance(item, str):
        return colour_of(item)
    # The original looks for a colour among the two words themselves, not inside them, and else compares the pair as written.
    return next((colour for colour in COLOURS if colour in item), str(item))


def colour_of(value: str) -> str:
    """The first colour word inside a value, or the value."""
    return next((colour for colour in COLOURS if colour in value), value)


def _parts(category: str) -> set[str]:
    return {part.strip() for part in category.split("›")}
