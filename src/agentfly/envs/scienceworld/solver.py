"""A short way to solve the easy tasks. `env.play_gold` solves any task by the simulator's gold path, which is slow to find.

`EasyWay` knows the rooms of plants, animals and things, teleports there, and knows how long animals live in the simulator.
"""

from __future__ import annotations

import re

from ...errors import WorldError
from ..task_sets import read_table
from .clip import CARRIED, is_living

GREEN = (" tree", " plant")
LIFESPANS: list[str] = read_table(__package__, "tables.json")["lifespans"]
"""Animals by life span, the shortest first."""


class EasyWay:
    """The steps of an easy task: go to `where`, focus on one of `things`, then do `rest`."""

    def __init__(self, task_name: str, question: str) -> None:
        self.task_name = task_name
        match = re.search(r"to the ([\w ]+ box) in the ([\w ]+)\.", question)
        self.box, self.room = (match[1], match[2]) if match else ("", "")
        self.ends_with_focus = task_name.startswith("lifespan-")
        places = {"find-plant": "greenhouse", "find-non-living-thing": self.room}
        self.where = places.get(task_name, "outside")

    def things(self, seen: str) -> list[str]:
        """The suitable things in an observation of the room, the best first."""
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
    """The rank of an animal by its life span in the simulator."""
    kind = re.sub(r"^(?:baby|juvenile|adult) | egg$", "", animal)
    if kind not in LIFESPANS:
        raise WorldError(f"the life span of a {kind!r} is unknown")
    return LIFESPANS.index(kind)
