"""Solves generated repairs: undoes the planted edits, which a row keeps in its field `edits` and no model sees."""

from __future__ import annotations

import random
from collections.abc import Mapping

from ....errors import ConfigError
from ....types import Task

COMMANDS = ("ls", "pwd; cd /tmp", "cat *.py", "echo x >> note", "exit 3", "python test_all.py", "false")


def solve(task: Task | Mapping[str, object]) -> list[tuple[str, dict[str, str]]]:
    """Returns the calls that solve a task, in order: the name of a tool and its arguments."""
    edits = (task.fields if isinstance(task, Task) else task).get("edits")
    if not isinstance(edits, list):
        raise ConfigError("no solution is known for this task: it is not one that the world 'repair' makes")
    return [*(("edit", {name: str(edit[name]) for name in ("path", "old", "new")}) for edit in edits), ("submit", {})]


def act(rng: random.Random, seen: object) -> tuple[str, dict[str, str]]:
    """A random call, for the examination of the environment."""
    if rng.random() < 0.2:
        return "edit", {"path": "note", "old": rng.choice(["", "x", "nothing"]), "new": rng.choice(["x", "y\n"])}
    return "bash", {"command": rng.choice(COMMANDS)}
