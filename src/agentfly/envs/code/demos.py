"""Demonstrations of the code world's tasks for `CodeAgent`: the solver's cells, what they print, the answer.

In: a count, a seed and the share of slips. Out: rows for supervised training, from the train split alone. Nothing is run: a
cell that prints, prints the task's own answer, and every other cell prints nothing (a test holds the solver to that). A slip is
an answer that nobody worked out.
"""

from __future__ import annotations

import random
from typing import Any

from .solver import solve
from .tasks import code_tasks, easy_code_tasks

SILENT = "(no output)"


def code_demos(count: int, seed: int = 0, *, mistakes: float = 0.0) -> list[dict[str, Any]]:
    """Tasks of every kind, one or two cells each."""
    return _rows(code_tasks("train", count, seed), seed, mistakes)


def easy_code_demos(count: int, seed: int = 0, *, mistakes: float = 0.0) -> list[dict[str, Any]]:
    """Tasks that one line of Python solves."""
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
    """Something of the answer's kind that is not the answer."""
    if answer.isdigit():
        return str(max(0, int(answer) + rng.choice((-1, 1)) * rng.randint(1, 30)) if int(answer) else rng.randint(1, 30))
    letters = list(answer)
    while "".join(letters) == answer and len(set(answer)) > 1:
        rng.shuffle(letters)
    return "".join(letters) if len(set(answer)) > 1 else answer * 2
