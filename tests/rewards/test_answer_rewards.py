"""Exact match, SQuAD's exact match and F1."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.errors import RewardError
from agentfly.rewards import as_reward
from agentfly.rewards.answers import normalize


def score(name: str, trajectory: Any) -> float:
    return asyncio.run(as_reward(name).score(trajectory)).reward


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("84", "84", 1.0), (" 84\n", "84 ", 1.0), ("84", 84, 1.0), ("84", ["83", "84"], 1.0), ("84", ("84",), 1.0),
        ("84.0", "84", 0.0), ("The answer is 84", "84", 0.0), ("Paris", "paris", 0.0), ("", "84", 0.0),
        ("84", numpy.array(["84"]), 1.0),
    ],
)  # fmt: skip
def test_exact_match(chain: Any, prediction: str, answer: Any, expected: float) -> None:
    assert score("exact_match", chain(prediction, answer=answer)) == expected


@pytest.mark.parametrize("answer", [[], None, [None]])
def test_an_answer_that_nothing_can_match_is_an_error(chain: Any, answer: Any) -> None:
    for name in ("exact_match", "qa_f1", "math_equal"):
        with pytest.raises(RewardError, match="'answer' holds no answer"):
            score(name, chain("84", answer=answer))


def test_normalisation_is_that_of_squad() -> None:
    assert normalize(" The  Eiffel-Tower,\tin a 'Paris'! ") == "eiffeltower in paris"
    assert normalize("theatre an ananas") == "theatre ananas"


@pytest.mark.parametrize(
    ("prediction", "answer", "exact", "f1"),
    [
        ("The Eiffel Tower.", "eiffel tower", 1.0, 1.0),
        ("tower in Paris", "Eiffel Tower", 0.0, 2 * 1 / (3 + 2)),
        ("a b b", ["b b b", "z"], 0.0, 2 * 2 / (2 + 3)),
        ("London", "Paris", 0.0, 0.0),
        ("", "Paris", 0.0, 0.0),
        ("the", "a", 0.0, 0.0), ("", "a", 0.0, 0.0), (".", "The", 0.0, 0.0), ("a.", "A", 1.0, 1.0), ("(A)", "A", 1.0, 1.0),
        ("vitamin", "Vitamin A", 0.0, 2 / 3), ("", "", 0.0, 0.0), ("?", "!", 0.0, 0.0),
        ("5", "-5", 0.0, 0.0),
        ("15", "1.5", 0.0, 0.0), ("1,5", "15", 0.0, 0.0), ("1/2", "12", 0.0, 0.0), ("0.5", "1/2", 1.0, 1.0), ("-5.0",
        "\u22125", 1.0, 1.0),
        ("1,000", "1000", 1.0, 1.0), ("$5.", "5", 1.0, 1.0), ("34", "3:4", 0.0, 0.0), ("23", "2^3", 0.0, 0.0), ("105",
        "10-5", 0.0, 0.0),
        ("007", "7", 0.0, 0.0), ("C", "C++", 0.0, 0.0), ("c++.", "C++", 1.0, 1.0), ("C", "C#", 0.0, 0.0), ("B", "B-", 0.0, 0.0),
        ("A", "A+", 0.0, 0.0), ("<5", "5", 0.0, 2 / 3), ("COVID19", "covid-19", 1.0, 1.0), ("U.S.", "US", 1.0, 1.0),
        ("19901995", "1990-1995", 0.0, 0.0), ("1990s", "1990's", 1.0, 1.0), ("well-known", "wellknown", 1.0, 1.0),
    ],
)  # fmt: skip
def test_qa_exact_match_and_f1(chain: Any, prediction: str, answer: Any, exact: float, f1: float) -> None:
    trajectory = chain(prediction, answer=answer)
    assert score("qa_exact_match", trajectory) == exact
    assert score("qa_f1", trajectory) == pytest.approx(f1)


@given(prediction=st.text(max_size=30), answer=st.text(max_size=30))
def test_f1_is_symmetric_bounded_and_full_exactly_on_the_same_words(chain: Any, prediction: str, answer: str) -> None:
    value = score("qa_f1", chain(prediction, answer=answer))
    assert 0.0 <= value <= 1.0
    assert value == score("qa_f1", chain(answer, answer=prediction))
    words = sorted(normalize(prediction).split())
    assert (value == 1.0) == (words == sorted(normalize(answer).split()) != [])
