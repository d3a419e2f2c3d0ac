"""Seeded arithmetic tasks in varied English, for the tools add, subtract and multiply.

In: a split, a count and a seed. Out: rows `{"question", "answer", "steps", "operations"}`. A question belongs to exactly one
split, whatever the seed: the split is a hash of its text. Numbers are small, results are never negative, and the result of the
first step is never the answer to the whole, so that stopping half-way is always wrong. This file knows no model.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ConfigError
from . import wording

Split = Literal["train", "validation", "test"]
SPLITS = ("train", "validation", "test")
OPERATIONS = ("add", "subtract", "multiply")
DEFAULT_COUNTS = {"train": 4096, "validation": 200, "test": 400}


@dataclass(frozen=True, slots=True)
class Step:
    """One operation; an operand that is None is the result of the step before."""

    operation: str
    left: int | None
    right: int | None

    def operands(self, previous: int) -> tuple[int, int]:
        return (previous if self.left is None else self.left, previous if self.right is None else self.right)


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and the steps that answer it."""

    question: str
    steps: tuple[Step, ...]

    def results(self) -> list[int]:
        """The result of every step; the last one is the answer."""
        found: list[int] = []
        for step in self.steps:
            found.append(calculate(step.operation, *step.operands(found[-1] if found else 0)))
        return found


def calculate(operation: str, left: int, right: int) -> int:
    if operation == "add":
        return left + right
    return left - right if operation == "subtract" else left * right


def arithmetic(split: Split, count: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Questions that need two calls, such as "What is 12 times 7, plus 5?"."""
    return _rows(two_step_problem, 10_000, split, count, seed)


def one_step_arithmetic(split: Split, count: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Questions that need one call, such as "What is 12 times 7?"."""
    return _rows(one_step_problem, 2_000, split, count, seed)


def split_of(question: str) -> str:
    """The one split that a question belongs to: 80 % train, 10 % validation, 10 % test."""
    bucket = zlib.crc32(question.encode()) % 10
    return "validation" if bucket == 0 else "test" if bucket == 1 else "train"


def _rows(
    make: Callable[[random.Random], Problem], most: int, split: str, count: int | None, seed: int
) -> list[dict[str, Any]]:
    if split not in SPLITS:
        raise ConfigError(f"tasks: no split is called {split!r}; there are {', '.join(SPLITS)}.")
    wanted = min(DEFAULT_COUNTS[split], most) if count is None else count
    if not 1 <= wanted <= most:
        raise ConfigError(f"tasks: count must be from 1 to {most}, not {count}.")
    rng = random.Random(f"{split} {seed}")
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    while len(rows) < wanted:
        problem = make(rng)
        if split_of(problem.question) == split and problem.question not in seen:
            seen.add(problem.question)
            rows.append(
                {
                    "question": problem.question,
                    "answer": str(problem.results()[-1]),
                    "steps": len(problem.steps),
                    "operations": [step.operation for step in problem.steps],
                }
            )
    return rows


def one_step_problem(rng: random.Random) -> Problem:
    operation = rng.choice(OPERATIONS)
    a, b = _first_operands(rng, operation)
    if rng.random() < 0.2:
        pattern = rng.choice(wording.ONE_STEP_STORIES[operation])
    else:
        pattern = rng.choice(wording.ONE_STEP)
    return Problem(_fill(rng, pattern, operation, a, b), (Step(operation, a, b),))


def two_step_problem(rng: random.Random) -> Problem:
    while True:
        problem = _try_two_steps(rng)
        first, last = problem.results()
        if first != last and first > 0 and 0 <= last < 1000:
            return problem


def _try_two_steps(rng: random.Random) -> Problem:
    first, second = rng.choice(OPERATIONS), rng.choice(OPERATIONS)
    a, b = _first_operands(rng, first)
    result = calculate(first, a, b)
    if second == "multiply":
        c = rng.randint(2, 9)
    elif second == "add":
        c = rng.randint(2, 30)
    else:
        c = rng.randint(1, max(1, min(result, 30)))
    side = "left"
    kind = rng.random()
    stories = wording.TWO_STEP_STORIES.get((first, second), ())
    if kind < 0.2 and stories:
        pattern = rng.choice(stories)
    elif kind < 0.4:
        if second == "subtract" and rng.random() < 0.5:
            side, c = "right", result + rng.randint(1, 30)
        pattern = rng.choice(wording.TWO_STEP_BY_SECOND[second, side])
    else:
        pattern = rng.choice(wording.TWO_STEP)
    last = Step(second, None, c) if side == "left" else Step(second, c, None)
    return Problem(_fill(rng, pattern, first, a, b, second, c), (Step(first, a, b), last))


def _first_operands(rng: random.Random, operation: str) -> tuple[int, int]:
    if operation == "multiply":
        return rng.randint(2, 12), rng.randint(2, 12)
    if operation == "add":
        return rng.randint(2, 40), rng.randint(2, 40)
    b = rng.randint(2, 40)
    return b + rng.randint(2, 40), b


def _fill(rng: random.Random, pattern: str, first: str, a: int, b: int, second: str = "add", c: int = 0) -> str:
    full = rng.choice(wording.FULL[first]).format(a, b)
    return pattern.format(
        a=a,
        b=b,
        c=c,
        w1=wording.INFIX[first],
        w2=wording.INFIX[second],
        s1=wording.SIGN[first],
        s2=wording.SIGN[second],
        i1=wording.ONWARD[first][0].format(b),
        i2=rng.choice(wording.ONWARD[second]).format(c),
        f1=full,
        F1=full[0].upper() + full[1:],
        n1=wording.NOUN[first].format(a, b),
        name=rng.choice(wording.NAMES),
        things=rng.choice(wording.THINGS),
    )
