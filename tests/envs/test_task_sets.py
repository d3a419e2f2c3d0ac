"""Splits, counts and tables that the task sets share."""

from __future__ import annotations

import pytest

from agentfly.envs.task_sets import DEFAULT_COUNTS, SPLITS, check_count, check_split, read_table, split_of
from agentfly.errors import ConfigError


def test_a_count_is_the_given_one_or_the_default_of_the_split():
    assert [check_count(split, None) for split in SPLITS] == list(DEFAULT_COUNTS.values())
    assert check_count("test", 7, most=7) == 7
    assert check_count("test", None, default={"test": 3}) == 3


@pytest.mark.parametrize(
    ("split", "count", "most", "said"),
    [
        ("dev", 1, None, "no split is called 'dev'; there are train, validation, test."),
        ("test", 0, None, "count must be at least 1, not 0."),
        ("test", 8, 7, "count must be from 1 to 7, not 8."),
        ("test", 1.5, None, "count must be at least 1, not 1.5."),
    ],
)
def test_an_unknown_split_and_a_count_out_of_range_are_refused(split, count, most, said):
    with pytest.raises(ConfigError, match=said):
        check_count(split, count, most=most)


def test_a_world_may_know_more_splits():
    assert check_split("valid_seen", ["train", "valid_seen"]) == "valid_seen"


def test_a_tenth_of_the_texts_is_for_validation_and_a_tenth_for_test():
    found = [split_of(f"text {number}") for number in range(2000)]
    assert abs(found.count("validation") - 200) < 50
    assert abs(found.count("test") - 200) < 50


def test_a_table_is_read_once():
    package = "agentfly.envs.code"
    assert read_table(package, "kinds.json") is read_table(package, "kinds.json")
