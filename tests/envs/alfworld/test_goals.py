"""What wins, how far one has come, and goals that are refused."""

from __future__ import annotations

import pytest

from agentfly.envs.alfworld.engine import State
from agentfly.envs.alfworld.game import read_problem
from agentfly.envs.alfworld.goal import KINDS
from agentfly.envs.alfworld.oracle import plan
from agentfly.errors import DataError
from tests.envs.alfworld.house import GOALS, INIT, house, played, problem

MUG = ["go to desk 1", "take mug 2 from desk 1"]
WINS = {
    "pick_and_place_simple": [*MUG, "move mug 2 to shelf 1"],
    "pick_clean_then_place_in_recep": [
        *("go to drawer 1", "take cloth 1 from drawer 1", "go to sinkbasin 1", "clean cloth 1 with sinkbasin 1"),
        *("go to drawer 1", "move cloth 1 to drawer 1"),
    ],
    "pick_heat_then_place_in_recep": [
        *("go to fridge 1", "open fridge 1", "take apple 1 from fridge 1", "go to microwave 1"),
        *("heat apple 1 with microwave 1", "go to desk 1", "move apple 1 to desk 1"),
    ],
    "pick_cool_then_place_in_recep": [
        *("go to fridge 1", "open fridge 1", "take mug 1 from fridge 1", "go to microwave 1", "open microwave 1"),
        "move mug 1 to microwave 1",
    ],
    "pick_two_obj_and_place": [
        *("go to fridge 1", "open fridge 1", "take mug 1 from fridge 1", "go to desk 1", "move mug 1 to desk 1"),
    ],
    "look_at_obj_in_light": ["go to drawer 1", "take cloth 1 from drawer 1", "go to desk 1", "use lamp 1"],
}  # fmt: skip


def test_there_are_six_kinds_of_task() -> None:
    assert set(KINDS) == set(GOALS) == set(WINS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_is_won_by_its_last_command_and_not_before(kind: str) -> None:
    game = house(kind)
    assert game.goal.kind == kind
    state = State(game)
    for number, command in enumerate(WINS[kind]):
        assert not state.won, number
        state.step(command)
    assert state.won


@pytest.mark.parametrize("kind", KINDS)
def test_the_oracle_needs_no_more_commands_than_a_person(kind: str) -> None:
    found = plan(State(house(kind)))
    assert found is not None
    assert played(house(kind), *found).won
    assert len(found) <= len(WINS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_progress_never_falls_on_the_way_to_a_win_and_is_full_only_there(kind: str) -> None:
    state, seen = State(house(kind)), []
    for command in WINS[kind]:
        seen.append(state.progress())
        state.step(command)
    assert seen == sorted(seen)
    assert max(seen) < 1.0
    assert state.progress() == 1.0
    assert len(set(seen)) >= 2 or kind == "pick_two_obj_and_place"


def test_the_last_move_matters_less_than_the_state() -> None:
    """A lamp that was turned on before still counts when the thing is brought to it."""
    assert played(house("look_at_obj_in_light"), "go to desk 1", "use lamp 1", "go to drawer 1",
                  "take cloth 1 from drawer 1", "go to shelf 1").won  # fmt: skip


def test_the_wrong_thing_the_wrong_place_and_a_thing_that_is_not_treated_do_not_win() -> None:
    assert not played(house("pick_heat_then_place_in_recep"), "go to fridge 1", "open fridge 1", "take apple 1 from fridge 1",
                      "go to desk 1", "move apple 1 to desk 1").won  # fmt: skip
    assert not played(house("pick_and_place_simple"), *MUG, "move mug 2 to desk 1").won


def test_the_oracle_goes_on_from_any_state() -> None:
    game = house("pick_heat_then_place_in_recep")
    state = played(game, *MUG, "go to sinkbasin 1")  # the hand is full of the wrong thing
    found = plan(state)
    assert found is not None
    for command in found:
        state.step(command)
    assert state.won
    assert plan(state) == []


def test_the_oracle_knows_when_nothing_helps() -> None:
    """The pen can be put down only on the desk: without one, the hand stays full for ever."""
    text = problem("pick_heat_then_place_in_recep", init=INIT.replace("(canContain DeskType PenType)", ""))
    game = read_problem(text, "house", "heat it", "house")
    assert plan(State(game)) is not None
    assert plan(played(game, "go to desk 1", "take pen 1 from desk 1")) is None


@pytest.mark.parametrize(
    ("goal", "sentence"),
    [
        ("(and (exists (?o - object) (and (isPainted ?o))))", "'ispainted', which none of the six kinds"),
        ("(and (exists (?o - object) (and (objectType ?o MugType))))", "none of the six kinds of task"),
        ("(or (a ?x) (b ?y))", "uses 'or'"),
        ("(and (exists (?r - receptacle) (and (inReceptacle ?o ?r) (objectType ?o MugType)", "brackets of the goal"),
        ("()", "not a list of facts"),
        (
            "(and (exists (?r - receptacle) (exists (?o - object) (and (objectType ?o AppleType) (receptacleType ?r DeskType) "
            "(isSliced ?o) (inReceptacle ?o ?r)))))",
            "none of the six kinds of task",
        ),
    ],
)
def test_another_goal_is_refused(goal: str, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence) as caught:
        read_problem(problem(goal=goal), "house", "do it", "file: line 3")
    assert str(caught.value).startswith("file: line 3: ")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("(:init", "(:beginning"), r"no \(:init"),
        (("(:goal", "(:end"), r"no \(:goal"),
        (("(atLocation agent1 here)", ""), "no place where the agent starts"),
        (("(receptacleAtLocation Desk_bar_1 desk)", ""), "Desk_bar_1 stands nowhere"),
        (("(inReceptacle Pen_bar_1 Desk_bar_1)", "(inReceptacle Pen_bar_1 Attic_bar_1)"), "Attic_bar_1.*not declared"),
        (("(openable Fridge_bar_1)", "(openable Fridge_bar_1"), "brackets of the init facts"),
        (
            ("(objectType Pen_bar_1 PenType)", "(objectType Pen_bar_1 PenType) (objectType Quill PenType)"),
            "Quill .* not declared",
        ),
        (("agent1 - agent", "- agent"), "'name - type'"),
    ],
)
def test_a_malformed_problem_is_refused_with_its_place(change: tuple[str, str], sentence: str) -> None:
    text = problem()
    assert change[0] in text
    with pytest.raises(DataError, match=sentence) as caught:
        read_problem(text.replace(*change), "house", "do it", "games.jsonl: line 7")
    assert str(caught.value).startswith("games.jsonl: line 7: ")
