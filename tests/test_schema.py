"""Type hints with bounds: what they accept, what they convert, and how they are described."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.errors import ConfigError
from agentfly.schema import Bounds, Count, Name, Positive, Rule, check_fields, read, setting, type_name, words

Even = Annotated[int, Rule(lambda number: number % 2 == 0, "an even number")]


@pytest.mark.parametrize(
    ("hint", "value", "result"),
    [
        (float, 1, 1.0),
        (int | None, None, None),
        (list[str], "a, b,", ["a", "b"]),
        (list[int], (1, 2), [1, 2]),
        (tuple[str, ...], ["a"], ("a",)),
        (tuple[float, float], [0, 1], (0.0, 1.0)),
        (Mapping[str, int], {"a": 1}, {"a": 1}),
        (Count | Literal["auto"], "auto", "auto"),
        (str | dict[str, Any], {"kind": "x"}, {"kind": "x"}),
        (Any, object, object),
    ],
)
def test_a_value_that_fits_is_returned_as_the_type(hint: Any, value: Any, result: Any) -> None:
    made = read("key", value, hint)
    assert made == result
    assert type(made) is type(result)


@pytest.mark.parametrize(
    ("hint", "value", "sentence"),
    [
        (int, True, "key must be an integer, not True"),
        (bool, 1, "key must be true or false, not 1"),
        (float, math.nan, "key must be a number, not nan"),
        (int | None, "x", "key must be an integer, not 'x'"),
        (Count | Literal["auto"], 0, "key must be an integer of at least 1 or 'auto', not 0"),
        (Literal[1, 2], True, "key must be 1 or 2, not True"),
        (Literal["slots", "pages"], "page", "key must be 'slots' or 'pages', not 'page'; did you mean 'pages'?"),
        (Positive, 0, "key must be a number above 0, not 0"),
        (Name, "", "key must be a string that is not empty, not ''"),
        (Even, 3, "key must be an even number, not 3"),
        (list[int], "12", "key must be a list of integers, not '12'"),
        (list[int], [1, "x"], "key[1] must be an integer, not 'x'"),
        (tuple[float, float], [1.0], "key must be a list of 2 numbers, not [1.0]"),
        (Mapping[str, int], {"a": "x"}, "key.a must be an integer, not 'x'"),
        (Mapping[str, int], [1], "key must be a table, not [1]"),
        (Iterable[int], 5, "key must be a list of integers, not 5"),
        (str, b"x" * 100, f"key must be a string, not {repr(b'x' * 100)[:77]}..."),
    ],
)
def test_a_value_that_does_not_fit_gets_one_sentence(hint: Any, value: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        read("key", value, hint)
    assert str(error.value) == sentence


@given(st.floats(-10, 10), st.floats(-10, 10), st.integers(-12, 12))
def test_a_number_is_accepted_exactly_within_its_bounds(first: float, second: float, value: int) -> None:
    low, high = sorted((first, second))
    for bounds, good in (
        (Bounds(low=low), value >= low),
        (Bounds(above=low, high=high), low < value <= high),
        (Bounds(low=low, below=high), low <= value < high),
    ):
        try:
            assert read("key", value, int, bounds) == value
            assert good
        except ConfigError:
            assert not good


@pytest.mark.parametrize(
    ("bounds", "phrase"),
    [
        (Bounds(), "a number"),
        (Bounds(low=0, high=1), "a number from 0 to 1"),
        (Bounds(above=0, high=1), "a number above 0 and at most 1"),
        (Bounds(above=0, below=1), "a number above 0 and below 1"),
        (Bounds(high=3), "a number at most 3"),
        (Bounds(low=1, high=1), "1"),
        (Bounds(low=0.001, high=1 << 20), "a number from 0.001 to 1048576"),
    ],
)
def test_bounds_are_told_in_words(bounds: Bounds, phrase: str) -> None:
    assert words(float, bounds) == phrase


def test_the_column_of_a_table_has_no_articles() -> None:
    assert type_name(Count | Literal["auto"]) == "integer of at least 1 or 'auto'"
    assert type_name(tuple[float, float] | None) == "list of 2 numbers"


@dataclass(frozen=True)
class Settings:
    share: float = setting(0.5, "a share", low=0, high=1)
    names: tuple[Name, ...] = ()


def test_every_field_of_a_dataclass_is_checked() -> None:
    check_fields(Settings(1, ("a",)), "table.")
    with pytest.raises(ConfigError, match=r"table\.share must be a number from 0 to 1, not 2"):
        check_fields(Settings(2), "table.")
    with pytest.raises(ConfigError, match=r"table\.names\[1\] must be a string that is not empty"):
        check_fields(Settings(0.5, ("a", "")), "table.")
