"""The engine's words and rules, on a household written by hand."""

from __future__ import annotations

import random

import pytest

from agentfly.envs.alfworld.engine import NOTHING, State
from agentfly.envs.alfworld.homes import make
from tests.envs.alfworld.house import house, played


def test_the_room_lists_receptacles_by_id_and_numbers_them_in_reverse() -> None:
    assert house().intro == (
        "-= Welcome to TextWorld, ALFRED! =-\n\n"
        "You are in the middle of a room. Looking quickly around you, you see a desk 1, a drawer 2, a drawer 1, a fridge 1, "
        "a microwave 1, a shelf 1, and a sinkbasin 1.\n\n"
        "Your task is to: do it."
    )


@pytest.mark.parametrize(
    ("before", "command", "said"),
    [
        ([], "look", "You are in the middle of a room. Looking quickly around you, you see nothing."),
        ([], "inventory", "You are not carrying anything."),
        ([], "go to desk 1", "You arrive at desk 1. On the desk 1, you see a mug 2, and a pen 1."),
        (["go to desk 1"], "look", "You are facing the desk 1, and shelf 1. Next to it, you see nothing."),
        (["go to desk 1"], "examine shelf 1", "On the shelf 1, you see a lamp 1."),
        ([], "go to fridge 1", "You arrive at fridge 1. The fridge 1 is closed."),
        (
            ["go to fridge 1"],
            "open fridge 1",
            "You open the fridge 1. The fridge 1 is open. In it, you see a apple 1, and a mug 1.",
        ),
        (["go to fridge 1", "open fridge 1"], "close fridge 1", "You close the fridge 1."),
        (["go to desk 1"], "take mug 2 from desk 1", "You pick up the mug 2 from the desk 1."),
        (["go to desk 1", "take mug 2 from desk 1"], "inventory", "You are carrying: a mug 2."),
        (["go to desk 1", "take mug 2 from desk 1"], "examine mug 2", "This is a normal mug 2. In it, you see a pen 1."),
        (["go to desk 1", "take pen 1 from desk 1"], "examine pen 1", "There's nothing special about pen 1."),
        (["go to desk 1", "take mug 2 from desk 1"], "move mug 2 to shelf 1", "You move the mug 2 to the shelf 1."),
        (["go to desk 1"], "use lamp 1", "You turn on the lamp 1."),
        (["go to desk 1", "use lamp 1"], "use lamp 1", "You turn on the lamp 1."),
        (["go to sinkbasin 1"], "examine sinkbasin 1", "On the sinkbasin 1, you see nothing."),
    ],
)
def test_what_is_said(before: list[str], command: str, said: str) -> None:
    assert played(house(), *before).step(command) == said


APPLE = ["go to fridge 1", "open fridge 1", "take apple 1 from fridge 1"]


@pytest.mark.parametrize(
    ("treatments", "looks"),
    [
        ([], "There's nothing special about apple 1."),
        (["cool apple 1 with fridge 1"], "This is a cold apple 1."),
        (["go to microwave 1", "heat apple 1 with microwave 1"], "This is a hot apple 1."),
        (["go to sinkbasin 1", "clean apple 1 with sinkbasin 1"], "This is a clean apple 1."),
        (
            ["cool apple 1 with fridge 1", "go to sinkbasin 1", "clean apple 1 with sinkbasin 1"],
            "This is a cool and clean apple 1.",
        ),
        (
            ["go to sinkbasin 1", "clean apple 1 with sinkbasin 1", "go to microwave 1", "heat apple 1 with microwave 1"],
            "This is a hot and clean apple 1.",
        ),
        (["go to microwave 1", "heat apple 1 with microwave 1", "go to fridge 1", "cool apple 1 with fridge 1"],
         "This is a cold apple 1."),
    ],
)  # fmt: skip
def test_what_a_treated_thing_looks_like(treatments: list[str], looks: str) -> None:
    """A closed appliance treats what is held before it; heating ends the cold and the other way round."""
    state = played(house("pick_and_place_simple"), *APPLE, *treatments)
    assert state.step("examine apple 1") == looks


@pytest.mark.parametrize(
    ("before", "command"),
    [
        (["go to desk 1"], "go to shelf 1"),  # it is at this place
        ([], "take mug 2 from desk 1"),  # it is elsewhere
        (["go to fridge 1"], "take apple 1 from fridge 1"),  # it is closed
        (["go to desk 1"], "take lamp 1 from shelf 1"),  # it cannot be carried
        (["go to desk 1"], "examine mug 2"),  # only what is held
        (["go to desk 1", "take mug 2 from desk 1"], "take pen 1 from desk 1"),  # one hand
        (["go to desk 1", "take mug 2 from desk 1"], "clean mug 2 with desk 1"),  # no sink
        (["go to desk 1", "take pen 1 from desk 1"], "move pen 1 to shelf 1"),  # does not go there
        (["go to desk 1", "take pen 1 from desk 1", "go to sinkbasin 1"], "clean pen 1 with sinkbasin 1"),  # cannot be cleaned
        (["go to desk 1", "take mug 2 from desk 1", "go to fridge 1"], "move mug 2 to fridge 1"),  # it is closed
        (["go to desk 1"], "open desk 1"),
        (["go to fridge 1"], "close fridge 1"),
        ([], "GO TO desk 1"),
        ([], "go  to desk 1"),
        ([], "go to desk"),
        ([], "go to desk 9"),
        ([], ""),
        ([], "   "),
        ([], "dance"),
        ([], "take"),
        ([], "take from"),
        ([], "go to " + "desk 1" * 20_000),
        ([], "go to desk 1\x00"),
        ([], "go\x1b[2J to desk 1"),
        ([], "go to \ud800"),
    ],
)
def test_what_is_not_possible_changes_nothing(before: list[str], command: str) -> None:
    state = played(house(), *before)
    key, admissible = state.key(), state.admissible()
    assert state.step(command) == NOTHING
    assert (state.key(), state.admissible()) == (key, admissible)


def test_white_space_around_a_command_does_not_matter() -> None:
    assert (
        State(house()).step("  go to desk 1\n" + " " * 100_000)
        == "You arrive at desk 1. On the desk 1, you see a mug 2, and a pen 1."
    )


def test_a_knife_slices_what_lies_at_its_place_even_behind_a_door() -> None:
    state = played(house(), "go to drawer 1", "take knife 1 from drawer 1", "go to fridge 1")
    assert "slice apple 1 with knife 1" in state.admissible()
    assert state.step("slice apple 1 with knife 1") == "You sliced the apple 1 with the knife 1."
    state = played(state.game, *APPLE)
    state.marks[state.held] = 8
    assert state.step("examine apple 1") == "This is a sliced apple 1."
    state.step("cool apple 1 with fridge 1")
    assert state.step("examine apple 1") == "This is a cool sliced apple 1."


def test_a_thing_that_was_taken_no_longer_lies_where_a_knife_finds_it() -> None:
    state = played(house(), *APPLE, "go to desk 1", "move apple 1 to desk 1", "go to drawer 1", "take knife 1 from drawer 1")
    assert "slice apple 1 with knife 1" not in played_on(state, "go to fridge 1").admissible()
    assert "slice apple 1 with knife 1" in played_on(state, "go to desk 1").admissible()


def played_on(state: State, command: str) -> State:
    other = state.copy()
    other.step(command)
    return other


def test_a_thing_in_two_receptacles_stays_in_the_other() -> None:
    state = played(house(), "go to drawer 1", "take knife 1 from drawer 1", "open drawer 2")
    assert state.step("examine drawer 2") == "The drawer 2 is open. In it, you see a knife 1."
    assert state.step("inventory") == "You are carrying: a knife 1."


def test_the_admissible_commands_are_sorted_and_complete_at_the_start() -> None:
    assert State(house()).admissible() == [
        *("go to desk 1", "go to drawer 1", "go to drawer 2", "go to fridge 1", "go to microwave 1", "go to shelf 1"),
        *("go to sinkbasin 1", "help", "inventory", "look"),
    ]


@pytest.mark.parametrize("name", ["house", *(f"home-{number}" for number in range(12))])
def test_exactly_the_admissible_commands_do_something(name: str) -> None:
    """Of all commands that can be written with the names of the household, over a random walk."""
    game = house() if name == "house" else make("home", int(name.removeprefix("home-")))
    places, things = [item.name for item in game.receptacles], [item.name for item in game.things]
    every = [
        "look",
        "inventory",
        "help",
        *(f"{verb} {place}" for verb in ("go to", "open", "close", "examine") for place in places),
    ]
    every += [f"{verb} {thing}" for verb in ("use", "examine") for thing in things]
    pairs = ("take {} from {}", "move {} to {}", "clean {} with {}", "heat {} with {}", "cool {} with {}")
    every += [pair.format(thing, place) for pair in pairs for thing in things for place in places]
    every += [f"slice {thing} with {knife}" for thing in things for knife in things]
    rng, state = random.Random(name), State(game)
    for _ in range(8):
        assert sorted(command for command in every if state.copy().step(command) != NOTHING) == state.admissible()
        for _ in range(5):
            state.step(rng.choice(state.admissible()))


def test_the_key_tells_states_apart_and_only_states() -> None:
    game = house()
    there = played(game, "go to desk 1", "take mug 2 from desk 1", "move mug 2 to shelf 1")
    back = played(game, "go to desk 1", "take mug 2 from desk 1", "examine mug 2", "move mug 2 to desk 1", "look")
    assert back.key() == played(game, "go to desk 1").key()
    changes = [[], ["go to desk 1"], ["go to shelf 1", "use lamp 1"], ["go to fridge 1"], ["go to fridge 1", "open fridge 1"]]
    changes += [["go to desk 1", "take mug 2 from desk 1"], ["go to desk 1", "take pen 1 from desk 1"]]
    keys = [played(game, *commands).key() for commands in changes] + [there.key()]
    assert len(set(keys)) == len(keys)
    assert played(house(), *changes[4]).key() == keys[4], "two readings of one game give the same keys"


def test_a_copy_goes_its_own_way() -> None:
    state = played(house(), "go to desk 1")
    other = state.copy()
    other.step("take mug 2 from desk 1")
    other.step("use lamp 1")
    assert state.step("examine desk 1") == "On the desk 1, you see a mug 2, and a pen 1."
    assert state.key() == played(house(), "go to desk 1").key()
