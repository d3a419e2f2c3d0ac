"""Demonstrations `gsm8k` for `CodeAgent`: a program made of each worked answer, what it prints, the answer.

GSM8K marks the steps of a worked answer as `48/2 = <<48/2=24>>24 clips in May`. A step becomes the line `clips_may = 48 / 2`,
named after the words around it; a number that an earlier step computed becomes that step's name; the last line prints. No code
runs: the program is evaluated here (+ - * / of numbers and names), and left out if it does not print the published answer, is
too long, has a step without an operation, or uses a number from nowhere. A mistake is an answer without a program, or a wrong
last operation.
"""

from __future__ import annotations

import ast
import keyword
import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import DataError
from ..task_sets import read_table
from .gsm8k import gsm8k_tasks

GsmNumber = int | float
MAX_PROGRAM = 400  # characters
MAX_NAME = 24
_STEP = re.compile(r"<<([^<>=]{1,120})=\s*(-?[\d.]{1,40})>>(-?[\d.,]*)")
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
_WORD = re.compile(r"[^\W\d_]+")
_ENDING = re.compile(r"['’]\w+")
_CLAUSE = re.compile(r"[.,;:!?()\n=]")
_SENTENCE = re.compile(r"[.;!?]\s|\n|>>")
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SWAPPED: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub, ast.Mult),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add, ast.Div),
    ast.Div: (ast.Mult,),
}
_TABLES: dict[str, Any] = read_table(__package__, "gsm8k_words.json")
# Words that do not say what a number counts.
_EMPTY = frozenset([*_TABLES["empty"], "print", *(word.lower() for word in keyword.kwlist)])
_SPELLED_VALUES: dict[str, int] = _TABLES["values"]
# Numbers that a solution may use without the question: of halves, weekdays, dozens, hours, years, coins, percents.
_CUSTOMARY = frozenset(_TABLES["customary"])


@dataclass(frozen=True, slots=True)
class ProgramLine:
    """One line of a program: `name = value`."""

    name: str
    value: ast.expr

    @property
    def line(self) -> str:
        return f"{self.name} = {ast.unparse(self.value)}"


def gsm8k_demos(count: int, seed: int = 0, *, mistakes: float = 0.0) -> list[dict[str, Any]]:
    """Demonstrations of the train split of $GSM8K_DATA. If `count` exceeds their number, they repeat."""
    rows: list[dict[str, Any]] = []
    for task in gsm8k_tasks("train", None, seed):
        if len(rows) == count:
            break
        if steps := written(task):
            rows.append(_row(task, steps, seed, mistakes))
    if not rows:
        raise DataError("no demonstration can be made: no worked answer of the train file marks its steps as <<48/2=24>>")
    return [rows[number % len(rows)] for number in range(count)]


def written(task: Mapping[str, Any]) -> list[ProgramLine]:
    """Returns the program of a worked answer, or an empty list if none computes the published answer."""
    worked, given = task["worked"], _given(task["question"])
    steps: list[ProgramLine] = []
    namer = _Namer(given)
    for mark in _STEP.finditer(worked):
        tree = _read(mark[1])
        if tree is None or not any(isinstance(node, ast.BinOp) for node in ast.walk(tree)):
            return []
        tree = namer.visit(tree)
        name = _name(worked, mark, {step.name for step in steps})
        steps.append(ProgramLine(name, tree))
        namer.results.setdefault(_value(mark[2]), []).append(name)
    shown = run(steps)
    if shown is None or plain(shown) != task["answer"] or len(program_of(steps)) > MAX_PROGRAM:
        return []
    return steps if all(_known(number, given) for step in steps for number in _numbers(step.value)) else []


def program_of(steps: Sequence[ProgramLine]) -> str:
    return "\n".join([*(step.line for step in steps), f"print({steps[-1].name})"]) if steps else ""


def run(steps: Sequence[ProgramLine]) -> GsmNumber | None:
    """Returns what the program prints, with Python's arithmetic, or None if it would raise an error."""
    names: dict[str, GsmNumber] = {}
    result: GsmNumber | None = None
    for step in steps:
        try:
            result = names[step.name] = _evaluate(step.value, names)
        except (ArithmeticError, KeyError):
            return None
    return result


def plain(number: GsmNumber) -> str:
    """Returns a number as an answer is written: 24 for 24.0."""
    return str(number).removesuffix(".0")


def _row(task: Mapping[str, Any], steps: list[ProgramLine], seed: int, mistakes: float) -> dict[str, Any]:
    # One generator per row, so that good rows do not depend on the share of mistakes.
    rng = random.Random(f"gsm8k demos {seed} {task['id']}")
    slip = rng.random() < mistakes
    if slip and rng.random() < 0.5 and (wrong := _wrong_last_line(steps, task["answer"], rng)):
        steps, slip = wrong, False
    messages = [{"role": "user", "content": task["question"]}]
    if slip:
        answer = _guess(task["answer"], rng)
    else:
        shown = run(steps)
        assert shown is not None
        answer = plain(shown)
        messages.append({"role": "assistant", "content": f"```python\n{program_of(steps)}\n```"})
        messages.append({"role": "user", "content": f"Observation: {shown}"})
    messages.append({"role": "assistant", "content": f"Answer: {answer}"})
    return {"id": task["id"], "answer": task["answer"], "kind": task["kind"], "messages": messages}


def _wrong_last_line(steps: list[ProgramLine], answer: str, rng: random.Random) -> list[ProgramLine]:
    """Returns the program with another operation in its last line, or an empty list if the result is the same or an error."""
    last = steps[-1].value
    if not isinstance(last, ast.BinOp):
        return []
    other = rng.choice(_SWAPPED[type(last.op)])()
    wrong = [*steps[:-1], ProgramLine(steps[-1].name, ast.BinOp(last.left, other, last.right))]
    shown = run(wrong)
    return wrong if shown is not None and plain(shown) != answer else []


def _guess(answer: str, rng: random.Random) -> str:
    """Returns a number that is not the answer."""
    size = max(10, int(abs(float(answer))))
    return str(next(number for number in iter(lambda: rng.randint(1, 2 * size), 0) if str(number) != answer))


def _value(text: str) -> GsmNumber:
    text = text.replace(",", "").rstrip(".")
    try:
        return int(text) if "." not in text else float(text)
    except ValueError:
        return float("nan")  # equals no other number


def _read(text: str) -> ast.expr | None:
    """Returns an expression of + - * / and numbers, or None for anything else."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        return tree if _only_arithmetic(tree) else None
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _only_arithmetic(tree: ast.expr) -> bool:
    match tree:
        case ast.Constant(value=value):
            return type(value) in (int, float)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _only_arithmetic(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return type(op) in _OPERATORS and _only_arithmetic(left) and _only_arithmetic(right)
    return False


def _evaluate(tree: ast.expr, names: Mapping[str, GsmNumber]) -> GsmNumber:
    match tree:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.Name(id=name):
            return names[name]
        case ast.UnaryOp(operand=operand):
            return -_evaluate(operand, names)
        case ast.BinOp(left=left, op=op, right=right):
            result: GsmNumber = _OPERATORS[type(op)](_evaluate(left, names), _evaluate(right, names))
            return result
    raise KeyError(type(tree).__name__)


class _Namer(ast.NodeTransformer):
    """Replaces numbers that earlier lines computed by their names. Of several equal results it takes the newest unused one."""

    def __init__(self, given: set[GsmNumber]) -> None:
        self.given, self.results = given, dict[GsmNumber, list[str]]()
        self._used: set[str] = set()

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        names = self.results.get(node.value, []) if isinstance(node.value, int | float) else []
        unused = [name for name in names if name not in self._used]
        # A number that also stands in the question means an earlier result only if that result is still unused.
        if not names or (not unused and node.value in self.given):
            return node
        name = (unused or names)[-1]
        self._used.add(name)
        return ast.Name(name, ast.Load())


def _numbers(tree: ast.expr) -> list[GsmNumber]:
    return [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, int | float)]


def _given(question: str) -> set[GsmNumber]:
    """Returns the numbers of the question, in digits and in words."""
    words = _WORD.findall(question.lower())
    return {_value(text) for text in _NUMBER.findall(question)} | {_SPELLED_VALUES[w] for w in words if w in _SPELLED_VALUES}


def _known(number: GsmNumber, given: set[GsmNumber]) -> bool:
    return number in given or number in _CUSTOMARY or (isinstance(number, float) and number < 20)  # 0.2, as of 20 %


def _name(worked: str, mark: re.Match[str], taken: set[str]) -> str:
    """Names a line after what its number counts: two content words after it in its clause, or one after and one before it."""
    after = _content_words(_CLAUSE.split(worked[mark.end() :], maxsplit=1)[0])[:2]
    before = [word for word in _content_words(_SENTENCE.split(worked[: mark.start()])[-1]) if word not in after]
    words = after if len(after) == 2 else [*before[: 2 - len(after)], *after]
    others = ([word, *after[:1]] for word in before)
    names = [name for name in map(_joined, [words, *others]) if name] or [f"step_{len(taken) + 1}"]
    numbered = (f"{names[0]}_{number}" for number in range(2, 2 + len(taken)))
    return next(name for name in (*names, *numbered) if name not in taken)


def _joined(words: Sequence[str]) -> str:
    return "_".join(words)[:MAX_NAME].rstrip("_")


def _content_words(text: str) -> list[str]:
    words = _WORD.findall(_ENDING.sub("", text.lower()))
    return [word for word in words if word not in _EMPTY and len(word) > 1 and word.isascii()]
