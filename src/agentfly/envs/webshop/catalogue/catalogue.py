"""A catalogue: what all visits to one shop share. `open_catalogue` returns the one of this process.

    generated      generated from word lists, 1,280 products
    easy           generated, small things with short pages, for a miniature model
    PATH           WebShop's files (see files.py); read once, then stored on disk (disk.py)

A catalogue does not change. Prices that the original draws anew in every process are drawn here by a seed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from ....errors import ConfigError, DataError
from .goals import GoalKind, Goals, num_goals, price_of
from .index import ProductIndex
from .nouns import find_tagger, given
from .products import ShopProduct
from .terms import MAX_QUERY, terms

MADE_HERE = ("generated", "easy")
MAX_RESULTS = 50
PAGE_SIZE = 10


class Catalogue:
    """`tagger` names the noun tagger, `page_size` is the number of results on a page, `brief`: short pages."""

    def __init__(
        self,
        name: str,
        products: Sequence[ShopProduct],
        *,
        index: ProductIndex | None = None,
        asins: Sequence[str] | None = None,
        counts: Mapping[str, Sequence[int]] | None = None,
        nouns: Mapping[str, Sequence[str]] | None = None,
        tagger: str = "light",
        prices: Mapping[str, float] | None = None,
        seed: int = 0,
        page_size: int = PAGE_SIZE,
        brief: bool = False,
    ) -> None:
        self.name, self.products, self.seed = name, products, seed
        self.page_size, self.brief = page_size, brief
        self.asins = list(asins) if asins is not None else [product.asin for product in products]
        self.numbers = {asin: number for number, asin in enumerate(self.asins)}
        self.index = index or ProductIndex.build([terms(product.searched) for product in products])
        self.prices = dict(prices or {})
        self._counts = dict(counts or {})
        self.tagger, tag = ("given", None) if nouns is not None else find_tagger(tagger)
        lookup = given(nouns) if nouns is not None else (lambda asin, title: tag(title) if tag else ())
        self.nouns: Callable[[str, str], Sequence[str]] = lru_cache(maxsize=16_384)(lookup)
        self.search: Callable[[str], list[str]] = lru_cache(maxsize=4_096)(self._search)
        self._goals: dict[GoalKind, Goals] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.asins)

    def product(self, asin: str) -> ShopProduct:
        try:
            product: ShopProduct = self.products[self.numbers[asin]]
            return product
        except KeyError:
            raise ConfigError(f"the catalogue {self.name!r} has no product {asin[:40]!r}") from None

    def price(self, asin: str) -> float:
        price = self.prices.get(asin)
        return price_of(self.product(asin), self.seed) if price is None else price

    def goals(self, kind: GoalKind = "synthetic") -> Goals:
        """All goals of a kind, in the published order."""
        with self._lock:
            if kind not in self._goals:
                counts = self._counts.get(kind) or [num_goals(product, kind) for product in self.products]
                self._goals[kind] = Goals(self.products, counts, kind=kind, seed=self.seed)
            return self._goals[kind]

    def _search(self, words: str) -> list[str]:
        return [self.asins[number] for number in self.index.search(terms(words[:MAX_QUERY]), MAX_RESULTS)]


_open: dict[tuple[str, str], Catalogue] = {}
_opening = threading.RLock()


def open_catalogue(name: str = "generated", tagger: str = "auto") -> Catalogue:
    """The catalogue of a name or path. The first call makes or reads it; concurrent calls wait for it."""
    key = (full_name(name), tagger)
    with _opening:
        if key not in _open:
            _open[key] = _make(name, tagger)
        return _open[key]


def is_open(name: str, tagger: str = "auto") -> bool:
    """Whether `open_catalogue` would return without reading."""
    return (full_name(name), tagger) in _open


def full_name(name: str) -> str:
    """The name with an absolute path, which is valid in any working directory."""
    if name in MADE_HERE:
        return name
    path, sign, limit = name.partition("#")
    try:
        return f"{os.path.realpath(os.path.expanduser(path))}{sign}{limit}"
    except ValueError as error:
        raise DataError(f"the catalogue {name[:80]!r} is no path that a file can have: {error}") from error


def _make(name: str, tagger: str) -> Catalogue:
    # Scores of generated catalogues must not depend on the installed taggers.
    own = "light" if tagger == "auto" else tagger
    if name == "generated":
        from .generate import generated_products

        return Catalogue(name, generated_products(), tagger=own)
    if name == "easy":
        from .easy import PAGE, easy_products

        return Catalogue(name, easy_products(), tagger=own, page_size=PAGE, brief=True)
    if "/" not in name and not os.path.exists(name.partition("#")[0]):
        raise DataError(f"no catalogue is called {name!r}: there are {', '.join(MADE_HERE)} and paths of WebShop's files")
    from .disk import open_files
    from .files import locate

    products, index = open_files(locate(name))
    nouns = products.nouns if tagger == "auto" else None
    return Catalogue(name, products, index=index, asins=products.asins, counts=products.counts, nouns=nouns, tagger=tagger)
