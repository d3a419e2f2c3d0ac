"""The solver of the code world: returns the cells that solve a task.

A generated task has the program of its kind (`kinds.json`), filled in from its field `given`; the last cell prints the answer.
Rows of the loaders have a `solution`, which is the only cell. A task with neither raises ConfigError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError
from ...types import Task
from ..task_sets import read_table

_KINDS: dict[str, dict[str, Any]] = read_table(__package__, "kinds.json")
PROGRAMS = {name: ["\n".join(lines) for lines in kind["program"]] for name, kind in _KINDS.items()}
"""One string per cell. {name} is replaced by the repr of the value, {expression} by the text of an arithmetic expression."""


def solve(task: Task | Mapping[str, Any]) -> list[str]:
    """Returns cells to run in order in one session. The last one prints the answer, or defines what the tests use."""
    fields = task.fields if isinstance(task, Task) else task
    if fields.get("solution"):
        return [str(fields["solution"])]
    kind, given = fields.get("kind"), fields.get("given")
    if kind not in PROGRAMS or not isinstance(given, Mapping):
        raise ConfigError(f"no solution is known for a task of kind {kind!r}: it is not one that the code world makes")
    values = {name: str(value) if name == "expression" else repr(value) for name, value in given.items()}
    return [cell.format_map(values) for cell in PROGRAMS[kind]]
