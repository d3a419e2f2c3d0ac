"""The tasks of ScienceWorld as task sets: 30 tasks, 7,207 variations, three splits.

Rows are `{"question", "task_name", "variation", "game", ...}`; a row without `simplifications` has those of the environment.
The question is the simulator's description, so Java is needed; `game` distinguishes variations with equal descriptions. The
splits are the published ones: of each task's variations the first half is for training, the next quarter for validation, the
rest for tests. Rows are in a seeded order, one variation of each task in turn. `easy_scienceworld` has the shortest tasks,
with short questions and observations for a small model.
"""

from __future__ import annotations

import difflib
import random
import re
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ...errors import ConfigError, MissingExtra, WorldError
from ..task_sets import SPLITS, check_count, check_split, read_table
from .java import missing
from .jvm import NAMES
from .jvms import jvms
from .simulator import describe, run_apart

DEFAULT_COUNTS = {"train": 400, "validation": 100, "test": 200}
EASY_SIMPLIFICATIONS = "teleportAction,openDoors"
EASY_STEPS = 8
EASY_CLIP = 100
SIMPLIFICATIONS = ("easy", *NAMES)

TABLES: dict[str, Any] = read_table(__package__, "tables.json")
VARIATIONS: dict[str, int] = TABLES["variations"]
"""The number of variations of each task."""
ELECTRICAL = tuple(name for name in VARIATIONS if "power-component" in name or "conductivity" in name)
EASY: list[str] = TABLES["easy"]
_LIFESPAN = re.compile(r"find the animal with the (?P<which>longest|shortest) life span\.")
_FIND = re.compile(r"find a\(n\) (?P<what>[\w -]+)\..* to the (?P<box>[\w ]+ box) in the (?P<room>[\w ]+)\.")


def variations(task: str, split: str) -> range:
    """The variations of a task that belong to a split."""
    number = VARIATIONS[check_task(task)]
    quarter = number // 4
    bounds = (0, 2 * quarter, 3 * quarter, number)
    at = SPLITS.index(check_split(split))
    return range(bounds[at], bounds[at + 1])


def scienceworld_tasks(split: str, count: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Variations of all 30 tasks, such as "Your task is to boil water."."""
    return _rows(tuple(VARIATIONS), split, count, seed)


def easy_scienceworld_tasks(split: str, count: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Put a plant, an animal or a thing into a box, or name the animal that lives longest; one can teleport, and sees less."""
    extra = {"simplifications": EASY_SIMPLIFICATIONS, "max_steps": EASY_STEPS, "clip": EASY_CLIP}
    return [
        {**row, "id": f"easy-{row['id']}", "question": short_question(row["question"]), **extra}
        for row in _rows(EASY, split, count, seed)
    ]


def short_question(description: str) -> str:
    """The simulator's description of an easy task in fewer words."""
    if (match := _LIFESPAN.search(description)) is not None:
        return f"Focus on the animal with the {match['which']} life span. It is outside."
    if (match := _FIND.search(description)) is None:
        raise WorldError(f"not the description of an easy task: {description!r}")
    article = "an" if match["what"][0] in "aeiou" else "a"
    return f"Find {article} {match['what']}. Focus on it. Then move it to the {match['box']} in the {match['room']}."


def check_task(task: object) -> str:
    if not isinstance(task, str) or task not in VARIATIONS:
        near = difflib.get_close_matches(str(task), VARIATIONS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(VARIATIONS)}."
        raise ConfigError(f"ScienceWorld has no task {str(task)[:80]!r}; {hint}")
    return task


def check_row(fields: Mapping[str, Any], simplifications: str = "") -> tuple[str, int, str]:
    """The task, the variation and the simplifications of a row, or what is wrong with them."""
    task = check_task(fields.get("task_name"))
    variation = fields.get("variation", 0)
    if type(variation) is not int or not 0 <= variation < VARIATIONS[task]:
        raise ConfigError(f"ScienceWorld: {task} has the variations 0 to {VARIATIONS[task] - 1}, not {variation!r}")
    wanted = fields.get("simplifications", simplifications) or ""
    if not isinstance(wanted, str):
        raise ConfigError(f"ScienceWorld: simplifications are names with commas between them, not {wanted!r}")
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    for name in names:
        if name not in SIMPLIFICATIONS:
            raise ConfigError(f"ScienceWorld has no simplification {name!r}; there are {', '.join(SIMPLIFICATIONS)}")
    if "noElectricalAction" in names and task in ELECTRICAL:
        raise ConfigError(f"ScienceWorld: {task} needs electrical actions; remove noElectricalAction")
    return task, variation, ",".join(names)


def _rows(tasks: Sequence[str], split: str, count: int | None, seed: int) -> list[dict[str, Any]]:
    chosen = _draw(tasks, split, count, seed)
    rows = []
    for (task, variation), text in zip(chosen, descriptions(chosen), strict=True):
        name = f"{task}-{variation}"
        rows.append({"id": name, "question": text, "task_name": task, "variation": variation, "game": name})
    return rows


def _draw(tasks: Sequence[str], split: str, count: int | None, seed: int) -> list[tuple[str, int]]:
    """One variation of each task in turn, each task's variations in a random order, without repetition."""
    wanted = check_count(split, count, default=DEFAULT_COUNTS)
    rng = random.Random(f"scienceworld {split} {seed}")
    left = {}
    for task in tasks:
        order = list(variations(task, split))
        rng.shuffle(order)
        left[task] = order
    names = list(tasks)
    rng.shuffle(names)
    chosen: list[tuple[str, int]] = []
    while len(chosen) < wanted and any(left.values()):
        chosen += [(name, left[name].pop()) for name in names if left[name]]
    return chosen[:wanted]


_described: dict[tuple[str, int], str] = {}
_lock = threading.Lock()


def descriptions(chosen: Sequence[tuple[str, int]]) -> list[str]:
    """The simulator's descriptions, cached in this process."""
    with _lock:
        new = [each for each in dict.fromkeys(chosen) if each not in _described]
        if new:
            if sentence := missing():
                raise MissingExtra(sentence)
            _described.update(zip(new, run_apart(partial(describe, jvms(), new)), strict=True))
        return [_described[each] for each in chosen]
