"""The arithmetic tasks: the same for the same seed, right, and never in two splits."""

from __future__ import annotations

import random
import re

import pytest

from agentfly import plugins
from agentfly.errors import ConfigError
from agentfly.pocket.tasks import SPLITS, arithmetic, one_step_arithmetic, two_step_problem


@pytest.mark.parametrize("tasks", [arithmetic, one_step_arithmetic])
def test_the_same_seed_gives_the_same_rows_and_another_seed_others(tasks):
    assert tasks("train", 50, seed=3) == tasks("train", 50, seed=3)
    assert tasks("train", 50, seed=3) != tasks("train", 50, seed=4)


def test_a_smaller_count_is_the_beginning_of_a_larger_one():
    assert arithmetic("test", 60)[:20] == arithmetic("test", 20)


@pytest.mark.parametrize("tasks", [arithmetic, one_step_arithmetic])
def test_no_question_is_in_two_splits_or_twice_in_one(tasks):
    questions = {split: [row["question"] for seed in (0, 1) for row in tasks(split, 400, seed)] for split in SPLITS}
    for split in SPLITS:
        assert len(set(questions[split][:400])) == 400
        assert all(set(questions[split]).isdisjoint(questions[other]) for other in SPLITS if other != split)


def test_answers_of_written_out_questions_are_what_they_say():
    checked = 0
    for row in arithmetic("train", 600):
        written = re.search(r"(\(\d+ [-+*] \d+\) [-+*] \d+)", row["question"])
        spoken = re.fullmatch(r"What is (\d+) (plus|minus|times) (\d+), (plus|minus|times) (\d+)\?", row["question"])
        sign = {"plus": "+", "minus": "-", "times": "*"}
        if spoken:
            a, first, b, second, c = spoken.groups()
            expression = f"({a} {sign[first]} {b}) {sign[second]} {c}"
        elif written:
            expression = written[1]
        else:
            continue
        checked += 1
        assert str(eval(expression)) == row["answer"], row
    assert checked > 100


def test_stopping_half_way_is_always_wrong_and_numbers_stay_small():
    rng = random.Random(0)
    for _ in range(2000):
        first, last = two_step_problem(rng).results()
        assert first != last
        assert 0 < first < 1000
        assert 0 <= last < 1000


def test_every_number_of_the_first_call_stands_in_the_question():
    for row in one_step_arithmetic("train", 300):
        assert len(re.findall(r"\d+", row["question"])) == 2
    for row in arithmetic("train", 300):
        assert len(re.findall(r"\d+", row["question"])) == 3
        assert len(row["operations"]) == row["steps"] == 2


def test_the_task_sets_have_names():
    assert plugins.resolve("tasks", "arithmetic") is arithmetic
    assert plugins.resolve("tasks", "one_step_arithmetic") is one_step_arithmetic


def test_an_unknown_split_or_an_impossible_count_is_refused():
    with pytest.raises(ConfigError, match="no split is called 'dev'"):
        arithmetic("dev")
    with pytest.raises(ConfigError, match="count must be from 1 to 2000, not 5000"):
        one_step_arithmetic("train", 5000)
    with pytest.raises(ConfigError, match="not 0"):
        arithmetic("train", 0)
