"""Draws right functions over lists of whole numbers. Names, constants and comparisons come from the seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

NAMES = (
    "ash", "bay", "cob", "dew", "elm", "fig", "gum", "hay", "ivy", "jet", "kelp", "lark", "moss", "nut", "oak", "pine", "quay",
    "rye", "sage", "tin", "urn", "vine", "wren", "yew", "zinc",
)  # fmt: skip
ORDER = ("<", "<=", ">", ">=")


@dataclass(frozen=True, slots=True)
class DrawnFunction:
    """A function `name`. `scalar`: it takes a number, otherwise a list of numbers. `uses` is the function that it calls."""

    name: str
    source: str
    scalar: bool
    template: str
    uses: str = ""


def draw_helper(rng: random.Random, name: str) -> DrawnFunction:
    """A function from a number to a number."""
    template = rng.choice(sorted(_SCALAR))
    return DrawnFunction(name, _SCALAR[template](rng, name), True, template)


def draw_function(rng: random.Random, name: str, helper: str = "") -> DrawnFunction:
    """A function from a list of numbers to a number or a list. It passes each number to `helper` if one is given."""
    template = rng.choice(sorted(_LIST))
    item = f"{helper}(value)" if helper else "value"
    return DrawnFunction(name, _LIST[template](rng, name, item), False, template, helper)


def _def(name: str, parameter: str, *lines: str) -> str:
    return "\n    ".join([f"def {name}({parameter}):", *lines]) + "\n"


def _clip(rng: random.Random, name: str) -> str:
    low, high = sorted(rng.sample(range(-6, 9), 2))
    lines = f"if value < {low}:", f"    return {low}", f"if value > {high}:", f"    return {high}", "return value"
    return _def(name, "value", *lines)


def _step(rng: random.Random, name: str) -> str:
    test = f"if value {rng.choice(ORDER)} {rng.randint(-4, 5)}:"
    return _def(name, "value", test, f"    return value * {rng.randint(2, 5)}", f"return value - {rng.randint(1, 9)}")


def _fold(rng: random.Random, name: str) -> str:
    rest = f"rest = value % {rng.randint(3, 7)}"
    return _def(name, "value", rest, f"return rest * {rng.randint(2, 4)} + {rng.randint(1, 9)}")


def _distance(rng: random.Random, name: str) -> str:
    center = rng.randint(-5, 5)
    return _def(name, "value", f"if value > {center}:", f"    return value - {center}", f"return {center} - value")


def _count(rng: random.Random, name: str, item: str) -> str:
    test = f"    if {item} {rng.choice(ORDER)} {rng.randint(-4, 6)}:"
    add = f"        count += {rng.choice((1, 1, 2))}"
    return _def(name, "values", f"count = {rng.choice((0, 0, 1))}", "for value in values:", test, add, "return count")


def _total(rng: random.Random, name: str, item: str) -> str:
    add = f"    total += {item} * {rng.randint(2, 5)}"
    end = f"return total - {rng.randint(1, 9)}"
    return _def(name, "values", f"total = {rng.randint(-3, 3)}", "for value in values:", add, end)


def _best(rng: random.Random, name: str, item: str) -> str:
    test = f"    if {item} {rng.choice('<>')} best:"
    lines = f"best = {rng.randint(-3, 3)}", "for value in values:", test, f"        best = {item}", "return best"
    return _def(name, "values", *lines)


def _kept(rng: random.Random, name: str, item: str) -> str:
    test = f"    if value {rng.choice(ORDER)} {rng.randint(-4, 4)}:"
    keep = f"        kept.append({item} + {rng.randint(1, 6)})"
    return _def(name, "values", "kept = []", "for value in values:", test, keep, "return kept")


def _running(rng: random.Random, name: str, item: str) -> str:
    keep = f"    sums.append(total - {rng.randint(1, 5)})"
    begin = "sums = []", f"total = {rng.randint(0, 4)}"
    return _def(name, "values", *begin, "for value in values:", f"    total += {item}", keep, "return sums")


def _windows(rng: random.Random, name: str, item: str) -> str:
    size = rng.randint(2, 3)
    loop = f"for start in range(len(values) - {size} + 1):"
    add = f"    made.append(sum(values[start:start + {size}]))"
    return _def(name, "values", "made = []", f"values = [{item} for value in values]", loop, add, "return made")


def _alternate(rng: random.Random, name: str, item: str) -> str:
    test = f"    if place % {rng.randint(2, 3)} == {rng.randint(0, 1)}:"
    branches = f"        total += {item}", "    else:", f"        total -= {item}"
    loop = "for place, value in enumerate(values):"
    return _def(name, "values", f"total = {rng.randint(0, 5)}", loop, test, *branches, "return total")


_SCALAR: dict[str, Callable[[random.Random, str], str]] = {
    "clip": _clip, "step": _step, "fold": _fold, "distance": _distance,
}  # fmt: skip
_LIST: dict[str, Callable[[random.Random, str, str], str]] = {
    "count": _count, "total": _total, "best": _best, "kept": _kept, "running": _running, "windows": _windows,
    "alternate": _alternate,
}  # fmt: skip
