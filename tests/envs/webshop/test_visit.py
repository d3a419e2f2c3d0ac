"""A visit: pages, what can be clicked, and everything a model may write."""

from __future__ import annotations

import pytest

from agentfly.envs.webshop.catalogue.catalogue import Catalogue
from agentfly.envs.webshop.catalogue.products import ShopProduct
from agentfly.envs.webshop.shop.visit import Visit


@pytest.fixture
def visit(corner, goal) -> Visit:
    return Visit(corner, goal)


HEAD = "Instruction: [SEP] Find me a stoneware mug with color: blue, and size: large, and price lower than 20.00 dollars"


def test_a_whole_visit(visit):
    assert visit.observation == f"WebShop [SEP] {HEAD} [SEP] Search"
    page = visit.step("search[large mug]").observation
    assert page.startswith(f"{HEAD} [SEP] Back to Search [SEP] Page 1 (Total results: 12) [SEP] Next > [SEP] B00000000")
    assert "Red Mug [SEP] $10.0 to $20.0" in page
    second = visit.step("click[next >]").observation
    assert "Page 2 (Total results: 12) [SEP] < Prev [SEP] Next > [SEP]" in second
    assert visit.step("click[< prev]").observation == page
    item = visit.step("click[b000000001]").observation
    assert item == (
        f"{HEAD} [SEP] Back to Search [SEP] < Prev [SEP] color [SEP] red [SEP] blue [SEP] size [SEP] small [SEP] large "
        f"[SEP] Blue Mug 1 [SEP] Price: $12.5 [SEP] Rating: N.A. [SEP] Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
    )
    assert visit.step("click[blue]").observation == item
    assert (
        visit.step("click[features]").observation
        == f"{HEAD} [SEP] Back to Search [SEP] < Prev [SEP] Dishwasher safe [SEP] Holds much"
    )
    assert visit.step("click[< prev]").observation == item
    assert visit.chosen == {"color": "blue"}
    visit.step("click[large]")
    step = visit.step("click[Buy Now]")
    assert (step.reward, step.done) == (1.0, True)
    assert 'options [SEP] {"color": "blue", "size": "large"}' in step.observation
    assert visit.clickables == []


def test_going_back_to_the_results_forgets_the_options(visit):
    for action in ("search[large mug]", "click[b000000001]", "click[red]", "click[< prev]"):
        visit.step(action)
    assert (visit.page, visit.chosen) == ("results", {})


def test_a_search_from_an_item_leaves_it(visit):
    for action in ("search[large mug]", "click[b000000001]", "click[red]", "search[lamp]"):
        visit.step(action)
    assert (visit.page, visit.chosen, visit.results) == ("results", {}, ["B0000000LA"])


def test_pages_go_on_beyond_the_results(visit):
    for action in ("search[lamp]", "click[next >]", "click[next >]"):
        page = visit.step(action).observation
    assert page.endswith("Page 3 (Total results: 1) [SEP] < Prev [SEP] Next >")


@pytest.mark.parametrize(
    "action",
    [
        *("", "buy", "search", "search[]", "click[]", "click[search]", "click[nowhere]", "click[buy now]", "think[hm]", "[x]"),
        *("click[b000000001]", "\x00\x1b[31m", "search\x00[mug]", "SEARCH[mug]", "click[" * 1000, "\ud800", "x" * 100_000),
        "search[" + "mug " * 25_000 + "]",
    ],
)
def test_what_cannot_be_done_leaves_the_page_and_says_why(visit, action):
    before = visit.observation
    step = visit.step(action)
    assert step == (before, 0.0, False)
    assert visit.note
    assert visit.told == f"{visit.note}\n{before}"
    assert len(visit.note) < 200


def test_control_characters_in_a_query_are_only_no_words(visit):
    assert visit.step("search[\x07lamp\x1b]").observation.count("Tall Lamp") == 1


def test_after_the_end_nothing_happens(visit):
    for action in ("search[large mug]", "click[b000000001]", "click[buy now]"):
        last = visit.step(action)
    assert last.done
    for action in ("search[lamp]", "click[back to search]", "click[buy now]"):
        assert visit.step(action) == (last.observation, 0.0, True)
        assert "ended" in visit.note
    assert visit.score is not None
    assert visit.score.total == pytest.approx(3 / 5)


def test_an_option_that_is_called_like_a_button_is_the_option(corner, goal):
    from agentfly.envs.webshop.catalogue.catalogue import Catalogue
    from agentfly.envs.webshop.catalogue.products import ShopProduct

    odd = ShopProduct(asin="B0000000OD", title="Odd mug", options={"style": ("features", "plain")}, query="mugs")
    visit = Visit(Catalogue("odd", [odd, corner.product("B000000001")]), goal)
    for action in ("search[odd]", "click[b0000000od]", "click[features]"):
        visit.step(action)
    assert (visit.page, visit.chosen) == ("item", {"style": "features"})


@pytest.mark.parametrize("asin", ["b0abcdefgh", "B0abcdefgH", "buy now", "< prev"])
def test_a_product_is_opened_whatever_its_id_is_written_like(asin, goal):
    shop = Catalogue("odd", [ShopProduct(asin=asin, title="Mug", query="mugs", options={"color": ("red",)})])
    visit = Visit(shop, goal)
    visit.step("search[mug]")
    assert asin.lower() in visit.clickables
    visit.step(f"click[{asin.upper()}]")
    assert (visit.note, visit.page, visit.asin) == ("", "item", asin)
    assert "red" in visit.clickables
