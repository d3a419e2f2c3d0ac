"""A small household written by hand, with what is odd in real ones: a shared place, a thing in two drawers, a full vessel."""

from __future__ import annotations

from pathlib import Path

from agentfly.envs.alfworld.engine import State
from agentfly.envs.alfworld.game import Game, read_problem

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data" / "alfworld"
MISSING = f"no folder {SHARED}"

OBJECTS = """
    agent1 - agent
    Mug - object
    Mug_bar_1 Mug_bar_2 Apple_bar_1 Knife_bar_1 Pen_bar_1 Lamp_bar_1 Cloth_bar_1 - object
    Desk_bar_1 Shelf_bar_1 Fridge_bar_1 Microwave_bar_1 Sink_bar_1_bar_SinkBasin Drawer_bar_1 Drawer_bar_2 - receptacle
    DeskType ShelfType FridgeType SinkBasinType DrawerType MicrowaveType - rtype
    MugType AppleType KnifeType PenType LampType ClothType - otype
    here desk fridge oven sink drawers - location
"""
INIT = """
    (= (total-cost) 0)
    (atLocation agent1 here) ; in the middle
    (receptacleType Desk_bar_1 DeskType) (receptacleAtLocation Desk_bar_1 desk)
    (receptacleType Shelf_bar_1 ShelfType) (receptacleAtLocation Shelf_bar_1 desk)
    (receptacleType Fridge_bar_1 FridgeType) (receptacleAtLocation Fridge_bar_1 fridge) (openable Fridge_bar_1)
    (receptacleType Microwave_bar_1 MicrowaveType) (receptacleAtLocation Microwave_bar_1 oven)
    (openable Microwave_bar_1)
    (receptacleType Sink_bar_1_bar_SinkBasin SinkBasinType) (receptacleAtLocation Sink_bar_1_bar_SinkBasin sink)
    (receptacleType Drawer_bar_1 DrawerType) (receptacleAtLocation Drawer_bar_1 drawers) (openable Drawer_bar_1)
    (receptacleType Drawer_bar_2 DrawerType) (receptacleAtLocation Drawer_bar_2 drawers)
    (objectType Mug_bar_1 MugType) (objectType Mug_bar_2 MugType) (objectType Apple_bar_1 AppleType)
    (objectType Knife_bar_1 KnifeType) (objectType Pen_bar_1 PenType) (objectType Lamp_bar_1 LampType)
    (objectType Cloth_bar_1 ClothType)
    (pickupable Mug_bar_1) (pickupable Mug_bar_2) (pickupable Apple_bar_1) (pickupable Knife_bar_1) (pickupable Pen_bar_1)
    (pickupable Cloth_bar_1)
    (cleanable Mug_bar_1) (heatable Mug_bar_1) (coolable Mug_bar_1)
    (cleanable Mug_bar_2) (heatable Mug_bar_2) (coolable Mug_bar_2)
    (cleanable Apple_bar_1) (heatable Apple_bar_1) (coolable Apple_bar_1) (sliceable Apple_bar_1) (cleanable Cloth_bar_1)
    (isReceptacleObject Mug_bar_1) (isReceptacleObject Mug_bar_2) (toggleable Lamp_bar_1) (isCool Mug_bar_2)
    (inReceptacle Mug_bar_1 Desk_bar_1) (inReceptacle Pen_bar_1 Desk_bar_1) (inReceptacleObject Pen_bar_1 Mug_bar_1)
    (inReceptacle Lamp_bar_1 Shelf_bar_1) (inReceptacle Mug_bar_2 Fridge_bar_1) (inReceptacle Apple_bar_1 Fridge_bar_1)
    (inReceptacle Knife_bar_1 Drawer_bar_1) (inReceptacle Knife_bar_1 Drawer_bar_2) (inReceptacle Cloth_bar_1 Drawer_bar_2)
    (objectAtLocation Apple_bar_1 fridge) (objectAtLocation Mug_bar_1 desk)
    (canContain DeskType MugType) (canContain DeskType AppleType) (canContain ShelfType MugType)
    (canContain DrawerType KnifeType)
    (canContain FridgeType MugType) (canContain FridgeType AppleType) (canContain MicrowaveType MugType)
    (canContain SinkBasinType MugType) (canContain DrawerType ClothType) (canContain DeskType PenType)
"""
GOALS = {
    "pick_and_place_simple": """(and (exists (?r - receptacle) (exists (?o - object)
        (and (inReceptacle ?o ?r) (objectType ?o MugType) (receptacleType ?r ShelfType)))))""",
    "pick_clean_then_place_in_recep": """(and (exists (?r - receptacle) (exists (?o - object)
        (and (cleanable ?o) (objectType ?o ClothType) (receptacleType ?r DrawerType) (isClean ?o) (inReceptacle ?o ?r)))))""",
    "pick_heat_then_place_in_recep": """(and (exists (?r - receptacle) (exists (?o - object)
        (and (heatable ?o) (objectType ?o AppleType) (receptacleType ?r DeskType) (isHot ?o) (inReceptacle ?o ?r)))))""",
    "pick_cool_then_place_in_recep": """(and (exists (?r - receptacle) (exists (?o - object)
        (and (coolable ?o) (objectType ?o MugType) (receptacleType ?r MicrowaveType) (isCool ?o) (inReceptacle ?o ?r)))))""",
    "pick_two_obj_and_place": """(and (exists (?r - receptacle) (exists (?o1 - object)
        (and (objectType ?o1 MugType) (receptacleType ?r DeskType) (inReceptacle ?o1 ?r)
            (exists (?o2 - object) (and (not (= ?o1 ?o2)) (objectType ?o2 MugType) (receptacleType ?r DeskType)
                (inReceptacle ?o2 ?r)))))))""",
    "look_at_obj_in_light": """(and (exists (?ot - object ?r - receptacle ?a - agent ?l - location)
        (and (objectType ?ot LampType) (toggleable ?ot) (isToggled ?ot) (receptacleAtLocation ?r ?l) (atLocation ?a ?l)
            (inReceptacle ?ot ?r)))
        (exists (?o - object ?a - agent) (and (objectType ?o ClothType) (holds ?a ?o))))""",
}


def problem(kind: str = "pick_and_place_simple", *, init: str = INIT, goal: str | None = None) -> str:
    """The household as a PDDL problem."""
    goal = GOALS[kind] if goal is None else goal
    return f"(define (problem house) (:domain alfred)\n(:objects{OBJECTS})\n(:init{init})\n(:goal {goal}))"


def house(kind: str = "pick_and_place_simple") -> Game:
    return read_problem(problem(kind), "house", "do it", "house")


def played(game: Game, *commands: str) -> State:
    """The state after some commands, each of which must do something."""
    state = State(game)
    for command in commands:
        assert state.step(command) != "Nothing happens.", command
    return state
