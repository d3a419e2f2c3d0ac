"""Fuzzy matching and the score, against values worked out by hand and an independent formula."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.envs.webshop.shop.fuzzy import distance, longest_common, token_set_ratio
from agentfly.envs.webshop.shop.score import attributes_hit, colour_of, options_hit, score, type_share


@pytest.mark.parametrize(
    ("left", "right", "ratio"),
    [
        ("long sleeve", "sleeve long", 100),
        ("long sleeve", "sleeve", 100),
        ("", "red", 0),
        ("!!", "red", 0),
        ("red", "RED!", 100),
        ("café", "caf", 100),
        # "shoe" against "shoes": one insertion over nine letters.
        ("shoe", "shoes", round(100 - 100 / 9)),
        # shared "red", left "mug" and "cup": "red mug" against "red cup" needs 4 edits ("mug" to "cup" keeps the u) over 14.
        ("red mug", "red cup", round(100 - 400 / 14)),
        # Nothing shared: "abc" against "xyz".
        ("abc", "xyz", 0),
    ],
)
def test_likeness_of_short_texts(left, right, ratio):
    assert token_set_ratio(left, right) == ratio
    assert token_set_ratio(right, left) == ratio


def slow_common(left: str, right: str) -> int:
    rows = [[0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i, one in enumerate(left, 1):
        for j, other in enumerate(right, 1):
            rows[i][j] = rows[i - 1][j - 1] + 1 if one == other else max(rows[i - 1][j], rows[i][j - 1])
    return rows[-1][-1]


@settings(max_examples=200, deadline=None)
@given(st.text("abc ", max_size=30), st.text("abc ", max_size=30))
def test_the_common_subsequence_is_the_textbooks(left, right):
    assert longest_common(left, right) == slow_common(left, right)
    assert distance(left, right) == len(left) + len(right) - 2 * slow_common(left, right)


def buy(corner, goal, asin, **chosen):
    product = corner.product(asin)
    nouns, wanted = corner.nouns(asin, product.title), corner.nouns(goal.asin, goal.name)
    return score(product, chosen, corner.price(asin), goal, nouns, wanted)


def test_the_right_purchase_has_the_full_score(corner, goal):
    full = buy(corner, goal, "B000000001", color="blue", size="large")
    assert (full.total, full.type, full.attributes, full.options, full.price) == (1, 1, 1, 1, 1)


def test_what_is_missing_is_taken_off(corner, goal):
    # Two attributes, two options and the price: five things are asked for.
    assert buy(corner, goal, "B000000001", color="blue").total == pytest.approx(4 / 5)
    assert buy(corner, goal, "B000000001").total == pytest.approx(3 / 5)
    assert buy(corner, replace(goal, price_upper=10.0), "B000000001").total == pytest.approx(2 / 5)


def test_another_kind_of_thing_scores_nothing(corner, goal):
    assert buy(corner, goal, "B0000000LA").total == 0


def test_the_kind_depends_on_nouns_query_and_category(corner, goal):
    mug = corner.product("B000000002")
    goal_nouns = ["mug", *(f"noun{number}" for number in range(11))]
    assert type_share(mug, goal, ["mug"], ["mug", "cup"]) == 1.0
    assert type_share(mug, goal, ["mug"], goal_nouns) == 0.1  # 1 of 12 is below 0.1
    assert type_share(mug, goal, ["lamp"], ["mug"]) == 0.0
    stranger = replace(mug, query="cups", product_category="Garden › Pots")
    assert type_share(stranger, goal, ["mug"], ["mug", "a", "b", "c", "d", "e"]) == 0.5
    assert type_share(stranger, goal, ["mug"], ["mug", "a"]) == 1.0
    assert type_share(stranger, replace(goal, query="cups"), ["mug"], ["mug", "a", "b", "c", "d", "e"]) == 1.0
    assert type_share(stranger, goal, [], []) == 0.5  # a name without nouns counts as 0.2


def test_an_attribute_may_stand_in_the_text(corner):
    mug = corner.product("B000000001")
    assert attributes_hit(mug, ["stonewares", "holds much", "made of gold"]) == 2


def test_options_are_compared_by_colour_or_as_name_and_value():
    assert options_hit(["navy blue"], {"color": "blue"}) == 1
    assert options_hit(["x-large"], {"size": "x-large"}) == 1
    assert options_hit(["x-large", "x-large"], {"size": "small"}) == 0
    assert options_hit(["sky blue", "pack of 2"], ["blue", "pack of 2"]) == 2
    # A flaw of the original that is kept: "standard" holds the colour "tan".
    assert colour_of("standard") == "tan"
    assert options_hit(["standard"], {"size": "standard"}) == 0


def test_the_total_is_rounded_as_the_original_rounds_it(corner, goal):
    """The original divides first, and then multiplies by the kind. The other order differs in the last bit."""
    bought = corner.product("B000000001")
    wanted = ["mug", *(f"noun{number}" for number in range(11))]  # one noun of 12 is shared: the kind counts 0.1
    three = replace(goal, options={})
    assert 0.1 * 3 / 3 != 0.1 * (3 / 3)
    assert score(bought, {}, 12.5, three, ["mug"], wanted).total == 0.1 * (3 / 3)
    assert 0.1 * 3 / 5 != 0.1 * (3 / 5)
    assert score(bought, {}, 12.5, goal, ["mug"], wanted).total == 0.1 * (3 / 5)
