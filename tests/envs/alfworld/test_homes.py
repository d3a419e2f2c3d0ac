"""Generated households: the same for the same number, solvable, of all kinds, each in one split."""

from __future__ import annotations

import pytest

from agentfly.envs.alfworld.engine import State
from agentfly.envs.alfworld.goal import KINDS
from agentfly.envs.alfworld.homes import EASY_STEPS, make
from agentfly.envs.alfworld.oracle import plan
from agentfly.envs.alfworld.plays import listed_order, searched
from agentfly.envs.alfworld.tasks import alfworld_tasks, easy_alfworld_tasks, open_game, split_of_game
from agentfly.errors import ConfigError, DataError


@pytest.mark.parametrize("size", ["home", "easy"])
def test_every_household_is_won_by_the_oracle_and_not_at_the_start(size: str) -> None:
    kinds = set()
    for number in range(150):
        game = make(size, number)
        state, commands = State(game), plan(State(game))
        assert commands and not state.is_goal()
        for command in commands:
            assert not state.won
            state.step(command)
        assert state.won
        kinds.add(game.goal.kind)
        if size == "easy":
            assert EASY_STEPS[0] <= len(commands) <= EASY_STEPS[1]
            assert len(game.receptacles) <= 4
    assert kinds == set(KINDS)


@pytest.mark.parametrize("size", ["home", "easy"])
def test_who_looks_for_things_wins_too(size: str) -> None:
    for number in range(150):
        game = make(size, number)
        commands = searched(State(game), listed_order)
        assert commands is not None, number
        state = State(game)
        for command in commands:
            assert command in state.admissible(), (number, command)
            state.step(command)
        assert state.won, number
        assert size == "home" or len(commands) <= 8


def test_a_number_stands_for_one_household() -> None:
    make_again = make.__globals__["_make"].__wrapped__
    for size in ("home", "easy"):
        one, other = make(size, 17), make_again(size, 17)
        assert one is not other
        assert (one.intro, one.contents, one.fits) == (other.intro, other.contents, other.fits)
    with pytest.raises(DataError, match="no household is called 'castle'"):
        make("castle", 1)


@pytest.mark.parametrize("tasks", [alfworld_tasks, easy_alfworld_tasks])
def test_no_question_is_in_two_splits(tasks) -> None:  # type: ignore[no-untyped-def]
    seen: dict[str, set[str]] = {}
    for split in ("train", "validation", "test"):
        rows = [*tasks(split, 60), *tasks(split, 60, seed=1)]
        seen[split] = {row["question"] for row in rows}
        assert all(split_of_game(open_game(row)) == split for row in rows)
    assert not seen["train"] & seen["validation"] and not seen["train"] & seen["test"] and not seen["validation"] & seen["test"]


def test_tasks_are_drawn_by_seed_and_count() -> None:
    rows = easy_alfworld_tasks("train", 30, seed=5)
    assert rows == easy_alfworld_tasks("train", 30, seed=5)
    assert rows[:10] == easy_alfworld_tasks("train", 10, seed=5)
    assert rows != easy_alfworld_tasks("train", 30, seed=6)
    assert len({row["id"] for row in rows}) == 30
    assert rows[0]["question"].startswith("You are in the middle of a room.")
    with pytest.raises(ConfigError, match="no split"):
        easy_alfworld_tasks("valid_seen")
    for count in (0, 10_001):
        with pytest.raises(ConfigError, match="count must be"):
            alfworld_tasks("train", count)
