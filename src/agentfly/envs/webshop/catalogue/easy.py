"""The easy shop: small things with short names, three to a page, so that a miniature model can hold a whole visit.

The products are fixed: each noun in four materials, each of these once or twice at different prices, in three colours and, for
half of them, two sizes. A goal names material, noun, options and a price bound that only one of the equally named products
keeps; so the right product must be picked from the page and its options must be clicked.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from .goals import ShopGoal
from .products import ShopProduct

PAGE = 3
SEED = 5
_NOUNS = """hat bag cup mug lamp rug belt coat bowl desk ring sock tent box pen bed shoe ball fan jar vase clock chair shirt
kite drum door sofa spoon brush flag dish"""
NOUNS = _NOUNS.split()
MATERIALS = ("wool", "wood", "steel", "glass", "paper", "gold", "silk", "stone")
COLORS = ("red", "blue", "green", "black", "white", "pink")
SIZES = ("small", "large")
BOUNDS = (20, 40, 60)
PRICES = (8, 12, 15, 18, 25, 28, 32, 35, 45, 48, 52, 55)


def easy_products() -> list[ShopProduct]:
    """About two hundred products. Ids are short, because a model has to copy them."""
    rng = random.Random(SEED)
    products: list[ShopProduct] = []
    for noun, material in ((noun, material) for noun in NOUNS for material in rng.sample(MATERIALS, 4)):
        for price in _prices(rng):
            options: dict[str, tuple[str, ...]] = {"color": tuple(rng.sample(COLORS, 3))}
            if rng.random() < 0.5:
                options["size"] = SIZES
            products.append(
                ShopProduct(
                    asin=f"A{len(products) + 10}",
                    title=f"{material} {noun}",
                    bullets=(f"a {noun} of {material}",),
                    pricing=(float(price),),
                    options=options,
                    attributes=(material,),
                    category="easy",
                    query=noun,
                    product_category=f"easy › {noun}",
                )
            )
    return products


def _prices(rng: random.Random) -> list[int]:
    """One price, or two in any order that a bound can separate."""
    if rng.random() < 0.5:
        return [rng.choice(PRICES)]
    while True:
        prices = rng.sample(PRICES, 2)
        if _bounds(min(prices))[0] < max(prices):
            return prices


def easy_goals(products: list[ShopProduct]) -> Iterator[ShopGoal]:
    """Every combination of options and bounds that identifies one product."""
    for product in products:
        price = product.pricing[0]
        same = [other.pricing[0] for other in products if other.title == product.title]
        if price != min(same):
            continue  # no bound excludes the cheaper product
        for bound in _bounds(price):
            if any(price < other <= bound for other in same):
                break
            yield from _combinations(product, bound)


def _combinations(product: ShopProduct, bound: int) -> Iterator[ShopGoal]:
    for values in itertools.product(*product.options.values()):
        yield ShopGoal(
            asin=product.asin,
            instruction=f"Buy a {product.title}: {', '.join(values)}, below {bound} dollars.",
            attributes=product.attributes,
            options=dict(zip(product.options, values, strict=True)),
            price_upper=float(bound),
            name=product.title,
            query=product.query,
            category=product.category,
            product_category=product.product_category,
        )


def _bounds(price: float) -> list[int]:
    return [bound for bound in BOUNDS if bound > price]
