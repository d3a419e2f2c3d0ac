"""Demonstrations of the arithmetic tasks for any model: `ReactAgent` with the tools add, subtract and multiply.

In: a count, a seed and the share of slips. Out: rows for supervised training, from the train split alone. A slip is one of
those that the bundled model was shown: stopping half-way, a guess, a wrong tool. A call that cannot be read is not among them:
whoever is shown these can write JSON.
"""

from __future__ import annotations

import random
from typing import Any

from .demo import Demo
from .demos import Style, guess_answer, train_problem, work_through
from .toolbox import arithmetic_tools

SLIPS = ("forgetful", "guess", "wrong_tool")


def arithmetic_demos(count: int, seed: int = 0, *, mistakes: float = 0.0) -> list[dict[str, Any]]:
    """Two calls and an answer: multiply, add, "Answer: 89"."""
    rng = random.Random(f"arithmetic demos {seed}")
    rows = []
    for _ in range(count):
        problem = train_problem(rng, 2)
        demo = Demo([{"role": "user", "content": problem.question}])
        style = Style(demo, native=False)
        behaviour = rng.choice(SLIPS) if rng.random() < mistakes else "good"
        if behaviour == "guess":
            guess_answer(rng, demo, style, problem)
        else:
            tools = arithmetic_tools(rng, {step.operation for step in problem.steps}, plain=True)
            work_through(rng, demo, style, tools, problem, behaviour)
        rows.append({"messages": demo.messages, "answer": str(problem.results()[-1])})
    return rows
