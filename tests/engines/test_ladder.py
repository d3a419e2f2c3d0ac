"""Sizes of graphs: coarse ones first, the fitting one when it has been missed often."""

from __future__ import annotations

from agentfly.engines.local.ladder import Ladder


def test_the_first_size_is_a_coarse_one_and_a_larger_wish_gets_a_larger_one() -> None:
    ladder = Ladder((1, 8, 32), (2, 4, 16), most=20)
    assert ladder.pick(3) == 8
    assert ladder.pick(8) == 8
    assert ladder.pick(9) == 20  # 32 is above the most there is
    assert ladder.pick(20) == 20


def test_a_size_that_fits_better_comes_when_it_has_been_missed_often() -> None:
    ladder = Ladder((8, 32), (4, 16), most=32, patience=3)
    assert [ladder.pick(3) for _ in range(5)] == [8, 8, 8, 4, 4]
    assert ladder.pick(5) == 8
    assert ladder.pick(2) == 4


def test_a_larger_recorded_size_serves_until_then() -> None:
    ladder = Ladder((8, 32), (), most=32, patience=2)
    assert ladder.pick(30) == 32
    assert [ladder.pick(1) for _ in range(3)] == [32, 8, 8]
