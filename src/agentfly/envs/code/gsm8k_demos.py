"""Demonstrations `gsm8k` for `CodeAgent`: a program made of each worked answer, what it prints, the answer.

In: a count, a seed and the share of slips; the worked answers of GSM8K mark their steps as `48/2 = <<48/2=24>>24 clips in May`.
Out: rows for supervised training, of the train split alone. A step becomes a line, `clips_may = 48 / 2`, named after the words
around it; a number that an earlier step gave becomes that step's name; the last line prints. No code is run: an arithmetic of
our own (+ - * / of numbers and names) works the program out, and one that does not print the published answer is left out. So
is one that is too long, or holds what somebody worked out in the head: a step without an operation, or a number from nowhere. A
slip is an answer that nobody worked out, or a last step with the wrong operation.
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
from .gsm8k import gsm8k_tasks

Number = int | float
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
# These say nothing of what a number counts.
_WORDS = """a add adds after ago all also altogether amount an and are as at be because become becomes been before but by
calculate can could determine did divide do does each end equal equals every final finally find finding first for from get
gets give gives had has have he hence her him his how if in into is it its just know left let make makes many mean means more
mr mrs ms much multiply must need needs next no not now number of off on one only or other out over per second she since so
still subtract sum than that the their them then there therefore these they this those thus to total up us was we were which
who will with would you your"""
_EMPTY = frozenset([*_WORDS.split(), "print", *(word.lower() for word in keyword.kwlist)])
_SPELLED = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen twenty"""
_SPELLED_VALUES = {word: value for value, word in enumerate(_SPELLED.split())} | {
    **dict.fromkeys(("half", "twice", "double", "couple", "pair"), 2),
    **dict.fromkeys(("third", "thirds", "thrice", "triple"), 3),
    **dict.fromkeys(("quarter", "quarters", "fourth", "fourths"), 4),
    **dict.fromkeys(("fifth", "fifths"), 5),
    **dict.fromkeys(("week", "weeks", "daily"), 7),
    **dict.fromkeys(("dozen", "dozens", "year", "years", "monthly"), 12),
}
# These need not stand in the question: they are in halves, weekdays, dozens, hours, years, coins, percents.
_CUSTOMARY = frozenset(
    [0, 1, 2, 3, 4, 5, 7, 8, 10, 12, 16, 20, 24, 25, 28, 30, 31, 36, 48, 50, 52, 60, 75, 90, 100, 144, 180, 360, 365, 366, 1000]
)


@dataclass(frozen=True, slots=True)
class Step:
    """One line of a program."""

    name: str
    value: ast.expr

    @property
    def line(self) -> str:
        return f"{self.name} = {ast.unparse(self.value)}"


def gsm8k_demos(count: int, seed: int = 0, *, mistakes: float = 0.0) -> list[dict[str, Any]]:
    """Problems of the train split, from $GSM8K_DATA; beyond their number they come again."""
    rows: list[dict[str, Any]] = []
    for task in gsm8k_tasks("train", None, seed):
        if len(rows) == count:
            break
        if steps := written(task):
            rows.append(_row(task, steps, seed, mistakes))
    if not rows:
        raise DataError("no demonstration can be made: no worked answer of the train file marks its steps as <<48/2=24>>")
    return [rows[number % len(rows)] for number in range(count)]


def written(task: Mapping[str, Any]) -> list[Step]:
    """The program of a worked answer; nothing where none can be made that comes to the published answer."""
    worked, given = task["worked"], _given(task["question"])
    steps: list[Step] = []
    namer = _Namer(given)
    for mark in _STEP.finditer(worked):
        tree = _read(mark[1])
        if tree is None or not any(isinstance(node, ast.BinOp) for node in ast.walk(tree)):
            return []
        tree = namer.visit(tree)
        name = _name(worked, mark, {step.name for step in steps})
        steps.append(Step(name, tree))
        namer.results.setdefault(_value(mark[2]), []).append(name)
    shown = run(steps)
    if shown is None or plain(shown) != task["answer"] or len(program_of(steps)) > MAX_PROGRAM:
        return []
    return steps if all(_known(number, given) for step in steps for number in _numbers(step.value)) else []


def program_of(steps: Sequence[Step]) -> str:
    return "\n".join([*(step.line for step in steps), f"print({steps[-1].name})"]) if steps else ""


def run(steps: Sequence[Step]) -> Number | None:
    """What the program prints, worked out as Python would; None for what it could not work out."""
    names: dict[str, Number] = {}
    result: Number | None = None
    for step in steps:
        try:
            result = names[step.name] = _work_out(step.value, names)
        except (ArithmeticError, KeyError):
            return None
    return result


def plain(number: Number) -> str:
    """As one writes an answer: 24 for 24.0."""
    return str(number).removesuffix(".0")


def _row(task: Mapping[str, Any], steps: list[Step], seed: int, mistakes: float) -> dict[str, Any]:
    # A source of its own for each row: the good ones are the same whatever the share of slips.
    rng = random.Random(f"gsm8k demos {seed} {task['id']}")
    slip = rng.random() < mistakes
    if slip and rng.random() < 0.5 and (wrong := _wrong_end(steps, task["answer"], rng)):
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


def _wrong_end(steps: list[Step], answer: str, rng: random.Random) -> list[Step]:
    """The same with another operation in the last step; nothing where that changes nothing or cannot be worked out."""
    last = steps[-1].value
    if not isinstance(last, ast.BinOp):
        return []
    other = rng.choice(_SWAPPED[type(last.op)])()
    wrong = [*steps[:-1], Step(steps[-1].name, ast.BinOp(last.left, other, last.right))]
    shown = run(wrong)
    return wrong if shown is not None and plain(shown) != answer else []


def _guess(answer: str, rng: random.Random) -> str:
    """A number that is not the answer."""
    size = max(10, int(abs(float(answer))))
    return str(next(number for number in iter(lambda: rng.randint(1, 2 * size), 0) if str(number) != answer))


def _value(text: str) -> Number:
    text = text.replace(",", "").rstrip(".")
    try:
        return int(text) if "." not in text else float(text)
    except ValueError:
        return float("nan")  # equal to nothing


def _read(text: str) -> ast.expr | None:
    """An expression of + - * / and numbers, or nothing."""
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


def _work_out(tree: ast.expr, names: Mapping[str, Number]) -> Number:
    match tree:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.Name(id=name):
            return names[name]
        case ast.UnaryOp(operand=operand):
            return -_work_out(operand, names)
        case ast.BinOp(left=left, op=op, right=right):
            result: Number = _OPERATORS[type(op)](_work_out(left, names), _work_out(right, names))
            return result
    raise KeyError(type(tree).__name__)


class _Namer(ast.NodeTransformer):
    """Puts names for numbers that earlier steps gave; of several with the same result, the newest that nothing has used yet."""

    def __init__(self, given: set[Number]) -> None:
        self.given, self.results = given, dict[Number, list[str]]()
        self._used: set[str] = set()

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        names = self.results.get(node.value, []) if isinstance(node.value, int | float) else []
        unused = [name for name in names if name not in self._used]
        # A number that the question has too is an earlier result only where nothing has used that one yet.
        if not names or (not unused and node.value in self.given):
            return node
        name = (unused or names)[-1]
        self._used.add(name)
        return ast.Name(name, ast.Load())


def _numbers(tree: ast.expr) -> list[Number]:
    return [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, int | float)]


def _given(question: str) -> set[Number]:
    """The numbers of the question, in digits and in words."""
    words = _WORD.findall(question.lower())
    return {_value(text) for text in _NUMBER.findall(question)} | {_SPELLED_VALUES[w] for w in words if w in _SPELLED_VALUES}


def _known(number: Number, given: set[Number]) -> bool:
    return number in given or number in _CUSTOMARY or (isinstance(number, float) and number < 20)  # 0.2, as of 20 %


def _name(worked: str, mark: re.Match[str], taken: set[str]) -> str:
    """After what the number counts, and of whom: two telling words after it in its clause, else one and one before it."""
    after = _telling(_CLAUSE.split(worked[mark.end() :], maxsplit=1)[0])[:2]
    before = [word for word in _telling(_SENTENCE.split(worked[: mark.start()])[-1]) if word not in after]
    words = after if len(after) == 2 else [*before[: 2 - len(after)], *after]
    others = ([word, *after[:1]] for word in before)
    names = [name for name in map(_joined, [words, *others]) if name] or [f"step_{len(taken) + 1}"]
    numbered = (f"{names[0]}_{number}" for number in range(2, 2 + len(taken)))
    return next(name for name in (*names, *numbered) if name not in taken)


def _joined(words: Sequence[str]) -> str:
    return "_".join(words)[:MAX_NAME].rstrip("_")


def _telling(text: str) -> list[str]:
    words = _WORD.findall(_ENDING.sub("", text.lower()))
    return [word for word in words if word not in _EMPTY and len(word) > 1 and word.isascii()]
