"""Training dialogues of the code agent: a question, a block of Python, its output, an answer.

No code runs here: a right program prints the task's answer, and SLIPS computes what a wrong one prints.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from chat import Phase, code_system

from agentfly.envs.code.solver import solve
from agentfly.envs.code.task_kinds import EASY, FORMS, Given, written
from agentfly.envs.code.tasks import CodeProblem, draw, split_of
from agentfly.pocket.demos import GUESSES, Demo

# What the mixed phase does with a code task, in weights.
BEHAVIOURS = {"good": 34, "slip": 34, "guess": 18, "malformed": 14}
FIRST_LINES = ("You are a helpful assistant that writes Python.", "Solve the task with a program.")

# Programs that miss the point, by kind of task, each with what it prints.
SLIPS: dict[str, Callable[[random.Random, Given], tuple[str, object]]] = {
    "expression": lambda rng, g: _other_form(rng, g),
    "remainder": lambda rng, g: (f"{g['a']} // {g['b']}", g["a"] // g["b"]),
    "power": lambda rng, g: (f"{g['a']} * {g['b']}", g["a"] * g["b"]),
    "reverse": lambda rng, g: (f"{g['word']!r}.upper()", g["word"].upper()),
    "letter_count": lambda rng, g: (f"len({g['word']!r})", len(g["word"])),
    "capitals": lambda rng, g: (f"{g['word']!r}[::-1]", g["word"][::-1]),
    "list_sum": lambda rng, g: (f"max({g['numbers']})", max(g["numbers"])),
    "list_max": lambda rng, g: (f"sum({g['numbers']})", sum(g["numbers"])),
    "list_sort": lambda rng, g: (f"max({g['numbers']})", max(g["numbers"])),
}


def code_demo(rng: random.Random, phase: Phase, behaviour: str = "") -> Demo:
    """One dialogue; without a named behaviour it is drawn as the phase says."""
    problem = train_task(rng)
    first_line = rng.choice(FIRST_LINES) if rng.random() < 0.1 else ""
    demo = Demo([{"role": "system", "content": code_system(first_line)}, {"role": "user", "content": problem.question}])
    if not behaviour:
        weights = BEHAVIOURS if phase == "mixed" else {"good": 95, "corrected": 5}
        behaviour = rng.choices(list(weights), weights=list(weights.values()))[0]
    (program,) = solve({"kind": problem.kind.name, "given": problem.given})
    if behaviour == "guess":
        return _guess(rng, demo, problem)
    if behaviour in ("malformed", "corrected"):
        _stumble(rng, demo, program, learn=behaviour == "malformed")
        if behaviour == "malformed" and rng.random() < 0.6:
            return _guess(rng, demo, problem)
    printed = problem.answer
    if behaviour == "slip":
        body, value = SLIPS[problem.kind.name](rng, problem.given)
        program, printed = f"print({body})", str(value)
    demo.reply(f"```python\n{program}\n```")
    demo.messages.append({"role": "user", "content": f"Observation: {printed}"})
    demo.reply(f"Answer: {printed}")
    demo.solved = printed == problem.answer
    return demo


def train_task(rng: random.Random) -> CodeProblem:
    while True:
        problem = draw(rng, EASY)
        if split_of(problem.question) == "train":
            return problem


def _other_form(rng: random.Random, given: Given) -> tuple[str, object]:
    """The same numbers with other signs, where that makes a difference."""
    right = FORMS[given["form"]](given["a"], given["b"], given["c"])
    forms = [form for form, value in FORMS.items() if value(given["a"], given["b"], given["c"]) != right]
    form = rng.choice(forms)
    return written({**given, "form": form}), FORMS[form](given["a"], given["b"], given["c"])


def _guess(rng: random.Random, demo: Demo, problem: CodeProblem) -> Demo:
    """An answer without a program: something from the question, or near the answer, but never the answer."""
    answer = problem.answer
    if answer.isdigit():
        guess = str(max(0, int(answer) + rng.choice((-1, 1)) * rng.randint(1, 30)))
    else:
        guess = str(problem.given.get("word") or problem.given["numbers"][0])
    demo.reply(f"Answer: {guess}" if rng.random() < 0.7 else f"{rng.choice(GUESSES)}\nAnswer: {guess}")
    demo.solved = guess == answer
    return demo


def _stumble(rng: random.Random, demo: Demo, program: str, *, learn: bool) -> None:
    """A block that cannot run, and what the interpreter says to it."""
    variants = [
        (program[:-1], f"File \"<cell 1>\", line 1\n    {program[:-1]}\n         ^\nSyntaxError: '(' was never closed"),
        (f"{program})", f"File \"<cell 1>\", line 1\n    {program})\n{' ' * (4 + len(program))}^\nSyntaxError: unmatched ')'"),
    ]
    if not learn:
        name = f"calculate{program.removeprefix('print')}"
        said = f"Traceback:\n  line 1, in <module>: {name}\nNameError: name 'calculate' is not defined"
        variants.append((name, said))
    code, error = rng.choice(variants)
    demo.reply(f"```python\n{code}\n```", learn)
    demo.messages.append({"role": "user", "content": f"Observation: {error}"})
