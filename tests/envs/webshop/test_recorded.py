"""Equal to the original: every recorded observation, clickable, reward, goal and result list. Skipped where there are none."""

from __future__ import annotations

import gzip
import json

import pytest

from agentfly.envs.webshop.catalogue.goals import Goals, ShopGoal, bounds_above, num_goals, price_of
from agentfly.envs.webshop.catalogue.nouns import find_tagger, light
from agentfly.envs.webshop.shop.visit import Visit


def test_every_recorded_step_is_equal(shop, episodes):
    compared = 0
    for episode in episodes["episodes"]:
        visit = Visit(shop, ShopGoal.from_dict(episode["goal"]), search=lambda words: episodes["searches"][words])
        assert (visit.observation, sorted(visit.clickables)) == (episode["start"], episode["start_clickables"])
        for step in episode["steps"]:
            assert visit.step(step["action"]) == (step["observation"], step["reward"], step["done"]), step["action"]
            assert sorted(visit.clickables) == sorted(step["clickables"]), step["action"]
            compared += 1
    assert compared == 786


def test_every_recorded_search_gives_the_same_list(shop, episodes):
    different = [words for words, listed in episodes["searches"].items() if shop.search(words) != listed]
    assert different == []
    assert len(episodes["searches"]) == 126


def test_every_recorded_goal_is_made_in_the_recorded_order(shop, recorded):
    with gzip.open(recorded / "goals_recorded.jsonl.gz", "rt") as stream:
        wanted = [ShopGoal.from_dict(json.loads(line)) for line in stream]
    drawn = {goal.asin: goal.price_upper for goal in wanted}
    counts = [num_goals(product) for product in shop.products]
    made = Goals(shop.products, counts, bound=lambda product, number: drawn[product.asin])
    assert len(made) == len(wanted) == 6910
    assert all(ours == theirs for ours, theirs in zip(made, wanted, strict=True))


def test_the_bounds_that_the_original_drew_could_have_been_ours(shop, recorded, episodes):
    with gzip.open(recorded / "goals_recorded.jsonl.gz", "rt") as stream:
        drawn = {goal["asin"]: goal["price_upper"] for goal in map(json.loads, stream)}
    for asin, bound in drawn.items():
        choices = bounds_above(shop.price(asin))
        assert bound in choices[1:] or (len(choices) < 2 and bound == 1_000_000)
    for asin, price in episodes["prices"].items():
        product = shop.product(asin)
        if len(product.pricing) == 1:
            assert price_of(product) == price
        assert min(product.pricing) <= price_of(product) <= max(product.pricing)


def test_the_stored_catalogue_is_what_the_search_engine_was_fed(shop, recorded):
    with gzip.open(recorded / "products_1000.jsonl.gz", "rt") as stream:
        for line in stream:
            document = json.loads(line)
            assert shop.product(document["id"]).searched == document["contents"]
            assert shop.product(document["id"]).price_tag == document["product"]["Price"]


def test_the_hanta_tagger_finds_the_recorded_nouns(shop, recorded):
    pytest.importorskip("HanTa", reason="HanTa is not installed: pip install 'agentfly[webshop]'")
    _, tag = find_tagger("hanta")
    with gzip.open(recorded / "title_nouns.json.gz", "rt") as stream:
        nouns = json.load(stream)
    some = list(nouns)[::10]
    assert [asin for asin in some if tag(shop.product(asin).title) != nouns[asin]] == []


def test_the_light_tagger_mostly_agrees(shop, recorded):
    with gzip.open(recorded / "title_nouns.json.gz", "rt") as stream:
        nouns = json.load(stream)
    shared = found = wanted = 0
    for asin, theirs in nouns.items():
        ours = set(light(shop.product(asin).title))
        shared, found, wanted = shared + len(ours & set(theirs)), found + len(ours), wanted + len(set(theirs))
    assert shared / found > 0.85
    assert shared / wanted > 0.85
