"""Seeded tasks that a program solves: arithmetic, strings, lists and small algorithms.

Rows are `{"question", "answer", "kind", "family", "given"}`. `given` holds the numbers and words of the question for solvers;
the model never sees it. A question belongs to exactly one split, whatever the seed: the split is a hash of its text.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import ConfigError
from .task_kinds import EASY, KINDS, Given, TaskKind

CodeSplit = Literal["train", "validation", "test"]
SPLITS = ("train", "validation", "test")
DEFAULT_COUNTS = {"train": 4096, "validation": 200, "test": 400}
MAX_COUNT = 10_000


@dataclass(frozen=True, slots=True)
class CodeProblem:
    """One drawn task."""

    kind: TaskKind
    given: Given
    question: str

    @property
    def answer(self) -> str:
        return str(self.kind.answer(self.given))


def code_tasks(split: CodeSplit, count: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Tasks of every kind, such as "How many divisors does 360 have?"."""
    return _rows(tuple(KINDS), split, count, seed)


def easy_code_tasks(split: CodeSplit, count: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Tasks that one line of Python solves, such as "What is the sum of [31, 8, 77]?"."""
    return _rows(EASY, split, count, seed)


def draw(rng: random.Random, kinds: Sequence[str] = tuple(KINDS)) -> CodeProblem:
    """Draws one task, of any split."""
    kind = KINDS[rng.choice(kinds)]
    given = kind.draw(rng)
    return CodeProblem(kind, given, rng.choice(kind.asks).format(**_shown(given)))


def split_of(question: str) -> str:
    """Returns the split of a question: 80 % are train, 10 % validation, 10 % test."""
    bucket = zlib.crc32(question.encode()) % 10
    return "validation" if bucket == 0 else "test" if bucket == 1 else "train"


def _shown(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values as a question shows them: lists of words with commas, lists of numbers in Python's notation."""
    return {
        name: ", ".join(value) if isinstance(value, list) and isinstance(value[0], str) else value
        for name, value in given.items()
    }


def _rows(kinds: Sequence[str], split: str, count: int | None, seed: int) -> list[dict[str, Any]]:
    if split not in SPLITS:
        raise ConfigError(f"tasks: no split is called {split!r}; there are {', '.join(SPLITS)}.")
    wanted = DEFAULT_COUNTS[split] if count is None else count
    if not 1 <= wanted <= MAX_COUNT:
        raise ConfigError(f"tasks: count must be from 1 to {MAX_COUNT}, not {count}.")
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
