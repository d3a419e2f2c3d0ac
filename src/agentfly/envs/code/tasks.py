"""Seeded tasks that a program solves: arithmetic, strings, lists and small algorithms.

Rows are `{"question", "answer", "kind", "family", "given"}`. `given` holds the numbers and words of the question for solvers;
the model never sees it. A question belongs to exactly one split, whatever the seed: the split is a hash of its text.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..task_sets import MAX_COUNT, SplitName, check_count, split_of
from .task_kinds import EASY, KINDS, Given, TaskKind


@dataclass(frozen=True, slots=True)
class CodeProblem:
    """One drawn task."""

    kind: TaskKind
    given: Given
    question: str

    @property
    def answer(self) -> str:
        return str(self.kind.answer(self.given))


def code_tasks(split: SplitName, count: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Tasks of every kind, such as "How many divisors does 360 have?"."""
    return _rows(tuple(KINDS), split, count, seed)


def easy_code_tasks(split: SplitName, count: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Tasks that one line of Python solves, such as "What is the sum of [31, 8, 77]?"."""
    return _rows(EASY, split, count, seed)


def draw(rng: random.Random, kinds: Sequence[str] = tuple(KINDS)) -> CodeProblem:
    """Draws one task, of any split."""
    kind = KINDS[rng.choice(kinds)]
    given = kind.draw(rng)
    return CodeProblem(kind, given, rng.choice(kind.asks).format(**_shown(given)))


def _shown(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values as a question shows them: lists of words with commas, lists of numbers in Python's notation."""
    return {
        name: ", ".join(value) if isinstance(value, list) and isinstance(value[0], str) else value
        for name, value in given.items()
    }


def _rows(kinds: Sequence[str], split: str, count: int | None, seed: int) -> list[dict[str, Any]]:
    wanted = check_count(split, count, most=MAX_COUNT)
    rng = random.Random(f"code {split} {seed}")
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < wanted:
        problem = draw(rng, kinds)
        if split_of(problem.question) == split and problem.question not in rows:
            rows[problem.question] = {
                "question": problem.question,
                "answer": problem.answer,
                "kind": problem.kind.name,
                "family": problem.kind.family,
                "given": problem.given,
            }
    return list(rows.values())
