"""The recorded episodes of the original shop where they lie beside the checkout, a small shop, and a cache folder."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from agentfly.envs.webshop.catalogue.catalogue import Catalogue
from agentfly.envs.webshop.catalogue.goals import ShopGoal
from agentfly.envs.webshop.catalogue.products import ShopProduct

RECORDED = Path(__file__).resolve().parents[4] / "shared" / "data" / "webshop"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> Path:
    """Nothing of a test is left in the user's cache."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("AGENTFLY_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def recorded() -> Path:
    if not RECORDED.is_dir():
        pytest.skip(f"no recorded episodes of the original shop: no folder {RECORDED}")
    return RECORDED


@pytest.fixture(scope="session")
def episodes(recorded) -> dict[str, Any]:
    with gzip.open(recorded / "recorded_episodes.json.gz", "rt") as stream:
        return json.load(stream)


@pytest.fixture(scope="session")
def shop(recorded, episodes, tmp_path_factory) -> Catalogue:
    """The original's small catalogue with the prices that the recordings drew and the nouns that they used."""
    from agentfly.envs.webshop.catalogue.disk import open_files
    from agentfly.envs.webshop.catalogue.files import locate

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTFLY_CACHE", str(tmp_path_factory.mktemp("recorded")))
        products, index = open_files(locate(str(recorded)))
    return Catalogue(
        "recorded",
        products,
        index=index,
        asins=products.asins,
        counts=products.counts,
        nouns=products.nouns,
        prices=episodes["prices"],
    )


@pytest.fixture(scope="session")
def corner() -> Catalogue:
    """Twelve mugs and a lamp."""
    mugs = [
        ShopProduct(
            asin=f"B00000000{number:X}",
            title=f"Blue Mug {number}" if number else "Red Mug",
            description="A mug to drink from." if number else "",
            bullets=("Dishwasher safe ", " Holds much"),
            pricing=(12.5,) if number else (10.0, 20.0),
            options={"color": ("red", "blue"), "size": ("small", "large")} if number < 2 else {},
            attributes=("dishwasher safe", "stoneware"),
            query="mugs",
            product_category="Home › Kitchen › Mugs",
        )
        for number in range(12)
    ]
    lamp = ShopProduct(asin="B0000000LA", title="Tall Lamp", query="lamps", product_category="Home › Lighting", pricing=(80.0,))
    return Catalogue("corner", [*mugs, lamp])


@pytest.fixture
def goal() -> ShopGoal:
    return ShopGoal(
        asin="B000000001",
        instruction="Find me a stoneware mug with color: blue, and size: large, and price lower than 20.00 dollars",
        attributes=("stoneware", "dishwasher safe"),
        options={"color": "blue", "size": "large"},
        price_upper=20.0,
        name="Blue Mug 1",
        query="mugs",
        product_category="Home › Kitchen › Mugs",
    )
