"""The solver of ScienceWorld: the simulator's own gold path for any task, and a shorter way for the easy ones.

In: an environment and a task. Out: the actions that solve it. Gold paths have the full score on all 30 tasks, on 27 of them
within 100 actions; finding one takes the simulator a second or two (mendelian genetics: half a minute). `EasyWay` knows where
plants, animals and things are in this house, and teleports; of animals it knows, as the simulator does, how long they live.
"""

from __future__ import annotations

import re

from ...errors import WorldError
from .clip import CARRIED, is_living

FULL = 1.0 - 1e-6
GREEN = (" tree", " plant")
LIFESPANS = (
    "ant",
    "bee",
    "butterfly",
    "moth",
    "dragonfly",
    "dove",
    "chameleon",
    "mouse",
    "hedgehog",
    "frog",
    "blue jay",
    "rabbit",
    "common toad",
    "chipmunk",
    "wolf",
    "beaver",
    "brown bear",
    "turtle",
    "crocodile",
    "elephant",
    "parrot",
    "giant tortoise",
)
"""Animals, those that live shortest first."""


class EasyWay:
    """How an easy task is done: `where` to look; then, of what is seen there, `thing` to focus on; then `rest`."""

    def __init__(self, task_name: str, question: str) -> None:
        self.task_name = task_name
        found = re.search(r"to the ([\w ]+ box) in the ([\w ]+)\.", question)
        self.box, self.room = (found[1], found[2]) if found else ("", "")
        self.ends_with_focus = task_name.startswith("lifespan-")
        places = {"find-plant": "greenhouse", "find-non-living-thing": self.room}
        self.where = places.get(task_name, "outside")

    def things(self, seen: str) -> list[str]:
        """What will do, of what a look around shows; the best first."""
        shown = seen.partition(": ")[2].split(", ")
        if self.task_name == "find-non-living-thing":
            return sorted((thing for thing in shown if thing in CARRIED), key=CARRIED.index)
        if self.task_name == "find-plant":
            return [thing for thing in shown if thing.endswith(GREEN)]
        animals = [thing for thing in shown if is_living(thing) and not thing.endswith(GREEN)]
        if self.ends_with_focus:
            animals.sort(key=lifespan, reverse=self.task_name == "lifespan-longest-lived")
        return animals

    def rest(self, thing: str) -> list[str]:
        if self.ends_with_focus:
            return []
        carry = [] if self.where == self.room else [f"pick up {thing}", f"teleport to {self.room}"]
        return [*carry, f"move {thing} to {self.box}"]


def lifespan(animal: str) -> int:
    """The place of an animal among all, by how long it lives in the simulator."""
    kind = re.sub(r"^(?:baby|juvenile|adult) | egg$", "", animal)
    if kind not in LIFESPANS:
        raise WorldError(f"nobody knows how long a {kind!r} lives")
    return LIFESPANS.index(kind)
