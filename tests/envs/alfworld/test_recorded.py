"""Step for step equal to the original engine: recorded games, walkthroughs and the oracle on every real game."""

from __future__ import annotations

import gzip
import json
from functools import cache
from typing import Any

import pytest

from agentfly.envs.alfworld.engine import State
from agentfly.envs.alfworld.game import Game
from agentfly.envs.alfworld.goal import KINDS
from agentfly.envs.alfworld.loaders import find_games, load_game
from agentfly.envs.alfworld.oracle import plan
from agentfly.envs.alfworld.tasks import alfworld_games
from tests.envs.alfworld.house import MISSING, SHARED

pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason=MISSING)


@cache
def games() -> dict[str, Game]:
    names = [*find_games("train", SHARED), *find_games("validation", SHARED)]
    return {game.id: game for game in map(load_game, names)}


@cache
def recordings() -> list[dict[str, Any]]:
    with gzip.open(SHARED / "recorded_games.json.gz") as file:
        return json.load(file)  # type: ignore[no-any-return]


@pytest.mark.parametrize("number", range(26))
def test_a_recorded_game_is_equal_step_for_step(number: int) -> None:
    record = recordings()[number]
    game = games()[record["game"]]
    state = State(game)
    assert game.intro == record["intro"]
    assert state.admissible() == record["admissible"]
    for step in record["steps"]:
        said = state.step(step["command"])
        assert (step["command"], said) == (step["command"], step["feedback"])
        assert state.admissible() == step["admissible"]
        assert state.won is step["won"]


def test_every_recording_is_compared() -> None:
    assert len(recordings()) == 26
    assert sum(len(record["steps"]) for record in recordings()) == 598


def test_every_walkthrough_wins_with_its_last_command() -> None:
    played = 0
    for game in games().values():
        state = State(game)
        for command in game.walkthrough:
            assert not state.won, game.id
            assert command in state.admissible(), (game.id, command)
            state.step(command)
        assert state.won or not game.walkthrough, game.id
        played += bool(game.walkthrough)
    assert played == 140


def test_the_oracle_wins_every_game_in_no_more_commands_than_its_walkthrough() -> None:
    assert len(games()) == 340
    assert {game.goal.kind for game in games().values()} == set(KINDS)
    for game in games().values():
        commands, state = plan(State(game)), State(game)
        assert commands is not None, game.id
        for command in commands:
            state.step(command)
        assert state.won, game.id
        assert len(commands) <= len(game.walkthrough or commands), game.id


def test_the_kind_of_task_is_the_one_in_the_name_of_the_game() -> None:
    for name, game in games().items():
        assert game.goal.kind == name.split("/")[1].partition("-")[0]


def test_the_task_set_reads_the_splits_in_a_seeded_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", str(SHARED))
    rows = alfworld_games("validation", 20, seed=3)
    assert rows == alfworld_games("valid_seen", 20, seed=3) != alfworld_games("validation", 20, seed=4)
    assert len({row["kind"] for row in rows}) > 3, "files are sorted by kind, tasks are not"
    assert len(alfworld_games("train")) == 200
    game = load_game(rows[0]["game"])
    assert rows[0]["question"] == f"{game.room}\nYour task is to: {game.task}."
