"""The tools that demonstrations show: arithmetic under many names and spellings, look-ups, and others that only stand by.

In: a random generator. Out: `DemoTool` values that know how they are described (ReAct line, JSON schema), how a call of them is
written and what it gives back. Nothing is executed here but arithmetic on small integers.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from .tasks import OPERATIONS, calculate

NAMES = {
    "add": ("plus", "sum", "add_numbers", "addition"),
    "subtract": ("minus", "sub", "difference", "subtract_numbers"),
    "multiply": ("times", "mul", "product", "multiply_numbers"),
}
CANONICAL = {
    "add": "Add two numbers.",
    "subtract": "Subtract b from a.",
    "multiply": "Multiply two numbers.",
}
DESCRIPTIONS = {
    "add": ("Add two numbers.", "The sum of two numbers.", "Adds its arguments.", "Add numbers"),
    "subtract": (
        "Subtract the second number from the first.",
        "Subtract b from a.",
        "Subtract two numbers.",
        "The difference of two numbers.",
        "Subtract numbers",
    ),
    "multiply": ("Multiply two numbers.", "The product of two numbers.", "Multiplies its arguments.", "Multiply numbers"),
}
ARGUMENTS = (("x", "y"), ("first", "second"), ("left", "right"), ("n", "m"), ("one", "two"))
ARGUMENT_DESCRIPTIONS = {
    "add": (("first number", "second number"), ("first term", "second term"), ("a number", "another number")),
    "subtract": (("first number", "second number"), ("number to subtract from", "number to subtract")),
    "multiply": (("first factor", "second factor"), ("first number", "second number"), ("a number", "another number")),
}
LOOKUPS = (
    ("lookup", "key", "Look up a fact."),
    ("lookup", "key", "Look up a key."),
    ("search", "query", "Search for a fact."),
    ("search", "query", "Search the web."),
    ("find", "name", "Find a fact by name."),
)
BYSTANDERS = (
    ("divide", (("a", "number"), ("b", "number")), "Divide a by b."),
    ("calculator", (("expression", "string"),), "Evaluate an arithmetic expression."),
    ("power", (("a", "number"), ("b", "number")), "Raise a to the power of b."),
    ("sqrt", (("x", "number"),), "The square root of a number."),
    ("weather", (("city", "string"),), "The weather in a city."),
    ("read_file", (("path", "string"),), "Read a file."),
    ("time", (), "The time now."),
    ("run_python", (("code", "string"),), "Run Python code."),
)
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"


@dataclass(frozen=True, slots=True)
class DemoTool:
    """`kind` is an operation, "lookup" or "other"; `floats` tools answer 84.0 where others answer 84."""

    name: str
    kind: str
    description: str
    arguments: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()
    floats: bool = False

    def line(self) -> str:
        """As the ReAct prompt lists it, without the dash."""
        signature = ", ".join(f"{name}: {kind}" for name, kind in self.arguments)
        notes = "; ".join(f"{name}: {note}" for (name, _), note in zip(self.arguments, self.notes, strict=False))
        return f"{self.name}({signature}): {self.description}" + (f" {notes}" if notes else "")

    def schema(self) -> dict[str, Any]:
        """As a chat template is told of it."""
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


def arithmetic_tools(rng: random.Random, needed: set[str], *, plain: bool) -> dict[str, DemoTool]:
    """Tools by kind, in the order they are shown. `plain` is the built-in trio; otherwise names and spellings vary."""
    kinds = list(OPERATIONS)
    if plain:
        rng.shuffle(kinds)
        return {kind: DemoTool(kind, kind, CANONICAL[kind], (("a", "number"), ("b", "number"))) for kind in kinds}
    kinds = [kind for kind in kinds if kind in needed or rng.random() < 0.5]
    arguments = ("a", "b") if rng.random() < 0.6 else rng.choice(ARGUMENTS)
    type_name = "number" if rng.random() < 0.8 else "integer"
    floats, noted, renamed = rng.random() < 0.4, rng.random() < 0.35, rng.random() < 0.35
    tools = [_arithmetic_tool(rng, kind, arguments, type_name, floats=floats, noted=noted, renamed=renamed) for kind in kinds]
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        tools.append(bystander(rng))
    rng.shuffle(tools)
    return {tool.kind if tool.kind != "other" else tool.name: tool for tool in tools}


def _arithmetic_tool(
    rng: random.Random, kind: str, arguments: tuple[str, ...], type_name: str, *, floats: bool, noted: bool, renamed: bool
) -> DemoTool:
    name = kind if not renamed else rng.choice(NAMES[kind]) if rng.random() < 0.6 else invented(rng)
    # An invented name says nothing, so the description must.
    description = CANONICAL[kind] if rng.random() < 0.5 and arguments[0] == "a" else rng.choice(DESCRIPTIONS[kind])
    notes = rng.choice(ARGUMENT_DESCRIPTIONS[kind]) if noted else ()
    return DemoTool(name, kind, description, tuple((argument, type_name) for argument in arguments), notes, floats)


def lookup_tool(rng: random.Random) -> DemoTool:
    name, argument, description = rng.choice(LOOKUPS)
    if rng.random() < 0.1:
        name = invented(rng)
    return DemoTool(name, "lookup", description, ((argument, "string"),))


def bystander(rng: random.Random) -> DemoTool:
    name, arguments, description = rng.choice(BYSTANDERS)
    return DemoTool(name, "other", description, arguments)


def invented(rng: random.Random, syllables: int = 2) -> str:
    """A word nobody has seen, so that it can only be copied."""
    return "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(syllables))
