"""Statistics of two runs on the same held-out tasks: paired tests, an interval, and the difference of two configs.

The task is the unit: the chains of a task are averaged first, and tests compare the two means of each task. So a run with more
chains per task is not taken for more evidence than it is.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from operator import mul
from typing import Any

EXACT = 14
"""Up to so many differing tasks the permutation test counts all assignments of signs."""
MAX_ROUNDS = 10_000
MIN_ROUNDS = 1_000
MAX_DRAWS = 1_000_000
"""Limit of rounds times tasks, so that a test over many tasks takes a fraction of a second."""


@dataclass(frozen=True, slots=True)
class PairedTest:
    """Two runs on the tasks that both have. `difference` is b - a; `low` and `high` bound it with a probability of 95 %.

    `p_sign` and `p_permutation` are two-sided: how often a difference at least as large is seen if the runs are equally good.
    """

    num_tasks: int
    mean_a: float
    mean_b: float
    difference: float
    low: float
    high: float
    better: int
    worse: int
    equal: int
    p_sign: float
    p_permutation: float

    @property
    def verdict(self) -> str:
        """The result in words."""
        if self.better == self.worse == 0:
            return f"no difference on any of {self.num_tasks} tasks"
        word = "better" if self.difference > 0 else "worse" if self.difference < 0 else "equal"
        if self.p_permutation < 0.05 and word != "equal":
            return f"B is {word}: a difference of this size is seen by chance in {percent(self.p_permutation)} of cases"
        return f"not decided: a difference of this size is seen by chance in {percent(self.p_permutation)} of cases"

    def to_json(self) -> dict[str, Any]:
        """All fields and the verdict."""
        return {**asdict(self), "verdict": self.verdict}


def percent(share: float) -> str:
    """35 %, 0.4 %, less than 0.01 %."""
    return "less than 0.01 %" if share < 1e-4 else f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def paired_test(a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]], seed: int = 0) -> PairedTest | None:
    """Compare the values of each task that both mappings have. None if they have no task in common.

    The same input gives the same result: random draws start from `seed`.
    """
    shared = [task for task in a if a[task] and b.get(task)]
    if not shared:
        return None
    left, right = [mean(a[task]) for task in shared], [mean(b[task]) for task in shared]
    differences = [after - before for before, after in zip(left, right, strict=True)]
    low, high = bootstrap_interval(differences, seed=seed)
    better, worse = sum(each > 0 for each in differences), sum(each < 0 for each in differences)
    return PairedTest(
        num_tasks=len(shared),
        mean_a=mean(left),
        mean_b=mean(right),
        difference=mean(differences),
        low=low,
        high=high,
        better=better,
        worse=worse,
        equal=len(shared) - better - worse,
        p_sign=sign_test(better, worse),
        p_permutation=permutation_test(differences, seed=seed),
    )


def mean(values: Sequence[float]) -> float:
    """The mean of at least one value."""
    return math.fsum(values) / len(values)


def sign_test(better: int, worse: int) -> float:
    """The two-sided p-value of so many wins and losses if both are equally likely. Ties are left out by the caller."""
    total = better + worse
    tail = sum(math.comb(total, count) for count in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / (1 << total))


def permutation_test(differences: Sequence[float], *, seed: int = 0) -> float:
    """The two-sided p-value of the mean of paired differences, by flipping their signs.

    All assignments are counted if at most EXACT differences are not 0. Otherwise random ones are drawn, and the observed one
    counts as one of them, so the value is never 0 (Phipson and Smyth, 2010).
    """
    moved = [abs(each) for each in differences if each]
    if not moved:
        return 1.0
    observed = abs(math.fsum(differences)) * (1 - 1e-12)
    if len(moved) <= EXACT:
        every = product((-1.0, 1.0), repeat=len(moved) - 1)  # the first sign is fixed: the test is two-sided
        sums = [abs(moved[0] + math.fsum(map(mul, signs, moved[1:]))) for signs in every]
        return sum(each >= observed for each in sums) / len(sums)
    rng, rounds = random.Random(seed), _rounds(len(moved))
    as_large = 0
    for _ in range(rounds):
        as_large += abs(sum(map(mul, moved, rng.choices((-1.0, 1.0), k=len(moved))))) >= observed
    return (as_large + 1) / (rounds + 1)


def bootstrap_interval(
    values: Sequence[float], *, level: float = 0.95, seed: int = 0, rounds: int | None = None
) -> tuple[float, float]:
    """The percentile interval of the mean of values, from `rounds` resampled means."""
    if min(values) == max(values):
        return values[0], values[0]
    rng, size = random.Random(seed), len(values)
    means = sorted(sum(rng.choices(values, k=size)) / size for _ in range(rounds or _rounds(size)))
    cut = round((1 - level) / 2 * (len(means) - 1))
    return means[cut], means[-1 - cut]


def _rounds(size: int) -> int:
    return max(MIN_ROUNDS, min(MAX_ROUNDS, MAX_DRAWS // size))


def config_difference(*configs: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """The dotted keys whose values differ, with the value of each config; None where a config does not have the key."""
    flat = [flatten(config) for config in configs]
    rows = {key: tuple(config.get(key) for config in flat) for key in dict.fromkeys(key for config in flat for key in config)}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted keys. An empty mapping is left out."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
