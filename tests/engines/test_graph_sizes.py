"""Sizes of graphs: coarse ones first, the fitting one when it has been missed often."""

from __future__ import annotations

from agentfly.engines.local.cuda_graphs import GraphSizes


def test_the_first_size_is_a_coarse_one_and_a_larger_wish_gets_a_larger_one() -> None:
    sizes = GraphSizes((1, 8, 32), (2, 4, 16), largest=20)
    assert sizes.choose(3) == 8
    assert sizes.choose(8) == 8
    assert sizes.choose(9) == 20  # 32 is above the most there is
    assert sizes.choose(20) == 20


def test_a_size_that_fits_better_comes_when_it_has_been_missed_often() -> None:
    sizes = GraphSizes((8, 32), (4, 16), largest=32, patience=3)
    assert [sizes.choose(3) for _ in range(5)] == [8, 8, 8, 4, 4]
    assert sizes.choose(5) == 8
    assert sizes.choose(2) == 4


def test_a_larger_recorded_size_serves_until_then() -> None:
    sizes = GraphSizes((8, 32), (), largest=32, patience=2)
    assert sizes.choose(30) == 32
    assert [sizes.choose(1) for _ in range(3)] == [32, 8, 8]
