"""Plants bugs: one node of the syntax tree of a right function is changed, so that exactly one line differs.

A bug is kept if it shows on at least four of the drawn inputs. The functions hold no loop without an end, so running them here
is safe; what a model writes is never run here.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Input = int | list[int]
INPUTS = 24
LEAST = 4
_COMPARE: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt), ast.LtE: (ast.Lt, ast.GtE), ast.Gt: (ast.GtE, ast.Lt), ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Mod: ast.FloorDiv,
}


@dataclass(frozen=True, slots=True)
class Bug:
    """A right line that became a wrong one; `line` counts from 1."""

    line: int
    right: str
    wrong: str
    kind: str


def bugs_of(source: str, rng: random.Random) -> Iterator[tuple[Bug, str]]:
    """Every single change of a function, in random order: the bug, and the source with it."""
    places = [place for place, node in enumerate(ast.walk(ast.parse(source))) if _kinds(node)]
    rng.shuffle(places)
    right = ast.unparse(ast.parse(source))
    for place in places:
        tree = ast.parse(source)
        node = list(ast.walk(tree))[place]
        kind = rng.choice(_kinds(node))
        _change(node, kind, rng)
        wrong = ast.unparse(tree)
        differ = [n for n, (a, b) in enumerate(zip(right.splitlines(), wrong.splitlines(), strict=False)) if a != b]
        if len(differ) == 1 and right.count("\n") == wrong.count("\n"):
            row = differ[0]
            # The line must be the only one of its text, so that one exact replacement repairs it.
            bug = Bug(row + 1, right.splitlines()[row], wrong.splitlines()[row], kind)
            if wrong.splitlines().count(bug.wrong) == 1:
                yield bug, wrong + "\n"


def tidy(source: str) -> str:
    """A source as `ast.unparse` writes it, so that a planted bug changes no other line."""
    return ast.unparse(ast.parse(source)) + "\n"


def draw_inputs(rng: random.Random, scalar: bool = False) -> list[Input]:
    """Inputs of a drawn function, without repetition."""
    made: list[Input] = []
    while len(made) < INPUTS:
        one: Input = rng.randint(-9, 9) if scalar else [rng.randint(-9, 9) for _ in range(rng.randint(1, 6))]
        if one not in made or scalar:
            made.append(one)
    return made


def run(sources: dict[str, str], entry: str, inputs: list[Input]) -> list[object]:
    """The results of a drawn function on inputs; the name of the exception where one is raised.

    The modules of a repository are run in order, the ones that others import first."""
    space: dict[str, Any] = {}
    for text in sources.values():
        lines = (line for line in text.splitlines() if not line.startswith("from "))
        exec(compile("\n".join(lines), "<repair>", "exec"), space)
    results: list[object] = []
    for given in inputs:
        try:
            results.append(space[entry](list(given) if isinstance(given, list) else given))
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            results.append(type(error).__name__)
    return results


def _kinds(node: ast.AST) -> list[str]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in _COMPARE:
            return ["comparison"]
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in _ARITHMETIC:
            return ["operator"]
        case ast.Constant(value=int()):
            return ["constant"]
    return []


def _change(node: Any, kind: str, rng: random.Random) -> None:
    if kind == "comparison":
        node.ops = [rng.choice(_COMPARE[type(node.ops[0])])()]
    elif kind == "operator":
        node.op = _ARITHMETIC[type(node.op)]()
    else:
        node.value += rng.choice((-1, 1)) if node.value else 1
