"""The generated catalogue: products in plain English drawn from a seed, so that the shop works without any file.

`wares.json` holds the word lists. A product gets a maker, a material, features (its attributes), a title, a description,
bullets, options, a price or a price range, and the instruction template of its goals. The same seed gives the same products
everywhere. An option value that the published score could not recognise is never offered.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...task_sets import read_table
from .products import ShopProduct

NUM_PRODUCTS = 1_280
SEED = 11
_ASIN = string.digits + string.ascii_uppercase


@dataclass(frozen=True, slots=True)
class Ware:
    """A kind of product. With a `sort` ("tea"), its materials are sorts of it ("black tea") and nothing is "made of" them."""

    department: str
    path: str
    name: str
    plural: str
    materials: list[str]
    features: list[str]
    uses: list[str]
    options: list[str]
    low: int
    high: int
    adjectives: list[str]
    patterns: list[str]
    sort: str


LISTS: dict[str, Any] = read_table(__package__, "wares.json")
LOOKS: dict[str, list[str]] = LISTS["looks"]
"""The variants of the adjective and pattern lists. All have the same length, so that a draw falls on the same place in each."""
WARES = [Ware(**row | {name: LOOKS[row[name]] for name in ("adjectives", "patterns")}) for row in LISTS["wares"]]


def generated_products(count: int = NUM_PRODUCTS, seed: int = SEED) -> list[ShopProduct]:
    """`count` products, all kinds equally often, in a mixed order."""
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


def _product(rng: random.Random, kind: Ware, asin: str) -> ShopProduct:
    maker, material, use = rng.choice(LISTS["makers"]), rng.choice(kind.materials), rng.choice(kind.uses)
    features = rng.sample(kind.features, rng.randint(3, min(5, len(kind.features))))
    stuff = f"{material} {kind.sort}".strip()
    words = {"maker": maker, "material": material, "stuff": stuff, "use": use, "name": kind.name, "plural": kind.plural}
    adjective, pattern = rng.choice(kind.adjectives), rng.choice(kind.patterns)
    asked = rng.sample(features, rng.randint(1, min(3, len(features))))
    title = f"{maker} {_title(adjective)} {_title(pattern)} {_title(material)} {_title(kind.name)}"
    title += f", {_title(features[0])} and {_title(features[1])}, for {_title(use)}"
    description = " ".join(
        (
            rng.choice(LISTS["openings"]).format(adjective=adjective, **words),
            rng.choice(LISTS["sort_middles"] if kind.sort else LISTS["middles"]).format(feature=_listed(features), **words),
            rng.choice(LISTS["closings"]),
        )
    )
    bullets = (
        f"Made of {stuff}, with a {pattern} look.",
        *(f"{feature.capitalize()}: {rng.choice(LISTS['reasons']).format(use=use)}" for feature in features),
    )
    return ShopProduct(
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
        instruction=rng.choice(LISTS["sort_asks"] if kind.sort else LISTS["asks"]).format(features=_listed(asked), **words),
        instruction_attributes=tuple(asked),
    )


def _pricing(rng: random.Random, kind: Ware) -> tuple[float, ...]:
    low = round(rng.uniform(kind.low, kind.high)) - rng.choice((0.01, 0.05, 0.5, 0.0))
    if rng.random() < 0.15:
        return (round(low, 2), round(low * rng.uniform(1.1, 1.6), 2))
    return (round(low, 2),)


def _options(rng: random.Random, kind: Ware) -> dict[str, tuple[str, ...]]:
    """Some values of each option, in the order of the lists, so that sizes increase."""
    offered: dict[str, tuple[str, ...]] = {}
    for listed in kind.options:
        # "shoe size" and "bed size" are separate lists; the shop calls all of them "size".
        name = "size" if listed.endswith("size") else listed
        values = LISTS["options"][listed]
        chosen = set(rng.sample(values, rng.randint(2, min(5, len(values)))))
        offered[name] = tuple(value for value in values if value in chosen)
    return offered


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _title(text: str) -> str:
    return " ".join(word if word in ("the", "and", "for", "of") else word[:1].upper() + word[1:] for word in text.split())
