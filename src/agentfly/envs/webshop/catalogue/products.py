"""One product of the shop, read from the records that WebShop publishes.

A record is one of `items_shuffle*.json` (as collected) or the `product` of a search document (as cleaned). Prices become
numbers; option values are written as the shop shows them: stripped, "/" as " | ", lower case. Raises BadRecord for an
incomplete record; the reader of the file adds the line.
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
    """A record that is not a valid product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShopProduct:
    """`pricing` is one price or a range; `instruction` is the template of its goals, None without goals."""

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
        """The text that the search engine indexes."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        return " ".join((self.title, self.description, self.bullets[0] if self.bullets else "", options)).lower()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> ShopProduct:
        """The inverse of `to_dict`, after JSON."""
        texts = ("bullets", "attributes", "instruction_attributes", "human")
        lists = {name: tuple(record[name]) for name in texts}
        options = {name: tuple(values) for name, values in record["options"].items()}
        return cls(**{**record, **lists, "pricing": tuple(map(float, record["pricing"])), "options": options})


def read_record(record: Any, extra: Mapping[str, Any] | None = None, human: Any = None) -> ShopProduct | None:
    """A product from either kind of record, or None if the original skips it. `extra` is its entry in `items_ins_v2`."""
    if not isinstance(record, Mapping):
        raise BadRecord(f"a product is an object, not a {type(record).__name__}")
    record = _whole(record)
    asin = record.get("asin")
    if not isinstance(asin, str) or not asin:
        raise BadRecord("it has no 'asin'")
    if asin == "nan" or len(asin) > MAX_ASIN:
        return None
    attributes, instruction, wanted = read_extra(extra or {})
    attributes = _texts(record, "Attributes") if attributes is None else attributes
    bullets = record.get("small_description")
    bullets = bullets if isinstance(bullets, list) else [bullets]
    return ShopProduct(
        asin=asin,
        title=_text(record, "name"),
        description=_text(record, "full_description"),
        bullets=tuple(str(bullet) for bullet in bullets if bullet is not None),
        pricing=_pricing(record.get("pricing")),
        options=_options(record),
        attributes=("DUMMY_ATTR",) if attributes is None else attributes,
        category=_text(record, "category"),
        query=_text(record, "query").lower().strip(),
        product_category=_text(record, "product_category"),
        instruction=instruction,
        instruction_attributes=wanted,
        human=read_human(human or []),
    )


def read_extra(value: Any) -> tuple[tuple[str, ...] | None, str | None, tuple[str, ...]]:
    """An entry of `items_ins_v2`: attributes (None: those of the record), instruction, attributes of the instruction."""
    if not isinstance(value, Mapping):
        raise BadRecord(f"attributes and instruction are an object, not {value!r:.40}")
    value = _whole(value)
    instruction = value.get("instruction")
    if not isinstance(instruction, str | None):
        raise BadRecord(f"its 'instruction' must be a string, not {instruction!r:.40}")
    return _texts(value, "attributes"), instruction, _texts(value, "instruction_attributes") or ()


def read_human(value: object) -> tuple[Mapping[str, Any], ...]:
    """An entry of `items_human_ins`: instructions that people wrote."""
    if not isinstance(value, list):
        raise BadRecord(f"human instructions are a list, not {value!r:.40}")
    instructions = []
    for item in _whole(value):
        if not isinstance(item, Mapping) or not isinstance(item.get("instruction"), str):
            raise BadRecord("an entry of its human instructions has no 'instruction'")
        given: Any = item.get("instruction_options")
        named = isinstance(given, Mapping)
        if named and not all(isinstance(text, str) for text in given.values()):
            raise BadRecord(f"its 'instruction_options' must be names and values, not {given!r:.40}")
        attributes = _texts(item, "instruction_attributes") or ()
        options: Any = dict(given) if named else list(_texts(item, "instruction_options") or ())
        instructions.append({"instruction": item["instruction"], "attributes": list(attributes), "options": options})
    return tuple(instructions)


def read_nouns(value: object) -> list[str]:
    """An entry of `title_nouns`."""
    if not isinstance(value, list) or not all(isinstance(noun, str) for noun in value):
        raise BadRecord(f"nouns are a list of words, not {value!r:.40}")
    return [str(noun) for noun in _whole(value)]


def _text(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    if value is None and name in ("full_description", "product_category", "category", "query"):
        return ""
    if not isinstance(value, str):
        raise BadRecord(f"its {name!r} must be a string, not {value!r:.40}")
    return value


def _pricing(value: Any) -> tuple[float, ...]:
    """ "$12.99", "$10.00$14.00" or a list of numbers; NO_PRICE without any, as in the original."""
    if not value:
        return (NO_PRICE,)
    try:
        if isinstance(value, str):
            prices = [float(_NOT_NUMBER.sub("", part)) for part in value.split("$")[1:]]
        else:
            prices = [float(part) for part in value]
    except (TypeError, ValueError) as error:
        raise BadRecord(f"its 'pricing' cannot be read: {value!r:.60}") from error
    if not prices or not all(0 <= price < float("inf") for price in prices):
        raise BadRecord(f"its 'pricing' has no price in dollars: {value!r:.60}")
    return tuple(prices[:2])


def _options(record: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """From `customization_options` of a collected record, or `options` of a cleaned one."""
    cleaned = record.get("options")
    if isinstance(cleaned, Mapping):
        for name, values in cleaned.items():
            if not isinstance(values, list) or not all(isinstance(value, str | int | float) for value in values):
                raise BadRecord(f"its option {name!r} must be a list of strings, not {values!r:.40}")
        return {str(name): tuple(map(str, values)) for name, values in cleaned.items()}
    given = record.get("customization_options") or {}
    if not isinstance(given, Mapping):
        raise BadRecord(f"its 'customization_options' must be an object, not {given!r:.40}")
    options: dict[str, tuple[str, ...]] = {}
    for name, contents in given.items():
        if contents is None:
            continue
        try:
            options[name.lower()] = tuple(each["value"].strip().replace("/", " | ").lower() for each in contents)
        except (TypeError, KeyError, AttributeError) as error:
            raise BadRecord(f"its option {name!r} must be a list of objects with a 'value'") from error
    return options


def _texts(record: Mapping[str, Any], name: str) -> tuple[str, ...] | None:
    """A list of texts or numbers as texts; None if the field is missing."""
    value = record.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(each, str | int | float) for each in value):
        raise BadRecord(f"its {name!r} must be a list of strings, not {value!r:.60}")
    return tuple(map(str, value))


def _whole(value: object) -> Any:
    """The value without unpaired surrogates: JSON can contain them, UTF-8 files cannot."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_whole(each) for each in value]
    if isinstance(value, Mapping):
        return {_whole(name): _whole(each) for name, each in value.items()}
    return value
