"""The tools that demonstrations show: arithmetic under many names and spellings, look-ups, and distractors."""

from __future__ import annotations

import random

from agentfly.pocket.demos import CANONICAL, DemoTool, plain_tools
from agentfly.pocket.tasks import OPERATIONS

NAMES = {
    "add": ("plus", "sum", "add_numbers", "addition"),
    "subtract": ("minus", "sub", "difference", "subtract_numbers"),
    "multiply": ("times", "mul", "product", "multiply_numbers"),
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


def arithmetic_tools(rng: random.Random, needed: set[str], *, plain: bool) -> dict[str, DemoTool]:
    """Tools by kind, in the order they are shown. `plain` is the built-in trio; otherwise names and spellings vary."""
    if plain:
        return plain_tools(rng)
    kinds = [kind for kind in OPERATIONS if kind in needed or rng.random() < 0.5]
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
    """A made-up word, which the model can only copy."""
    return "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(syllables))
