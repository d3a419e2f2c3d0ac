"""The generated catalogue: a seed in, products in plain English out, so that the shop works without any file.

Every product is drawn from the lists of `wares.py`: a maker, a material, features that become its attributes, a title, a
description, bullets, options and a price or a range of prices, and the instruction that its goals are made of. The same seed
gives the same products everywhere. An option value that the published score could not recognise is never offered.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence

from .products import Product
from ..shop0.score import options_hit
from .wares import MAKERS, OPTIONS, WARES, Ware

NUM_PRODUCTS = 1_280
SEED = 11
_ASIN = string.digits + string.ascii_uppercase
ASKS = (
    "Find me {features} {plural} made of {material}",
    "I am looking for {plural} in {material} for {use}, {features}",
    "I need {plural} for {use} with {features}",
    "Find me {material} {plural} with {features}",
    "I would like {features} {plural} for {use}",
)
SORT_ASKS = (
    "Find me {features} {material} {plural}",
    "I am looking for {material} {plural} for {use}, {features}",
    *ASKS[2:],
)
"""For wares that come in sorts: nobody asks for "teas made of black"."""
OPENINGS = (
    "{maker} makes this {adjective} {name} for {use}.",
    "A {adjective} {name} for {use}, made by {maker}.",
    "The {name} that {maker} designed for {use}: {adjective} and made to last.",
)
MIDDLES = (
    "It is made of {material}. What you get: {feature}.",
    "We chose {material} because it lasts. Customers praise it for: {feature}.",
    "Good {material} and careful work; in short: {feature}.",
)
SORT_MIDDLES = (
    "It is made of {stuff}. What you get: {feature}.",
    "We chose {stuff} for the taste. Customers praise it for: {feature}.",
    "Good {stuff} and careful work; in short: {feature}.",
)
CLOSINGS = (
    "If it is not right for you, send it back within thirty days.",
    "Please check the sizes and options before you order.",
    "It makes a fine gift as well.",
)


def generated_products(count: int = NUM_PRODUCTS, seed: int = SEED) -> list[Product]:
    """`count` products, all kinds equally often, in an order that mixes them."""
    rng = random.Random(f"webshop catalogue {seed}")
    kinds = [WARES[number % len(WARES)] for number in range(count)]
    rng.shuffle(kinds)
    taken: set[str] = set()
    titles: set[str] = set()
    products = []
    for kind in kinds:
        asin = _fresh(rng, taken)
        product = _product(rng, kind, asin)
        while product.title in titles:
            product = _product(rng, kind, asin)
        titles.add(product.title)
        products.append(product)
    return products


def _fresh(rng: random.Random, taken: set[str]) -> str:
    while True:
        asin = "B0" + "".join(rng.choices(_ASIN, k=8))
        if asin not in taken:
            taken.add(asin)
            return asin


def _product(rng: random.Random, kind: Ware, asin: str) -> Product:
    maker, material, use = rng.choice(MAKERS), rng.choice(kind.materials), rng.choice(kind.uses)
    features = rng.sample(kind.features, rng.randint(3, min(5, len(kind.features))))
    stuff = f"{material} {kind.sort}".strip()
    words = {"maker": maker, "material": material, "stuff": stuff, "use": use, "name": kind.name, "plural": kind.plural}
    adjective, pattern = rng.choice(kind.adjectives), rng.choice(kind.patterns)
    asked = rng.sample(features, rng.randint(1, min(3, len(features))))
    title = f"{maker} {_title(adjective)} {_title(pattern)} {_title(material)} {_title(kind.name)}"
    title += f", {_title(features[0])} and {_title(features[1])}, for {_title(use)}"
    description = " ".join(
        (
            rng.choice(OPENINGS).format(adjective=adjective, **words),
            rng.choice(SORT_MIDDLES if kind.sort else MIDDLES).format(feature=_listed(features), **words),
            rng.choice(CLOSINGS),
        )
    )
    bullets = (
        f"Made of {stuff}, with a {pattern} look.",
        *(f"{feature.capitalize()}: {_reason(rng, feature, use)}" for feature in features),
    )
    return Product(
        asin=asin,
        title=title,
        description=description,
        bullets=bullets,
        pricing=_pricing(rng, kind),
        options=_options(rng, kind),
        attributes=(*features, material),
        category=kind.department,
        query=kind.plural,
        product_category=kind.path,
        instruction=rng.choice(SORT_ASKS if kind.sort else ASKS).format(features=_listed(asked), **words),
        instruction_attributes=tuple(asked),
    )


def _pricing(rng: random.Random, kind: Ware) -> tuple[float, ...]:
    low = round(rng.uniform(kind.low, kind.high)) - rng.choice((0.01, 0.05, 0.5, 0.0))
    if rng.random() < 0.15:
        return (round(low, 2), round(low * rng.uniform(1.1, 1.6), 2))
    return (round(low, 2),)


def _options(rng: random.Random, kind: Ware) -> dict[str, tuple[str, ...]]:
    """Some values of each option, in the order of the lists, so that sizes go up."""
    offered: dict[str, tuple[str, ...]] = {}
    for listed in kind.options:
        # "shoe size" and "bed size" are lists of their own, but the shop calls them all "size".
        name = "size" if listed.endswith("size") else listed
        values = [value for value in OPTIONS[listed] if options_hit([value], {name: value}) == 1]
        chosen = set(rng.sample(values, rng.randint(2, min(5, len(values)))))
        offered[name] = tuple(value for value in values if value in chosen)
    return offered


def _reason(rng: random.Random, feature: str, use: str) -> str:
    return rng.choice(
        (
            f"made with {use} in mind.",
            "one thing less to think about.",
            f"you will notice it, above all for {use}.",
            "as it should be.",
        )
    )


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _title(text: str) -> str:
    return " ".join(word if word in ("the", "and", "for", "of") else word[:1].upper() + word[1:] for word in text.split())
