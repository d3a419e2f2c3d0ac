"""Stems, terms and ranks: against published examples and formulas worked out apart from the code."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from agentfly.envs.stored import Damaged
from agentfly.envs.webshop.catalogue.index import K1, B, ProductIndex, rounded_length
from agentfly.envs.webshop.catalogue.porter import stem
from agentfly.envs.webshop.catalogue.terms import terms


@pytest.mark.parametrize(
    ("word", "stemmed"),
    # Most are examples of Porter's article.
    [
        *(
            ("caresses", "caress"),
            ("ponies", "poni"),
            ("cats", "cat"),
            ("feed", "feed"),
            ("agreed", "agre"),
            ("plastered", "plaster"),
        ),
        *(
            ("motoring", "motor"),
            ("sing", "sing"),
            ("conflated", "conflat"),
            ("hopping", "hop"),
            ("falling", "fall"),
            ("filing", "file"),
        ),
        *(("happy", "happi"), ("sky", "sky"), ("relational", "relat"), ("rational", "ration"), ("digitizer", "digit")),
        *(
            ("operator", "oper"),
            ("hopefulness", "hope"),
            ("sensibiliti", "sensibl"),
            ("triplicate", "triplic"),
            ("goodness", "good"),
        ),
        *(
            ("adjustment", "adjust"),
            ("adoption", "adopt"),
            ("probate", "probat"),
            ("rate", "rate"),
            ("cease", "ceas"),
            ("roll", "roll"),
        ),
        *(("controll", "control"), ("is", "is"), ("shoes", "shoe"), ("washable", "washabl"), ("yoyo", "yoyo")),
    ],
)
def test_words_are_stemmed_as_porter_says(word, stemmed):
    assert stem(word) == stemmed


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The women's Shoes, size 7.5!", ["women", "shoe", "size", "7.5"]),
        ("men’s T-Shirts and 1,000 pcs", ["men", "t", "shirt", "1,000", "pc"]),
        ('16" x 24" (grey/white)', ["16", "x", "24", "grei", "white"]),
        ("note:wash a_b cold", ["note:wash", "a_b", "cold"]),
        ("the of and", []),
        ("", []),
    ],
)
def test_text_becomes_search_terms(text, found):
    assert terms(text) == found


def test_a_very_long_word_is_cut_into_pieces():
    assert [len(part) for part in terms("é" * 600)] == [255, 255, 90]


DOCUMENTS = [["red", "mug"], ["blue", "mug", "mug"], ["red", "lamp", "tall", "lamp"], [], ["blue"]]


def by_hand(query: list[str]) -> list[float]:
    mean = sum(map(len, DOCUMENTS)) / len(DOCUMENTS)
    scores = []
    for words in DOCUMENTS:
        total = 0.0
        for word in query:
            holding = sum(word in other for other in DOCUMENTS)
            count = words.count(word)
            if count:
                rare = math.log(1 + (len(DOCUMENTS) - holding + 0.5) / (holding + 0.5))
                total += rare * count / (count + K1 * (1 - B + B * len(words) / mean))
        scores.append(total)
    return scores


@pytest.mark.parametrize("query", [["mug"], ["red", "mug"], ["mug", "mug", "red"], ["lamp", "blue"], ["unknown"], []])
def test_ranks_are_those_of_the_formula(query):
    scores = by_hand(query)
    wanted = sorted(
        (place for place, score in enumerate(scores) if score > 0), key=lambda place: (-round(scores[place], 6), place)
    )
    assert ProductIndex.build(DOCUMENTS).search(query, 10) == wanted


def test_the_weights_are_those_of_the_formula():
    index = ProductIndex.build(DOCUMENTS)
    term = index.numbers["lamp"]
    part = slice(int(index.starts[term]), int(index.starts[term + 1]))
    assert index.weights[part].tolist() == pytest.approx([by_hand(["lamp"])[2]], rel=1e-6)


def test_lengths_are_rounded_as_one_byte_remembers_them():
    assert [rounded_length(n) for n in (0, 7, 23, 24, 39, 40, 41, 100, 1000)] == [0, 7, 23, 24, 39, 40, 40, 96, 984]


def test_rare_and_common_words_are_ranked_alike():
    """Rare words take another path through the index: both must rank as a plain sum does."""
    rng = random.Random(0)
    words = [f"w{number}" for number in range(60)]
    documents = [rng.choices(words, weights=[1 / (n + 1) for n in range(60)], k=rng.randint(1, 30)) for _ in range(400)]
    index = ProductIndex.build(documents)
    for _ in range(200):
        query = rng.choices(words, k=rng.randint(1, 3))
        scores = np.zeros(400)
        for word in query:
            term = index.numbers[word]
            part = slice(int(index.starts[term]), int(index.starts[term + 1]))
            scores[index.documents[part]] += index.weights[part]
        rounded = scores.astype(np.float32)
        wanted = sorted((int(n) for n in np.flatnonzero(rounded > 0)), key=lambda n: (-rounded[n], n))[:50]
        assert index.search(query, 50) == wanted


def test_an_index_is_read_back_as_it_was_written(tmp_path):
    index = ProductIndex.build(DOCUMENTS)
    index.save(tmp_path)
    again = ProductIndex.open(tmp_path)
    assert again.numbers == index.numbers
    assert again.search(["red", "mug"], 10) == index.search(["red", "mug"], 10)
    np.save(tmp_path / "weights.npy", np.zeros(3, np.float32))
    with pytest.raises(Damaged):
        ProductIndex.open(tmp_path)
