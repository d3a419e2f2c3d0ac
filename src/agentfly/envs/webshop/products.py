"""One product of the shop, read from the records that WebShop publishes.

In: a record of `items_shuffle*.json` (as collected), or the `product` of a line of its search documents (as cleaned). Out: a
`Product` that has checked itself. Prices become numbers, option values are written as the shop shows them: stripped, "/" as
" | ", lower case. A record without what a product needs is refused by name; the reader of the file adds the line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

NO_PRICE = 100.0
MAX_ASIN = 10
_NOT_NUMBER = re.compile(r"[^\d.]")


class BadRecord(ValueError):
    """A record that no product can be made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """`pricing` holds one price or the two ends of a range; `instruction` is the template of its goals, where it has any."""

    asin: str
    title: str
    description: str = ""
    bullets: tuple[str, ...] = ()
    pricing: tuple[float, ...] = (NO_PRICE,)
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    attributes: tuple[str, ...] = ()
    category: str = ""
    query: str = ""
    product_category: str = ""
    instruction: str | None = None
    instruction_attributes: tuple[str, ...] = ()
    human: tuple[Mapping[str, Any], ...] = ()
    rating: str = "N.A."

    @property
    def price_tag(self) -> str:
        return " to ".join(f"${price}" for price in self.pricing[:2])

    @property
    def searched(self) -> str:
        """What the search engine reads of it."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        return " ".join((self.title, self.description, self.bullets[0] if self.bullets else "", options)).lower()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Product:
        """What `to_dict` gave, back from JSON."""
        texts = ("bullets", "attributes", "instruction_attributes", "human")
        lists = {name: tuple(record[name]) for name in texts}
        options = {name: tuple(values) for name, values in record["options"].items()}
        return cls(**{**record, **lists, "pricing": tuple(map(float, record["pricing"])), "options": options})


def read_record(record: Any, extra: Mapping[str, Any] | None = None, human: Any = None) -> Product | None:
    """A product from either kind of record; None for one that the original skips. `extra` is its entry in `items_ins_v2`."""
    if not isinstance(record, Mapping):
        raise BadRecord(f"a product is an object, not a {type(record).__name__}")
    asin = record.get("asin")
    if not isinstance(asin, str) or not asin:
        raise BadRecord("it has no 'asin'")
    if asin == "nan" or len(asin) > MAX_ASIN:
        return None
    extra = extra or {}
    bullets = record.get("small_description")
    bullets = bullets if isinstance(bullets, list) else [bullets]
    known = extra.get("attributes", record.get("Attributes"))
    return Product(
        asin=asin,
        title=_text(record, "name"),
        description=_text(record, "full_description"),
        bullets=tuple(str(bullet) for bullet in bullets if bullet is not None),
        pricing=_pricing(record.get("pricing")),
        options=_options(record),
        attributes=tuple(map(str, ["DUMMY_ATTR"] if known is None else known)),
        category=_text(record, "category"),
        query=_text(record, "query").lower().strip(),
        product_category=_text(record, "product_category"),
        instruction=extra.get("instruction"),
        instruction_attributes=tuple(extra.get("instruction_attributes") or ()),
        human=_human(human),
    )


def _text(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    if value is None and name in ("full_description", "product_category", "category", "query"):
        return ""
    if not isinstance(value, str):
        raise BadRecord(f"its {name!r} must be a string, not {value!r:.40}")
    return value


def _pricing(value: Any) -> tuple[float, ...]:
    """ "$12.99", "$10.00$14.00" or a list of numbers; nothing: the price that the original gives to what has none."""
    if not value:
        return (NO_PRICE,)
    try:
        if isinstance(value, str):
            prices = [float(_NOT_NUMBER.sub("", part)) for part in value.split("$")[1:]]
        else:
            prices = [float(part) for part in value]
    except (TypeError, ValueError) as error:
        raise BadRecord(f"its 'pricing' cannot be read: {value!r:.60}") from error
    if not prices:
        raise BadRecord(f"its 'pricing' has no price in dollars: {value!r:.60}")
    return tuple(prices[:2])


def _options(record: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Of a collected record from `customization_options`, of a cleaned one from `options`."""
    if isinstance(record.get("options"), Mapping):
        return {str(name): tuple(map(str, values)) for name, values in record["options"].items()}
    given = record.get("customization_options") or {}
    if not isinstance(given, Mapping):
        raise BadRecord(f"its 'customization_options' must be an object, not {given!r:.40}")
    found: dict[str, tuple[str, ...]] = {}
    for name, contents in given.items():
        if contents is None:
            continue
        try:
            found[name.lower()] = tuple(each["value"].strip().replace("/", " | ").lower() for each in contents)
        except (TypeError, KeyError, AttributeError) as error:
            raise BadRecord(f"its option {name!r} must be a list of objects with a 'value'") from error
    return found


def _human(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Its entry in `items_human_ins`: instructions that people wrote."""
    found = []
    for item in value or ():
        if not isinstance(item, Mapping) or not isinstance(item.get("instruction"), str):
            raise BadRecord("an entry of its human instructions has no 'instruction'")
        options = item.get("instruction_options") or []
        found.append(
            {
                "instruction": item["instruction"],
                "attributes": list(item.get("instruction_attributes") or []),
                "options": dict(options) if isinstance(options, Mapping) else list(options),
            }
        )
    return tuple(found)
