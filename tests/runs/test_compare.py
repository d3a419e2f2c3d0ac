"""Paired tests of two runs, against values that are known or computed another way, and the difference of two configs."""

from __future__ import annotations

import random

import pytest

from agentfly.runs.compare import (
    bootstrap_interval,
    config_difference,
    paired_test,
    permutation_test,
    sign_test,
)


@pytest.mark.parametrize(
    ("better", "worse", "p"),
    [(0, 0, 1.0), (5, 5, 1.0), (1, 0, 1.0), (5, 0, 0.0625), (0, 5, 0.0625), (9, 1, 22 / 1024), (20, 0, 2 / 2**20)],
)
def test_the_sign_test_is_the_binomial_tail(better: int, worse: int, p: float) -> None:
    assert sign_test(better, worse) == pytest.approx(p)


def test_the_permutation_test_counts_all_signs() -> None:
    # 2^3 assignments of 1, 2, 3: only +++ and --- reach 6; 4 is also reached by ++- and --+ of the order (-1, 2, 3).
    assert permutation_test([1.0, 2.0, 3.0]) == pytest.approx(2 / 8)
    assert permutation_test([-1.0, 2.0, 3.0]) == pytest.approx(4 / 8)
    assert permutation_test([0.0, 0.0]) == 1.0
    assert permutation_test([1.0, -1.0]) == 1.0


def test_differences_of_equal_size_make_it_the_sign_test() -> None:
    for better, worse in ((10, 2), (30, 12), (40, 38)):
        found = permutation_test([1.0] * better + [-1.0] * worse + [0.0] * 5)
        assert found == pytest.approx(sign_test(better, worse), abs=0.012)


def test_random_flips_are_repeatable_and_never_give_zero() -> None:
    differences = [1.0] * 200
    assert permutation_test(differences) == permutation_test(differences) > 0


def test_the_interval_holds_the_mean_and_narrows_with_more_tasks() -> None:
    rng = random.Random(1)
    few, many = [rng.gauss(0.1, 1.0) for _ in range(20)], [rng.gauss(0.1, 1.0) for _ in range(500)]
    for values in (few, many):
        low, high = bootstrap_interval(values)
        assert low < sum(values) / len(values) < high
    width = {len(values): high - low for values in (few, many) for low, high in [bootstrap_interval(values)]}
    assert width[500] < width[20] / 3
    # The normal interval is 2 * 1.96 * s / sqrt(n) wide.
    assert width[500] == pytest.approx(2 * 1.96 / 500**0.5, rel=0.2)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = random.Random(3)
    hits = 0
    for _ in range(60):
        low, high = bootstrap_interval([rng.gauss(0.5, 1.0) for _ in range(30)], rounds=400)
        hits += low <= 0.5 <= high
    assert 50 <= hits <= 60


def test_only_tasks_that_both_have_are_compared_and_chains_are_averaged_first() -> None:
    a = {"one": [0.0, 0.0, 0.0, 0.0], "two": [1.0, 0.0], "only a": [1.0], "empty": []}
    b = {"one": [1.0], "two": [0.5], "only b": [0.0], "empty": [1.0]}
    found = paired_test(a, b)
    assert found is not None
    assert (found.num_tasks, found.mean_a, found.mean_b, found.difference) == (2, 0.25, 0.75, 0.5)
    assert (found.better, found.worse, found.equal) == (1, 0, 1)
    assert found.low <= found.difference <= found.high
    assert paired_test({"x": [1.0]}, {"y": [1.0]}) is None


def test_the_verdict_says_which_run_is_better_only_if_chance_is_unlikely() -> None:
    worse, better = {str(i): [0.0] for i in range(40)}, {str(i): [float(i % 4 != 0)] for i in range(40)}
    up, down = paired_test(worse, better), paired_test(better, worse)
    assert up is not None and up.verdict.startswith("B is better")
    assert down is not None and down.verdict.startswith("B is worse")
    little = paired_test({"a": [0.0], "b": [1.0]}, {"a": [1.0], "b": [1.0]})
    assert little is not None and little.verdict.startswith("not decided")
    same = paired_test(better, better)
    assert same is not None and same.verdict == "no difference on any of 40 tasks" and same.p_permutation == 1.0


def test_configs_differ_by_dotted_keys() -> None:
    a = {"algorithm": "grpo", "train": {"lr": 1e-4, "steps": 5}, "resources": {"pools": {}}}
    b = {"algorithm": "grpo", "train": {"lr": 2e-4, "steps": 5}, "loss": {"kl_coef": 0.1}}
    assert config_difference(a, b) == {"train.lr": (1e-4, 2e-4), "loss.kl_coef": (None, 0.1)}
    assert config_difference(a, a) == {}
