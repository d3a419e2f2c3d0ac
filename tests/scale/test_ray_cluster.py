"""Reservations on the nodes of a Ray cluster: placed by what is free, noticed when lost, and nothing of them is left."""

from __future__ import annotations

import pytest

from tests.scale.ray_local import inside

pytestmark = pytest.mark.timeout(1900)


@pytest.fixture(scope="module")
def told() -> dict[str, str]:
    found: dict[str, str] = inside("tests.scale.ray_cases:scenarios")
    return found


@pytest.mark.parametrize(
    ("scenario", "sentence"),
    [
        ("reservations_spread", "reservations go to the node with the fewest, and wait for room"),
        ("a_child_ends", "the end of a child and what it printed are told"),
        ("a_child_is_killed", "a child ends with its group, and with its reservation"),
        ("questions", "a node answers questions"),
        ("too_much", "a share that no node could hold is refused, with what the nodes have"),
        ("closed_reservation", "a reservation that is closed leaves nothing"),
        ("node_killed", "a killed node is noticed within ten seconds, and its reservations can be placed elsewhere"),
        ("node_frozen", "a frozen node is noticed within ten seconds, and nothing is placed on it"),
        ("all_closed", "closing leaves no process"),
    ],
)
def test_hosts(told: dict[str, str], scenario: str, sentence: str) -> None:
    assert told[scenario] == "", sentence
