"""The engines of ALFWorld and WebShop answer as they did when they were compared with the originals, to the letter."""

from __future__ import annotations

import json

import pytest

from agentfly.envs.alfworld.goal import KINDS

from . import NUM_RANDOM, STREAMS, digest, lines_of, recorded


@pytest.mark.parametrize("world", list(STREAMS))
def test_every_answer_of_the_engine_is_the_recorded_one(world: str) -> None:
    wanted = recorded()[world]
    assert len(wanted) == STREAMS[world][1]
    different = [number for number, value in enumerate(wanted) if digest(lines_of(world, number)) != value]
    assert different == []


@pytest.mark.parametrize("world", list(STREAMS))
def test_one_changed_letter_in_any_line_changes_the_digest(world: str) -> None:
    lines = lines_of(world, 0)
    assert digest(lines) == recorded()[world][0]
    assert len(lines) > 20
    for at, line in enumerate(lines):
        place = next(place for place, letter in enumerate(line) if letter.isalnum())
        changed = line[:place] + ("x" if line[place] != "x" else "y") + line[place + 1 :]
        assert digest([*lines[:at], changed, *lines[at + 1 :]]) != recorded()[world][0]


def test_the_households_have_all_kinds_of_task_and_the_solver_wins_them() -> None:
    kinds = set()
    for number in range(STREAMS["alfworld"][1]):
        records = [json.loads(line) for line in lines_of("alfworld", number)]
        kinds.add(records[0][1])
        assert records[-NUM_RANDOM - 2][-1] is True, "the last command of the solver's walk wins"
    assert kinds == set(KINDS)


def test_the_solver_has_the_full_score_in_the_shop() -> None:
    for number in range(STREAMS["webshop"][1]):
        records = [json.loads(line) for line in lines_of("webshop", number)]
        bought = [record for record in records[2:] if record[0] == "click[buy now]"]
        assert bought[0][2:4] == [1.0, True]
