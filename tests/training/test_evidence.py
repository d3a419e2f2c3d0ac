"""The limits and statistics of the ledger: what is a fault, and what is rounding."""

from __future__ import annotations

import math
import random

import pytest

from agentfly.training.evidence import COPY, FULL, HALF, Freshness, Moved, format_of, gap_limit, is_biased, is_truncated


def test_the_limit_of_the_gap_follows_from_the_format_and_the_first_gap() -> None:
    assert format_of(in_full=True, exact=True) is FULL
    assert format_of(in_full=True, exact=False) is COPY
    assert format_of(in_full=False, exact=True) is HALF
    assert gap_limit(FULL, None) == FULL.high == 2e-3
    assert gap_limit(FULL, 1.5e-7) == FULL.low
    assert gap_limit(FULL, 5e-6) == pytest.approx(5e-4)
    assert gap_limit(FULL, 9e-3) == FULL.high, "a first gap that is itself a fault"
    assert gap_limit(FULL, math.nan) == FULL.high
    assert gap_limit(HALF, 1e-3) == 0.05
    assert gap_limit(HALF, 0.01) == pytest.approx(0.1)
    assert gap_limit(HALF, 0.04) == 0.15


@pytest.mark.parametrize("seed", range(5))
def test_rounding_in_half_precision_has_no_direction(seed: int) -> None:
    chance = random.Random(seed)
    noise = [chance.gauss(0.0, 0.05) if chance.random() < 0.99 else chance.gauss(0.0, 1.0) for _ in range(2000)]
    count, bias = len(noise), sum(noise) / len(noise)
    gap, error = sum(map(abs, noise)) / count, math.sqrt(sum(each**2 for each in noise)) / count
    assert not is_biased(HALF, gap, bias, error)
    assert is_biased(HALF, gap, bias + 0.06, math.hypot(error, 0.06 / math.sqrt(count)))
    assert not is_biased(FULL, 1e-5, 1e-5, 1e-7), "below the rounding of float32"


@pytest.mark.parametrize(("seen", "tokens", "fault"), [
    (0, 250, False), (0, 330, True), (20, 400, False), (2, 512, True), (51, 512, False), (102, 512, False), (0, 0, False),
])  # fmt: skip
def test_a_tail_that_is_missing_is_told_from_one_that_is_small(seen: int, tokens: int, fault: bool) -> None:
    assert is_truncated(seen, tokens, 0.1) is fault


def answers(weights: str, noise: float, seed: int, count: int = 60, moved: float = 1e-3) -> list[Moved]:
    """Log-probs of some tokens: those of both versions, and the engine's, each with its rounding."""
    chance, found = random.Random(seed), []
    for _ in range(count):
        old = -chance.expovariate(1.0)
        new = old + chance.gauss(0.0, moved)
        drawn = {"new": new, "old": old}[weights]
        found.append(Moved(*(value + chance.gauss(0.0, noise) for value in (drawn, new, old))))
    return found


@pytest.mark.parametrize("noise", [1e-7, 1e-3])
def test_an_engine_with_old_weights_is_found(noise: float) -> None:
    fresh = Freshness()
    assert not all(fresh.add(answers("old", noise, seed)) for seed in range(60))
    assert fresh.share < 0.5


@pytest.mark.parametrize("noise", [0.0, 1e-7, 1e-3, 0.05, 1.0])
def test_an_engine_with_new_weights_is_never_called_old(noise: float) -> None:
    fresh = Freshness()
    assert all(fresh.add(answers("new", noise, seed)) for seed in range(2000))


def test_an_engine_that_becomes_stale_late_is_found() -> None:
    fresh = Freshness()
    assert all(fresh.add(answers("new", 1e-4, seed)) for seed in range(100))
    assert not all(fresh.add(answers("old", 1e-4, seed)) for seed in range(100, 102))


def test_tokens_that_did_not_move_say_nothing() -> None:
    fresh = Freshness()
    assert fresh.add([Moved(-1.0, -1.0, -1.0)] * 100)
    assert math.isnan(fresh.share)
