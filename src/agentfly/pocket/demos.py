"""Demonstrations of the arithmetic tasks for `ReactAgent` with the tools add, subtract and multiply.

All questions come from the train split. The mistakes shown are to stop half-way, to guess and to call a wrong tool. The
dialogue parts here are also what `scripts/pocket` builds the bundled model's training data from.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from .tasks import OPERATIONS, ArithmeticProblem, calculate, one_step_problem, split_of, two_step_problem

MISTAKES = ("forgetful", "guess", "wrong_tool")
CANONICAL = {"add": "Add two numbers.", "subtract": "Subtract b from a.", "multiply": "Multiply two numbers."}
# Thoughts: before the first call, before later calls, before an answer, before a guess.
BEGIN = ("{} first", "I need to {}", "{} the numbers", "start: {}")
GO_ON = ("now {}", "then {}", "next {}", "{} the result")
ENOUGH = ("done", "that is it", "I have the result")
GUESSES = ("I know this", "easy", "that is it")


@dataclass(slots=True)
class Demo:
    """A dialogue. `learn[i]`: the i-th assistant message is trained on. `solved`: the last answer is right."""

    messages: list[dict[str, str]]
    schemas: list[dict[str, Any]] = field(default_factory=list)
    learn: list[bool] = field(default_factory=list)
    solved: bool = True
    kind: str = ""

    def reply(self, text: str, learn: bool = True) -> None:
        self.messages.append({"role": "assistant", "content": text})
        self.learn.append(learn)


@dataclass(frozen=True, slots=True)
class DemoTool:
    """A tool as a demonstration shows it. `kind` is an operation, "lookup" or "other"; `floats`: it answers 84.0, not 84."""

    name: str
    kind: str
    description: str
    arguments: tuple[tuple[str, str], ...] = (("a", "number"), ("b", "number"))
    notes: tuple[str, ...] = ()
    floats: bool = False

    def line(self) -> str:
        """The tool's line in the ReAct prompt, without the dash."""
        signature = ", ".join(f"{name}: {kind}" for name, kind in self.arguments)
        notes = "; ".join(f"{name}: {note}" for (name, _), note in zip(self.arguments, self.notes, strict=False))
        return f"{self.name}({signature}): {self.description}" + (f" {notes}" if notes else "")

    def schema(self) -> dict[str, Any]:
        """The tool's JSON schema, as chat templates take it."""
        properties: dict[str, Any] = {name: {"type": kind} for name, kind in self.arguments}
        for (name, _), note in zip(self.arguments, self.notes, strict=False):
            properties[name]["description"] = note
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        return {"type": "function", "function": {"name": self.name, "description": self.description, "parameters": parameters}}

    def input(self, *values: int | str) -> str:
        """The arguments of a call as JSON."""
        return json.dumps({name: value for (name, _), value in zip(self.arguments, values, strict=True)}, ensure_ascii=False)

    def observe(self, left: int, right: int) -> str:
        result = calculate(self.kind, left, right)
        return f"{result}.0" if self.floats else str(result)


class DialogueWriter:
    """Appends calls, answers and observations to a `Demo`, as ReAct text or as native tool calls."""

    def __init__(self, demo: Demo, native: bool) -> None:
        self.demo, self.native = demo, native

    def call(self, thought: str, name: str, arguments: str, *, learn: bool = True) -> None:
        if self.native:
            text = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        else:
            text = f"Thought: {thought}\nAction: {name}\nInput: {arguments}"
        self.demo.reply(text, learn)

    def answer(self, thought: str, answer: str) -> None:
        self.demo.reply(answer if self.native else f"Thought: {thought}\nAnswer: {answer}")

    def observe(self, text: str) -> None:
        role, content = ("tool", text) if self.native else ("user", f"Observation: {text}")
        self.demo.messages.append({"role": role, "content": content})


def arithmetic_demos(count: int, seed: int = 0, *, mistakes: float = 0.0) -> list[dict[str, Any]]:
    """Rows for supervised training, each with two calls and an answer. `mistakes` is the share of dialogues that go wrong."""
    rng = random.Random(f"arithmetic demos {seed}")
    rows = []
    for _ in range(count):
        problem = train_problem(rng, 2)
        demo = Demo([{"role": "user", "content": problem.question}])
        writer = DialogueWriter(demo, native=False)
        behaviour = rng.choice(MISTAKES) if rng.random() < mistakes else "good"
        if behaviour == "guess":
            guess_answer(rng, demo, writer, problem)
        else:
            work_through(rng, demo, writer, plain_tools(rng), problem, behaviour)
        rows.append({"messages": demo.messages, "answer": str(problem.results()[-1])})
    return rows


def plain_tools(rng: random.Random) -> dict[str, DemoTool]:
    """The package's tools add, subtract and multiply by kind, in a random order."""
    kinds = list(OPERATIONS)
    rng.shuffle(kinds)
    return {kind: DemoTool(kind, kind, CANONICAL[kind]) for kind in kinds}


def train_problem(rng: random.Random, steps: int) -> ArithmeticProblem:
    """A problem of the train split with one or two steps."""
    while True:
        problem = two_step_problem(rng) if steps == 2 else one_step_problem(rng)
        if split_of(problem.question) == "train":
            return problem


def work_through(
    rng: random.Random,
    demo: Demo,
    writer: DialogueWriter,
    tools: dict[str, DemoTool],
    problem: ArithmeticProblem,
    behaviour: str,
) -> None:
    """Call the tools step by step and answer with the last result. "forgetful" stops early, "wrong_tool" errs in one step."""
    result, right = 0, problem.results()[-1]
    wrong_step = rng.randrange(len(problem.steps)) if behaviour == "wrong_tool" else -1
    for number, step in enumerate(problem.steps):
        if behaviour == "forgetful" and number == 1:
            break
        left, other = step.operands(result)
        tool = tools[step.operation]
        if number == wrong_step:
            choices = [kind for kind in OPERATIONS if kind in tools and kind != step.operation]
            tool = tools[rng.choice(choices)] if choices else tool
        writer.call(rng.choice(GO_ON if number else BEGIN).format(tool.kind), tool.name, tool.input(left, other))
        observation = tool.observe(left, other)
        writer.observe(observation)
        result = int(float(observation))
    writer.answer(rng.choice(ENOUGH), str(result))
    demo.solved = result == right


def guess_answer(rng: random.Random, demo: Demo, writer: DialogueWriter, problem: ArithmeticProblem) -> Demo:
    """Answer without a call, with a number near the right one."""
    right = problem.results()[-1]
    guess = max(0, right + rng.choice((-1, 1)) * rng.randint(1, 30))
    writer.answer(rng.choice(GUESSES), str(guess))
    demo.solved = guess == right
    return demo
