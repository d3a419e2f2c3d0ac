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
from .java import missing
from .jvm import NAMES
from .jvms import jvms
from .simulator import describe, run_apart

SPLITS = ("train", "validation", "test")
DEFAULT_COUNTS = {"train": 400, "validation": 100, "test": 200}
EASY_SIMPLIFICATIONS = "teleportAction,openDoors"
EASY_STEPS = 8
EASY_CLIP = 100
SIMPLIFICATIONS = ("easy", *NAMES)

# The number of variations of each task.
VARIATIONS = {
    "boil": 30,
    "melt": 30,
    "freeze": 30,
    "change-the-state-of-matter-of": 30,
    "use-thermometer": 540,
    "measure-melting-point-known-substance": 436,
    "measure-melting-point-unknown-substance": 300,
    "power-component": 20,
    "power-component-renewable-vs-nonrenewable-energy": 20,
    "test-conductivity": 900,
    "test-conductivity-of-unknown-substances": 600,
    "find-living-thing": 300,
    "find-non-living-thing": 300,
    "find-plant": 300,
    "find-animal": 300,
    "grow-plant": 126,
    "grow-fruit": 126,
    "chemistry-mix": 32,
    "chemistry-mix-paint-secondary-color": 36,
    "chemistry-mix-paint-tertiary-color": 36,
    "lifespan-longest-lived": 125,
    "lifespan-shortest-lived": 125,
    "lifespan-longest-lived-then-shortest-lived": 125,
    "identify-life-stages-1": 14,
    "identify-life-stages-2": 10,
    "inclined-plane-determine-angle": 168,
    "inclined-plane-friction-named-surfaces": 1386,
    "inclined-plane-friction-unnamed-surfaces": 162,
    "mendelian-genetics-known-plant": 120,
    "mendelian-genetics-unknown-plant": 480,
}
ELECTRICAL = tuple(name for name in VARIATIONS if "power-component" in name or "conductivity" in name)
EASY = (
    "lifespan-longest-lived",
    "lifespan-shortest-lived",
    "find-non-living-thing",
    "find-plant",
    "find-animal",
    "find-living-thing",
)
_LIFESPAN = re.compile(r"find the animal with the (?P<which>longest|shortest) life span\.")
_FIND = re.compile(r"find a\(n\) (?P<what>[\w -]+)\..* to the (?P<box>[\w ]+ box) in the (?P<room>[\w ]+)\.")


def variations(task: str, split: str) -> range:
    """The variations of a task that belong to a split."""
    number = VARIATIONS[check_task(task)]
    quarter = number // 4
    return {
        "train": range(2 * quarter),
        "validation": range(2 * quarter, 3 * quarter),
        "test": range(3 * quarter, number),
    }[_check_split(split)]


def scienceworld_tasks(split: str, count: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Variations of all 30 tasks, such as "Your task is to boil water."."""
    chosen = _draw(tuple(VARIATIONS), split, count, seed)
    texts = descriptions(chosen)
    return [
        {
            "id": f"{task}-{variation}",
            "question": text,
            "task_name": task,
            "variation": variation,
            "game": f"{task}-{variation}",
        }
        for (task, variation), text in zip(chosen, texts, strict=True)
    ]


def easy_scienceworld_tasks(split: str, count: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Put a plant, an animal or a thing into a box, or name the animal that lives longest; one can teleport, and sees less."""
    chosen = _draw(EASY, split, count, seed)
    texts = descriptions(chosen)
    return [
        {
            "id": f"easy-{task}-{variation}",
            "question": short_question(text),
            "task_name": task,
            "variation": variation,
            "game": f"{task}-{variation}",
            "simplifications": EASY_SIMPLIFICATIONS,
            "max_steps": EASY_STEPS,
            "clip": EASY_CLIP,
        }
        for (task, variation), text in zip(chosen, texts, strict=True)
    ]


def short_question(description: str) -> str:
    """The simulator's description of an easy task in fewer words."""
    if (found := _LIFESPAN.search(description)) is not None:
        return f"Focus on the animal with the {found['which']} life span. It is outside."
    if (found := _FIND.search(description)) is None:
        raise WorldError(f"not the description of an easy task: {description!r}")
    article = "an" if found["what"][0] in "aeiou" else "a"
    return f"Find {article} {found['what']}. Focus on it. Then move it to the {found['box']} in the {found['room']}."


def check_task(task: Any) -> str:
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


def _check_split(split: str) -> str:
    if split not in SPLITS:
        raise ConfigError(f"tasks: no split is called {split!r}; there are {', '.join(SPLITS)}.")
    return split


def _draw(tasks: Sequence[str], split: str, count: int | None, seed: int) -> list[tuple[str, int]]:
    """One variation of each task in turn, each task's variations in a random order, without repetition."""
    _check_split(split)
    wanted = DEFAULT_COUNTS[split] if count is None else count
    if type(wanted) is not int or wanted < 1:
        raise ConfigError(f"tasks: count must be 1 or more, not {count}.")
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
