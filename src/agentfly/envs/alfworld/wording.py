"""The sentences of tasks: a goal in, the ways to say it out. Nothing here draws or decides."""

from __future__ import annotations

from .goal import HouseholdGoal

# Two ways for each kind of task; the first is used where one must be made up.
SENTENCES = {
    "pick_and_place_simple": ("put a {thing} in {target}", "put some {thing} on {target}"),
    "look_at_obj_in_light": ("look at {thing} under the {lamp}", "examine the {thing} with the {lamp}"),
    "pick_clean_then_place_in_recep": ("put a clean {thing} in {target}", "clean some {thing} and put it in {target}"),
    "pick_heat_then_place_in_recep": ("put a hot {thing} in {target}", "heat some {thing} and put it in {target}"),
    "pick_cool_then_place_in_recep": ("put a cool {thing} in {target}", "cool some {thing} and put it in {target}"),
    "pick_two_obj_and_place": ("put two {thing} in {target}", "find two {thing} and put them in {target}"),
}


def sentences(goal: HouseholdGoal) -> list[str]:
    return [text.format(thing=goal.thing, target=goal.target, lamp=goal.lamp) for text in SENTENCES[goal.kind]]
