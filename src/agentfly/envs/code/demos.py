"""Demonstrations of the code world's tasks for `CodeAgent`: the solver's cells, what they print, the answer.

Rows are for supervised training, from the train split only. No code runs: a cell that prints shows the task's answer, and every
other cell prints nothing (a test checks that of the solver). A share `mistakes` of the rows gives a wrong answer without a
program.
"""

from __future__ import annotations

import random
from typing import Any

from .solver import solve
from .tasks import code_tasks, easy_code_tasks

SILENT = "(no output)"


def code_demos(count: int, seed: int = 0, *, mistakes: float = 0.0) -> list[dict[str, Any]]:
    """Demonstrations of tasks of every kind, one or two cells each."""
    return _rows(code_tasks("train", count, seed), seed, mistakes)


def easy_code_demos(count: int, seed: int = 0, *, mistakes: float = 0.0) -> list[dict[str, Any]]:
    """Demonstrations of tasks that one line of Python solves."""
    return _rows(easy_code_tasks("train", count, seed), seed, mistakes)


def _rows(tasks: list[dict[str, Any]], seed: int, mistakes: float) -> list[dict[str, Any]]:
    rng = random.Random(f"code demos {seed}")
    rows = []
    for task in tasks:
        messages = [{"role": "user", "content": task["question"]}]
        answer = task["answer"]
        if rng.random() < mistakes:
            answer = _guess(rng, answer)
        else:
            for cell in solve(task):
                messages.append({"role": "assistant", "content": f"```python\n{cell}\n```"})
                shown = answer if "print(" in cell else SILENT
                messages.append({"role": "user", "content": f"Observation: {shown}"})
        messages.append({"role": "assistant", "content": f"Answer: {answer}"})
        rows.append({**{key: task[key] for key in ("answer", "kind", "family")}, "messages": messages})
    return rows


def _guess(rng: random.Random, answer: str) -> str:
    """Returns a wrong answer of the same type."""
    if answer.isdigit():
        return str(max(0, int(answer) + rng.choice((-1, 1)) * rng.randint(1, 30)) if int(answer) else rng.randint(1, 30))
    letters = list(answer)
    while "".join(letters) == answer and len(set(answer)) > 1:
        rng.shuffle(letters)
    return "".join(letters) if len(set(answer)) > 1 else answer * 2
