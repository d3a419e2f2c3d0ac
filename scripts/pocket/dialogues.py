"""Training dialogues of the model "pocket", in ReAct, native tool-call and code form. All questions are of the train split.

phase "good"   every task is solved; a mistake shown for its correction is not trained on
phase "mixed"  arithmetic and code tasks are solved only sometimes (BEHAVIOURS): the warm start that RL improves on
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chat import Phase, react_system
from code_demos import code_demo
from toolbox import arithmetic_tools, bystander, invented, lookup_tool

from agentfly.pocket.demos import BEGIN, ENOUGH, Demo, DemoTool, DialogueWriter, guess_answer, train_problem, work_through
from agentfly.pocket.tasks import OPERATIONS, ArithmeticProblem

# What the mixed phase does with an arithmetic question, in weights: the first row is two-step, the second one-step.
BEHAVIOURS = {
    2: {"good": 35, "forgetful": 26, "guess": 12, "wrong_tool": 17, "malformed": 10},
    1: {"good": 80, "guess": 8, "wrong_tool": 6, "malformed": 6},
}
KINDS = {"two_step": 40, "one_step": 20, "lookup": 13, "no_tools": 4, "code": 23}
MIXED_KINDS = {"two_step": 48, "one_step": 19, "lookup": 9, "no_tools": 3, "code": 21}

FIRST_LINES = (
    "You are a helpful assistant with tools.",
    "You are a careful calculator.",
    "Solve the task with the tools you have.",
)
# How a call that cannot be read may look, and how the tools then answer; other frameworks word it otherwise (OTHER_ERRORS).
UNREADABLE = "This tool call could not be read: the JSON is not valid at {}."
OTHER_ERRORS = ("Error: the input is not valid JSON", "Error: wrong type: expected a number", "Error: bad call, try again")
NUDGES = (
    "Your reply has no tool call and no answer. Use a tool or give your answer.",
    "Reply with an Action and its Input, or with an Answer.",
)
RELATIONS = ("friend", "teacher", "city", "color", "boss", "number", "price", "age")


def demonstrations(seed: str, phase: Phase, count: int) -> Iterator[Demo]:
    """`count` dialogues, the same ones for the same seed."""
    rng = random.Random(seed)
    weights = KINDS if phase == "good" else MIXED_KINDS
    for kind in rng.choices(list(weights), weights=list(weights.values()), k=count):
        if kind == "lookup":
            demo = lookup_demo(rng)
        elif kind == "no_tools":
            demo = direct_demo(rng)
        elif kind == "code":
            demo = code_demo(rng, phase)
        else:
            demo = arithmetic_demo(rng, 2 if kind == "two_step" else 1, phase)
        demo.kind = kind
        yield demo


def arithmetic_demo(rng: random.Random, steps: int, phase: Phase, behaviour: str = "") -> Demo:
    """One arithmetic dialogue; without a named behaviour it is drawn as the phase says."""
    problem = train_problem(rng, steps)
    tools = arithmetic_tools(
        rng, {step.operation for step in problem.steps}, plain=rng.random() < (0.5 if steps == 2 else 0.25)
    )
    demo, style = _open(rng, problem.question, list(tools.values()))
    if not behaviour:
        weights = BEHAVIOURS[steps] if phase == "mixed" else {"good": 94, "corrected": 6}
        behaviour = rng.choices(list(weights), weights=list(weights.values()))[0]
    if behaviour == "guess":
        return guess_answer(rng, demo, style, problem)
    if behaviour in ("malformed", "corrected"):
        fails = _stumble(rng, style, tools[problem.steps[0].operation], problem, learn=behaviour == "malformed")
        if behaviour == "malformed" and fails:
            return guess_answer(rng, demo, style, problem)
    work_through(rng, demo, style, tools, problem, behaviour)
    return demo


def _open(rng: random.Random, question: str, tools: Sequence[DemoTool]) -> tuple[Demo, DialogueWriter]:
    native = bool(tools) and rng.random() < 0.25
    if native:
        demo = Demo([{"role": "user", "content": question}], [tool.schema() for tool in tools])
        if rng.random() < 0.3:
            demo.messages.insert(0, {"role": "system", "content": rng.choice(FIRST_LINES)})
    else:
        first_line = rng.choice(FIRST_LINES) if rng.random() < 0.1 else ""
        system = react_system([tool.line() for tool in tools], first_line)
        demo = Demo([{"role": "system", "content": system}, {"role": "user", "content": question}])
    return demo, DialogueWriter(demo, native)


def _stumble(rng: random.Random, style: DialogueWriter, tool: DemoTool, problem: ArithmeticProblem, *, learn: bool) -> bool:
    """A call that cannot be made, and the error that comes back; whether the chain gives up after it."""
    step = problem.steps[0]
    name, good = tool.name, tool.input(*step.operands(0))
    (first, kind), (second, _) = tool.arguments
    place = rng.randint(28, 40) if style.native else 2
    variants = [
        (name, good[:-1], UNREADABLE.format("its end: expecting ',' delimiter")),
        (
            name,
            good.replace('"', ""),
            UNREADABLE.format(f"character {place}: expecting property name enclosed in double quotes"),
        ),
        (name, good.replace(":", ""), UNREADABLE.format(f"character {place + 4}: expecting ':' delimiter")),
    ]
    if not learn:
        expected = f"Expected {name}({first}: {kind}, {second}: {kind})."
        unknown = invented(rng)
        only = f'{{"{first}": {step.left}}}'
        variants += [
            (unknown, good, f'There is no tool "{unknown}". Known tools: {name}.'),
            (name, only, f'Bad arguments for {name}: missing argument "{second}". {expected}'),
        ]
    if not style.native:
        wanted = f'This tool call could not be read: its Input must be a JSON object: {{"{first}": ..., "{second}": ...}}.'
        variants.append((name, f"{step.left}, {step.right}", wanted))
    named, written, error = rng.choice(variants)
    style.call(rng.choice(BEGIN).format(tool.kind), named, written, learn=learn)
    style.observe(error if rng.random() < 0.8 else rng.choice(OTHER_ERRORS))
    return rng.random() < 0.6


@dataclass(frozen=True, slots=True)
class Lookup:
    """A question about invented facts, and the calls that answer it: (tool, values, observation)."""

    question: str
    tools: tuple[DemoTool, ...]
    calls: tuple[tuple[DemoTool, tuple[int | str, ...], str], ...]

    @property
    def answer(self) -> str:
        return self.calls[-1][2]


def lookup(rng: random.Random) -> Lookup:
    """One fact, or two facts in a row, or arithmetic on a fact."""
    tool, hops = lookup_tool(rng), rng.choice(("one", "one", "two", "priced"))
    relation, other = rng.sample(RELATIONS, 2)
    who, middle, value = invented(rng).capitalize(), invented(rng).capitalize(), _value(rng)
    tools = [tool]
    if hops == "priced":
        operations = arithmetic_tools(rng, set(OPERATIONS), plain=True)
        kind, price, number = rng.choice(("add", "multiply")), rng.randint(2, 30), rng.randint(2, 9)
        tools += operations.values()
        question = f"What is the price of {who}, {'plus' if kind == 'add' else 'times'} {number}?"
        last = operations[kind]
        rng.shuffle(tools)
        fact, sum_up = (tool, (f"price of {who}",), str(price)), (last, (price, number), last.observe(price, number))
        return Lookup(question, tuple(tools), (fact, sum_up))
    tools += [bystander(rng) for _ in range(rng.choice((0, 1)))]
    rng.shuffle(tools)
    if hops == "one":
        return Lookup(f"What is the {relation} of {who}?", tuple(tools), ((tool, (f"{relation} of {who}",), value),))
    question = f"What is the {other} of the {relation} of {who}?"
    first, second = (tool, (f"{relation} of {who}",), middle), (tool, (f"{other} of {middle}",), value)
    return Lookup(question, tuple(tools), (first, second))


def lookup_demo(rng: random.Random) -> Demo:
    task = lookup(rng)
    demo, style = _open(rng, task.question, task.tools)
    for number, (tool, values, observation) in enumerate(task.calls):
        if tool.kind == "lookup":
            thought = "now look that up" if number else "look it up"
        else:
            thought = f"now {tool.kind}"
        style.call(thought, tool.name, tool.input(*values))
        style.observe(observation)
    style.answer(rng.choice(ENOUGH), task.answer)
    return demo


def direct_demo(rng: random.Random) -> Demo:
    """No tools, or a nudge: questions small enough to know by heart, and what to do when told that a reply was neither."""
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    demo, style = _open(rng, f"What is {a} plus {b}?", ())
    if rng.random() < 0.3:
        demo.reply(f"Thought: {rng.choice(BEGIN).format('add')}", learn=False)
        demo.messages.append({"role": "user", "content": rng.choice(NUDGES)})
    style.answer(rng.choice(ENOUGH), str(a + b))
    return demo


def _value(rng: random.Random) -> str:
    if rng.random() < 0.4:
        return str(rng.randint(1, 99))
    return rng.choice(("red", "green", "blue", "yellow")) if rng.random() < 0.4 else invented(rng).capitalize()
