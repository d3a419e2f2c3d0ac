"""Seeded arithmetic tasks in varied English, for the tools add, subtract and multiply.

Rows are `{"question", "answer", "steps", "operations"}`. A hash of the question decides its split, whatever the seed. Numbers
are small and never negative; the first step's result never equals the answer, so stopping half-way is always wrong.

`wording.json` holds the sentence patterns. Slots: {a} {b} {c} numbers, {name} {things} words, {w1} an infix word ("times"),
{s1} a sign, {i1} an instruction on the result so far ("multiply by 3"), {f1} a whole instruction ("Multiply 12 by 7"), {n1} a
noun phrase ("the product of 12 and 7"); 2 in place of 1 is the second step.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from ..errors import ConfigError

SPLITS = ("train", "validation", "test")
OPERATIONS = ("add", "subtract", "multiply")
DEFAULT_COUNTS = {"train": 4096, "validation": 200, "test": 400}


@dataclass(frozen=True, slots=True)
class ArithmeticStep:
    """One operation. An operand of None stands for the result of the previous step."""

    operation: str
    left: int | None
    right: int | None

    def operands(self, previous: int) -> tuple[int, int]:
        return (previous if self.left is None else self.left, previous if self.right is None else self.right)


@dataclass(frozen=True, slots=True)
class ArithmeticProblem:
    """A question and the steps that answer it."""

    question: str
    steps: tuple[ArithmeticStep, ...]

    def results(self) -> list[int]:
        """The result of every step; the last one is the answer."""
        results: list[int] = []
        for step in self.steps:
            results.append(calculate(step.operation, *step.operands(results[-1] if results else 0)))
        return results


def calculate(operation: str, left: int, right: int) -> int:
    if operation == "add":
        return left + right
    return left - right if operation == "subtract" else left * right


def arithmetic(split: str, count: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Questions that need two calls, such as "What is 12 times 7, plus 5?"."""
    return _rows(two_step_problem, 10_000, split, count, seed)


def one_step_arithmetic(split: str, count: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Questions that need one call, such as "What is 12 times 7?"."""
    return _rows(one_step_problem, 2_000, split, count, seed)


def split_of(question: str) -> str:
    """The one split that a question belongs to: 80 % train, 10 % validation, 10 % test."""
    bucket = zlib.crc32(question.encode()) % 10
    return "validation" if bucket == 0 else "test" if bucket == 1 else "train"


def _rows(
    make: Callable[[random.Random], ArithmeticProblem], most: int, split: str, count: int | None, seed: int
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


def one_step_problem(rng: random.Random) -> ArithmeticProblem:
    operation = rng.choice(OPERATIONS)
    a, b = _first_operands(rng, operation)
    if rng.random() < 0.2:
        pattern = rng.choice(_wording()["one_step_stories"][operation])
    else:
        pattern = rng.choice(_wording()["one_step"])
    return ArithmeticProblem(_fill(rng, pattern, operation, a, b), (ArithmeticStep(operation, a, b),))


def two_step_problem(rng: random.Random) -> ArithmeticProblem:
    while True:
        problem = _try_two_steps(rng)
        first, last = problem.results()
        if first != last and first > 0 and 0 <= last < 1000:
            return problem


def _try_two_steps(rng: random.Random) -> ArithmeticProblem:
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
    stories = _wording()["two_step_stories"].get(f"{first} {second}", ())
    if kind < 0.2 and stories:
        pattern = rng.choice(stories)
    elif kind < 0.4:
        if second == "subtract" and rng.random() < 0.5:
            side, c = "right", result + rng.randint(1, 30)
        pattern = rng.choice(_wording()["two_step_by_second"][f"{second} {side}"])
    else:
        pattern = rng.choice(_wording()["two_step"])
    last = ArithmeticStep(second, None, c) if side == "left" else ArithmeticStep(second, c, None)
    return ArithmeticProblem(_fill(rng, pattern, first, a, b, second, c), (ArithmeticStep(first, a, b), last))


def _first_operands(rng: random.Random, operation: str) -> tuple[int, int]:
    if operation == "multiply":
        return rng.randint(2, 12), rng.randint(2, 12)
    if operation == "add":
        return rng.randint(2, 40), rng.randint(2, 40)
    b = rng.randint(2, 40)
    return b + rng.randint(2, 40), b


def _fill(rng: random.Random, pattern: str, first: str, a: int, b: int, second: str = "add", c: int = 0) -> str:
    words = _wording()
    full = rng.choice(words["full"][first]).format(a, b)
    text: str = pattern.format(
        a=a,
        b=b,
        c=c,
        w1=words["infix"][first],
        w2=words["infix"][second],
        s1=words["sign"][first],
        s2=words["sign"][second],
        i1=words["onward"][first][0].format(b),
        i2=rng.choice(words["onward"][second]).format(c),
        f1=full,
        F1=full[0].upper() + full[1:],
        n1=words["noun"][first].format(a, b),
        name=rng.choice(words["names"]),
        things=rng.choice(words["things"]),
    )
    return text


@cache
def _wording() -> dict[str, Any]:
    wording: dict[str, Any] = json.loads((files(__package__) / "wording.json").read_text(encoding="utf-8"))
    return wording
