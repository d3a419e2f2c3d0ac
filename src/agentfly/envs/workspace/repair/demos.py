"""Demonstrations for `ReactAgent`: the solver's edits and what the tools answer, as rows for supervised training.

Nothing runs: the answers of the tools are known (a test plays some of them). A share `mistakes` of the dialogues changes the
line to something wrong.
"""

from __future__ import annotations

import json
import random

from ....errors import ConfigError
from .solver import solve
from .tasks import Row, easy_repair_tasks, repair_tasks


def repair_demos(count: int, seed: int = 0, *, mistakes: float = 0.0) -> list[Row]:
    """Dialogues of all four levels."""
    return _rows(repair_tasks("train", count, seed), seed, mistakes)


def easy_repair_demos(count: int, seed: int = 0, *, mistakes: float = 0.0) -> list[Row]:
    """Dialogues of level 1."""
    return _rows(easy_repair_tasks("train", count, seed), seed, mistakes)


def _rows(tasks: list[Row], seed: int, mistakes: float) -> list[Row]:
    if not 0.0 <= mistakes <= 1.0:
        raise ConfigError(f"demos: mistakes is a share from 0 to 1, not {mistakes}")
    rng = random.Random(f"repair demos {seed}")
    return [_row(task, rng, rng.random() < mistakes) for task in tasks]


def _row(task: Row, rng: random.Random, mistake: bool) -> Row:
    messages = [{"role": "user", "content": task["question"]}]
    if task["level"] > 1:
        for path in sorted(path for path in task["files"] if path != "test_all.py"):
            shown = "\n".join(f"{n}: {line}" for n, line in enumerate(task["files"][path].splitlines(), 1))
            messages += _turn("read", {"path": path}, shown)
    for name, arguments in solve(task):
        if name == "edit":
            if mistake:
                arguments = {**arguments, "new": _wrong(rng, arguments["new"])}
            messages += _turn(name, arguments, f"Edited {arguments['path']}.")
        else:
            messages += _turn(name, arguments, "")
    return {**{key: value for key, value in task.items() if key != "question"}, "messages": messages[:-1]}


def _turn(name: str, arguments: dict[str, str], shown: str) -> list[dict[str, str]]:
    call = f"Thought: {name}\nAction: {name}\nInput: {json.dumps(arguments)}"
    return [{"role": "assistant", "content": call}, {"role": "user", "content": f"Observation: {shown}"}]


def _wrong(rng: random.Random, line: str) -> str:
    """The line with another digit or comparison than the right one."""
    places = [place for place, letter in enumerate(line) if letter in "0123456789<>+-"]
    if not places:
        return line + "  # repaired"
    place = rng.choice(places)
    other = rng.choice([letter for letter in "0123456789" if letter != line[place]]) if line[place].isdigit() else "*"
    return line[:place] + other + line[place + 1 :]
