"""What wins a game: reads the goal of an ALFRED problem into a `HouseholdGoal`.

Six kinds of task are known: put a thing somewhere; clean, heat or cool it first; put two there; hold it under a lamp that is
on. A goal is a conjunction of facts over variables and is recognised by these facts, not by its name. Raises DataError for any
other goal, such as one about slices, which ALFWorld leaves out too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from sys import intern
from typing import Any

from ...errors import DataError
from ..task_sets import read_table

CLEAN, HOT, COOL, SLICED, TOGGLED = 1, 2, 4, 8, 16
"""Marks of an object, as bits."""
MARKS = {"isclean": CLEAN, "ishot": HOT, "iscool": COOL, "issliced": SLICED, "istoggled": TOGGLED}
KIND_OF_MARK = {
    CLEAN: "pick_clean_then_place_in_recep",
    HOT: "pick_heat_then_place_in_recep",
    COOL: "pick_cool_then_place_in_recep",
}
KINDS = ("pick_and_place_simple", "look_at_obj_in_light", *KIND_OF_MARK.values(), "pick_two_obj_and_place")
WORDING: dict[str, Any] = read_table(__package__, "wording.json")
"""The sentences of tasks by kind, the thoughts of demonstrations by verb, and the lines of the engine's help."""
# Facts of a goal that follow from the others: a lamp that is on can be switched, a cool apple can be cooled.
_IMPLIED = {"cleanable", "heatable", "coolable", "sliceable", "toggleable", "pickupable", "receptacleatlocation", "atlocation"}
_TOKEN = re.compile(r"[()]|[^\s()]+")
GoalTree = str | list["GoalTree"]


@dataclass(frozen=True, slots=True)
class HouseholdGoal:
    """`count` things of type `thing` with all of `marks` in one receptacle of type `target`. With a `lamp`: one thing of type
    `thing` held beside a lamp that is on. Types are lower-case words: "mug", "desk"."""

    kind: str
    thing: str
    target: str = ""
    lamp: str = ""
    marks: int = 0
    count: int = 1


def sentences(goal: HouseholdGoal) -> list[str]:
    """The ways to say a task; the first is used where a game has no sentence."""
    return [text.format(thing=goal.thing, target=goal.target, lamp=goal.lamp) for text in WORDING["tasks"][goal.kind]]


def read_goal(text: str, where: str) -> HouseholdGoal:
    """Read the text behind `(:goal` of a problem."""
    atoms: list[list[str]] = []
    try:
        _collect(_tree(text, where), atoms, where)
    except RecursionError:
        raise DataError(f"{where}: the goal is nested too deeply") from None
    kinds: dict[str, str] = {}
    marks: dict[str, int] = {}
    placed: list[tuple[str, str]] = []
    held: list[str] = []
    distinct = False
    for name, *arguments in atoms:
        if name in ("objecttype", "receptacletype") and len(arguments) == 2:
            kinds[arguments[0]] = type_word(arguments[1])
        elif name == "inreceptacle" and len(arguments) == 2:
            placed.append((arguments[0], arguments[1]))
        elif name == "holds" and len(arguments) == 2:
            held.append(arguments[1])
        elif name in MARKS and len(arguments) == 1:
            marks[arguments[0]] = marks.get(arguments[0], 0) | MARKS[name]
        elif name == "different":
            distinct = True
        elif name not in _IMPLIED:
            raise DataError(f"{where}: the goal has the fact {name!r}, which none of the six kinds of task has")
    return _shape(kinds, marks, placed, held, distinct, where)


def _shape(
    kinds: dict[str, str], marks: dict[str, int], placed: list[tuple[str, str]], held: list[str], distinct: bool, where: str
) -> HouseholdGoal:
    lamps = [thing for thing, _ in placed if marks.get(thing, 0) == TOGGLED]
    if len(placed) == len(lamps) == len(held) == 1 and lamps[0] in kinds and held[0] in kinds:
        return HouseholdGoal("look_at_obj_in_light", kinds[held[0]], lamp=kinds[lamps[0]])
    things, targets = [thing for thing, _ in placed], {target for _, target in placed}
    if not held and not lamps and len(targets) == 1 and targets <= kinds.keys() and set(things) <= kinds.keys():
        thing, target = kinds[things[0]], kinds[targets.pop()]
        mark = marks.get(things[0], 0)
        if len(things) == 1 and mark in (0, *KIND_OF_MARK):
            return HouseholdGoal(KIND_OF_MARK.get(mark, "pick_and_place_simple"), thing, target, marks=mark)
        if len(things) == 2 and distinct and kinds[things[1]] == thing and not marks:
            return HouseholdGoal("pick_two_obj_and_place", thing, target, count=2)
    raise DataError(f"{where}: the goal is none of the six kinds of task: {', '.join(KINDS)}")


def type_word(name: str) -> str:
    """`CounterTopType` to "countertop"."""
    return intern(name.lower().removesuffix("type"))


def _tree(text: str, where: str) -> GoalTree:
    stack: list[list[GoalTree]] = [[]]
    for token in _TOKEN.findall(text):
        if token == "(":
            stack.append([])
        elif token != ")":
            stack[-1].append(token.lower())
        elif len(stack) == 1:
            break  # closes (:goal or the problem
        else:
            done = stack.pop()
            stack[-1].append(done)
    if len(stack) != 1 or len(stack[0]) != 1:
        raise DataError(f"{where}: the brackets of the goal do not match")
    return stack[0][0]


def _collect(tree: GoalTree, atoms: list[list[str]], where: str) -> None:
    """Every fact below `and` and `exists`."""
    if isinstance(tree, str) or not tree or not isinstance(tree[0], str):
        raise DataError(f"{where}: the goal is not a list of facts")
    head, rest = tree[0], tree[1:]
    if head == "and":
        for part in rest:
            _collect(part, atoms, where)
    elif head == "exists" and len(rest) == 2:
        _collect(rest[1], atoms, where)
    elif head == "not" and len(rest) == 1 and isinstance(rest[0], list) and rest[0][:1] == ["="]:
        atoms.append(["different"])
    elif all(isinstance(part, str) for part in rest):
        atoms.append([str(part) for part in tree])
    else:
        raise DataError(f"{where}: the goal uses {head!r}, which none of the six kinds of task does")
