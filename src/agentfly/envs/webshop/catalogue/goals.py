"""Goals: what a visitor is asked to buy, and the wording of the instruction.

A synthetic goal combines a product's instruction with one combination of its option values; a human goal is an instruction that
a person wrote. Both have an upper price bound, the larger of two draws from the next four multiples of ten above the price. The
draw is seeded by the product, so a goal is the same in every process. The order is the published seeded shuffle. Goals are made
on access: a catalogue of 100,000 products has about 700,000.
"""

from __future__ import annotations

import itertools
import math
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ....errors import ConfigError
from ....types import Task
from .products import ShopProduct

GoalKind = Literal["synthetic", "human"]
KINDS: tuple[GoalKind, ...] = ("synthetic", "human")
SHUFFLE_SEED = 233
NO_BOUND = 1_000_000.0
MAX_BOUND = 990
# Published splits, as places after the shuffle.
PLACES: dict[str, tuple[int, int | None]] = {"test": (0, 500), "validation": (500, 1500), "train": (1500, None)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShopGoal:
    """`options` maps names to values in synthetic goals and lists values in human ones."""

    asin: str
    instruction: str
    attributes: tuple[str, ...]
    options: Mapping[str, str] | tuple[str, ...]
    price_upper: float
    name: str = ""
    query: str = ""
    category: str = ""
    product_category: str = ""

    def __post_init__(self) -> None:
        if not self.asin or not self.instruction:
            raise ConfigError("a WebShop goal needs an 'asin' and an 'instruction'")

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "attributes": list(self.attributes)}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> ShopGoal:
        """From a task's row, or from a goal as the original writes it (`instruction_text`, `goal_options`)."""
        try:
            options = row["options"] if "options" in row else row["goal_options"]
            _check_texts("attributes", row["attributes"])
            _check_texts("options", list(options.values()) if isinstance(options, Mapping) else options)
            return cls(
                asin=str(row["asin"]),
                instruction=str(row["instruction"] if "instruction" in row else row["instruction_text"]),
                attributes=tuple(map(str, row["attributes"])),
                options=dict(options) if isinstance(options, Mapping) else tuple(map(str, options)),
                price_upper=float(row["price_upper"]),
                **{name: str(row.get(name, "")) for name in ("name", "query", "category", "product_category")},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"this is not a WebShop goal ({type(error).__name__}: {error}): {row!r:.120}") from error


def read_row(task: Task) -> tuple[str, ShopGoal, bool | None]:
    """The catalogue, the goal and `brief` of a task. Raises ConfigError if the row is not one of the shop."""
    name, row = task.fields.get("catalogue", "generated"), task.fields.get("goal")
    brief = task.fields.get("brief")
    if not isinstance(row, Mapping) or not isinstance(name, str) or not isinstance(brief, bool | None):
        raise ConfigError(
            f"task {task.id}: a WebShop row has a field 'goal' (an object) and, if need be, 'catalogue' (a name) and "
            f"'brief' (true or false)"
        )
    try:
        return name, ShopGoal.from_dict(row), brief
    except ConfigError as error:
        raise ConfigError(f"task {task.id}: {error}") from error


def _check_texts(name: str, values: object) -> None:
    """Raise TypeError unless `values` is a list of texts: a text would be taken for a list of letters."""
    if not isinstance(values, list | tuple) or not all(isinstance(value, str | int | float) for value in values):
        raise TypeError(f"its {name!r} must be texts, not {values!r:.40}")


def price_of(product: ShopProduct, seed: int = 0) -> float:
    """The price, or a seeded draw from the price range."""
    if len(product.pricing) == 1:
        return product.pricing[0]
    return random.Random(f"webshop price {seed} {product.asin}").uniform(*product.pricing[:2])


def bounds_above(price: float) -> list[float]:
    """The possible bounds of a price."""
    first = math.floor(price / 10) + 1 if price >= 0 else 1
    return [10.0 * step for step in range(max(1, first), MAX_BOUND // 10 + 1)][:4]


def draw_bound(price: float, name: str, seed: int = 0) -> float:
    choices = bounds_above(price)
    if len(choices) < 2:
        return NO_BOUND
    return max(random.Random(f"webshop bound {seed} {name}").sample(choices, 2))


class Goals(Sequence[ShopGoal]):
    """All goals of some products, in the published order (`shuffled=False`: in the order of products)."""

    def __init__(
        self,
        products: Sequence[ShopProduct],
        counts: Sequence[int],
        *,
        kind: GoalKind = "synthetic",
        shuffled: bool = True,
        seed: int = 0,
        bound: Callable[[ShopProduct, int], float] | None = None,
    ) -> None:
        self.products, self.kind, self.seed = products, kind, seed
        self.bound = bound
        """The price bound of a product and goal number; None: `draw_bound`."""
        pairs = [(owner, number) for owner, count in enumerate(counts) for number in range(count)]
        if shuffled:
            random.Random(SHUFFLE_SEED).shuffle(pairs)
        self._owners = array("i", (owner for owner, _ in pairs))
        self._numbers = array("i", (number for _, number in pairs))

    def __len__(self) -> int:
        return len(self._owners)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[index] for index in range(*place.indices(len(self)))]
        product = self.products[self._owners[place]]
        return self._make(product, self._numbers[place])

    def owner(self, place: int) -> int:
        """The number of a goal's product, without making the goal."""
        return self._owners[place]

    def _make(self, product: ShopProduct, number: int) -> ShopGoal:
        if self.kind == "synthetic":
            options: Mapping[str, str] | tuple[str, ...] = combination(product, number)
            assert isinstance(options, Mapping)
            chosen = ", and ".join(f"{name}: {value}" for name, value in options.items())
            text = f"{product.instruction}{' with ' if chosen else ''}{chosen}"
            attributes, name = product.instruction_attributes, product.asin
        else:
            written = usable_human(product)[number]
            text = written["instruction"].strip(".")
            given = written["options"]
            options = dict(given) if isinstance(given, Mapping) else tuple(given)
            attributes, name = tuple(written["attributes"]), f"{product.asin} {number}"
        upper = self.bound(product, number) if self.bound else draw_bound(price_of(product, self.seed), name, self.seed)
        return ShopGoal(
            asin=product.asin,
            instruction=text if upper == NO_BOUND else f"{text}, and price lower than {upper:.2f} dollars",
            attributes=attributes,
            options=options,
            price_upper=upper,
            name=product.title,
            query=product.query,
            category=product.category,
            product_category=product.product_category,
        )


def num_goals(product: ShopProduct, kind: GoalKind = "synthetic") -> int:
    if kind == "human":
        return len(usable_human(product))
    if product.instruction is None:
        return 0
    return math.prod(len(values) for values in product.options.values())


def usable_human(product: ShopProduct) -> list[Mapping[str, Any]]:
    """Human instructions with at least one attribute; the others are left out, as in the original."""
    return [written for written in product.human if written["attributes"]]


def combination(product: ShopProduct, number: int) -> dict[str, str]:
    """One value per option, names in alphabetical order, the last one varying fastest."""
    names = sorted(product.options)
    chosen = next(itertools.islice(itertools.product(*(product.options[name] for name in names)), number, None))
    return dict(zip(names, chosen, strict=True))
