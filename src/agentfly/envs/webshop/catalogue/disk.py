"""A catalogue on disk: products that are read one by one, and a search index that is mapped into memory.

Reading WebShop's files takes seconds for 1,000 products and a minute for 100,000, so the result is stored (`envs.stored`): one
line of JSON per product, the offset of each line, the number of goals of each, and the search index. Opening it reads no
product; products in use are cached, up to NUM_KEPT. Processes share the mapped pages.
"""

from __future__ import annotations

import itertools
import json
import mmap
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ....errors import DataError
from ...stored import Damaged, cache_root, key_of, stamp_of, stored
from .files import Files, read_items, read_map
from .goals import num_goals
from .index import ProductIndex
from .products import BadRecord, ShopProduct, read_extra, read_human, read_nouns, read_record
from .terms import terms

FORMAT = 4
NUM_KEPT = 4096


class ProductFile(Sequence[ShopProduct]):
    """The products of a stored catalogue by number. `counts` has the number of synthetic and human goals of each."""

    def __init__(self, folder: Path) -> None:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        if about.get("format") != FORMAT:
            raise Damaged(f"the catalogue has the format {about.get('format')!r}, not {FORMAT}")
        self.asins: list[str] = about["asins"]
        self.counts: dict[str, list[int]] = about["counts"]
        self.nouns: dict[str, list[str]] | None = about["nouns"]
        self._starts = array("q")
        self._starts.frombytes((folder / "starts").read_bytes())
        if len(self._starts) != len(self.asins) + 1:
            raise Damaged("the products and their places do not fit together")
        with open(folder / "products.jsonl", "rb") as stream:
            self._text = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self._products: OrderedDict[int, ShopProduct] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.asins)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        with self._lock:
            value = self._products.get(number)
            if value is not None:
                self._products.move_to_end(number)
                return value
        product = ShopProduct.from_dict(json.loads(self._text[self._starts[number] : self._starts[number + 1]]))
        with self._lock:
            self._products[number] = product
            if len(self._products) > NUM_KEPT:
                self._products.popitem(last=False)
        return product


def open_files(files: Files) -> tuple[ProductFile, ProductIndex]:
    """The stored catalogue of these files, built first if needed. Changed files have another key."""
    key = key_of("webshop", FORMAT, files.limit, [stamp_of(path) for path in files.all])
    return stored(cache_root() / "webshop" / key, lambda folder: _build(files, folder), _open)


def _open(folder: Path) -> tuple[ProductFile, ProductIndex]:
    return ProductFile(folder), ProductIndex.open(folder)


def _build(files: Files, folder: Path) -> None:
    """Read the products in one pass. Companion files are read whole, but only entries of wanted products are kept."""
    asins: list[str] = []
    starts, counts = array("q", [0]), {"synthetic": array("i"), "human": array("i")}
    # With a limit, only the entries of its products are kept: whole companion files may not fit into memory.
    wanted = None if files.limit is None else set(_identities(files))
    extras = _companion(files.extras, wanted, read_extra)
    human = _companion(files.human, wanted, read_human)

    def documents() -> Iterator[list[str]]:
        with open(folder / "products.jsonl", "wb") as out:
            for product in products_of(files, extras, human):
                asins.append(product.asin)
                starts.append(starts[-1] + out.write(json.dumps(product.to_dict(), ensure_ascii=False).encode() + b"\n"))
                counts["synthetic"].append(num_goals(product))
                counts["human"].append(num_goals(product, "human"))
                yield terms(product.searched)

    index = ProductIndex.build(documents())
    if not asins:
        raise DataError(f"{files.items}: there are no products in it")
    index.save(folder)
    (folder / "starts").write_bytes(starts.tobytes())
    nouns = _companion(files.nouns, set(asins), read_nouns)
    about = {"format": FORMAT, "asins": asins, "counts": {name: list(value) for name, value in counts.items()}, "nouns": nouns}
    (folder / "about.json").write_text(json.dumps(about), encoding="utf-8")


def products_of(
    files: Files, extras: dict[str, Any] | None = None, human: dict[str, Any] | None = None
) -> Iterator[ShopProduct]:
    """The products of at most `limit` records, in order. Of equal ids the first is kept; clicks ignore case, so ids do too."""
    seen: set[str] = set()
    for number, (line, record) in enumerate(read_items(files.items), 1):
        if files.limit is not None and number > files.limit:
            return
        asin = record.get("asin") if isinstance(record, dict) else None
        try:
            product = read_record(record, (extras or {}).get(str(asin)), (human or {}).get(str(asin)))
        except (BadRecord, TypeError, AttributeError) as error:
            raise DataError(f"{files.items}: line {line}: product {number}: {error}") from error
        if product is not None and product.asin.lower() not in seen:
            seen.add(product.asin.lower())
            yield product


def _identities(files: Files) -> Iterator[str]:
    """The ids of the first `limit` records."""
    for _, record in itertools.islice(read_items(files.items), files.limit):
        if isinstance(record, dict) and isinstance(record.get("asin"), str):
            yield record["asin"]


def _companion(path: Path | None, wanted: set[str] | None, check: Callable[[Any], object]) -> dict[str, Any] | None:
    """The entries of the wanted products. Raises DataError for one that cannot be read."""
    if path is None:
        return None
    entries = {}
    for line, asin, value in read_map(path):
        if wanted is None or asin in wanted:
            try:
                check(value)
            except BadRecord as error:
                raise DataError(f"{path}: line {line}: product {asin[:40]}: {error}") from error
            entries[asin] = value
    return entries
