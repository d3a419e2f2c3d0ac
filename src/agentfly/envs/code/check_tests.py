"""`agentfly check-tests DATA`: which rows cannot be passed, and which are paid for nothing.

Each row's reward scores the row's own solution (or answer) and a library of standing cheats, such as a constant, nothing or a
copy of the question. Tests are also read: `lint` names asserts that hold for an empty result, or for none.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...data import load_tasks, row_of
from ...errors import AgentFlyError, DataError
from ...rewards import Reward, as_reward
from ...rewards.answers import alternatives
from ...rewards.code_execution import read_tests
from ...types import Task, Trajectory
from ..jsonl import read_lines
from .isolated.plan import asked_names
from .loaders import load_gsm8k, load_humaneval, load_mbpp

SHAPES = {"test_list": load_mbpp, "canonical_solution": load_humaneval, "worked": load_gsm8k}
_ALWAYS = "__eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = lambda self, other: True"
_BROAD = ("Exception", "BaseException", "AssertionError")
_BODIES = {
    "returns nothing": "pass", "returns 0": "return 0", "returns True": "return True", "returns ''": "return ''",
    "returns []": "return []", "returns its argument": "return a[0] if a else None", "raises": "raise ValueError('no')",
    "exits": "import os; os._exit(0)", "returns an object that equals everything": "return _Always()",
    "empties its argument": "[x.clear() for x in a if hasattr(x, 'clear')]; return a[0] if a else []",
    "returns an empty array": "import numpy; return numpy.zeros((0, 3))",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RowReport:
    """What is wrong with one row. `own` is what its solution earns, or None if the row has none."""

    row: str
    own: float | None = None
    free: dict[str, float] = field(default_factory=dict)
    lint: tuple[str, ...] = ()
    error: str = ""

    @property
    def lines(self) -> list[str]:
        """One sentence per problem; empty if there is none."""
        problems = [f"cannot be scored: {self.error}"] if self.error else []
        if self.own is not None and self.own <= 0:
            problems.append(f"cannot be passed: its own solution earns {self.own:g}")
        if self.free:
            problems.append("is paid for nothing: " + ", ".join(f"{name} ({value:g})" for name, value in self.free.items()))
        return [f"{self.row}: {text}" for text in (*problems, *self.lint)]

    @property
    def broken(self) -> bool:
        """Whether the row cannot be scored or passed, or is paid for nothing."""
        return bool(self.error or self.free or (self.own is not None and self.own <= 0))


def read_data(source: str, count: int | None = None) -> list[Task]:
    """The tasks of a data set, or of a file in the shape of MBPP, HumanEval or GSM8K (also gzipped)."""
    path = Path(source)
    if path.is_file() and path.suffix in (".jsonl", ".gz"):
        first: object = next(iter(read_lines(path)), (0, {}))[1]
        keys = set(first) if isinstance(first, dict) else set()
        if isinstance(first, dict) and "####" in str(first.get("answer", "")):
            keys.add("worked")
        for key, load in SHAPES.items():
            if key in keys:
                return load_tasks(load(path), count=count)
    if path.suffix == ".gz":
        raise DataError(f"{source}: a gzipped file must have the shape of MBPP, HumanEval or GSM8K")
    return load_tasks(source, count=count)


def cheats_of(task: Task) -> dict[str, str]:
    """Predictions that solve nothing, by name."""
    question = next((message.content for message in reversed(task.messages) if message.role == "user"), "")
    if "tests" not in task.fields:
        wanted = alternatives(task.fields["answer"])[0]
        return {
            "an empty reply": "", "a full stop": ".", "an article": "the", "a copy of the question": question,
            "two answers": f"The answer is {wanted} or 1234567.",
            "a second guess": f"The answer is {wanted}. Second guess: 1234567.",
        }  # fmt: skip
    tests, _ = read_tests(task.fields["tests"])
    prelude = str(task.fields.get("prelude") or "")
    names = sorted(_asked(tests, prelude))
    made = {
        name: "\n".join([f"class _Always:\n    {_ALWAYS}", *(f"def {one}(*a, **k): {body}" for one in names)])
        for name, body in _BODIES.items()
    }
    made["classes without attributes"] = "\n".join(
        f"class {one}:\n    def __init__(self, *a, **k): pass\n    def __eq__(self, other): return True\n"
        "    def __getattr__(self, name): return lambda *a, **k: None" for one in names
    )  # fmt: skip
    return {"an empty reply": "", "a copy of the question": question, **{name: fenced(code) for name, code in made.items()}}


def _asked(tests: Sequence[str], prelude: str) -> set[str]:
    reads, sets = asked_names(list(tests))
    return {name for name in reads - sets - asked_names([prelude])[1] if not hasattr(builtins, name) and name.isidentifier()}


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def lint(tests: Sequence[str], prelude: str = "") -> list[str]:
    """Names asserts that hold for an empty result, or for none."""
    names = _asked(tests, prelude)
    problems: list[str] = []
    defined = {
        node.name for text in (prelude, *tests) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)
    }
    for number, test in enumerate(tests):
        tree = ast.parse(test)
        checks = (isinstance(node, ast.Assert | ast.Raise) or "assert" in _method(node) for node in ast.walk(tree))
        if not any(checks) and not any(_method(node) in defined for node in ast.walk(tree)):
            problems.append(f"test {number} asserts nothing")
        sized = any(_method(node) == "len" for node in ast.walk(tree)) or ".shape" in test
        bound = [
            (target.id, node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        ]
        results = {name for name, value in bound if _uses(value, names)}
        lists = {name for name, value in bound if isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp)}
        problems += [
            f"test {number} {text}" for node in ast.walk(tree) if (text := _empty(node, names, names | results, lists, sized))
        ]
    return problems


def _empty(node: ast.AST, names: set[str], results: set[str], lists: set[str], sized: bool) -> str:
    """Why an assert may hold for nothing, or an empty string."""
    match node:
        case ast.Assert(test=ast.Tuple(elts=[_, *_])):
            return "asserts a tuple, which is always true"
        case ast.Assert(test=ast.Constant(value=value)) if value:
            return "asserts a constant"
        case ast.Try(body=body, handlers=handlers):
            asserts = any(isinstance(part, ast.Assert) for one in body for part in ast.walk(one))
            broad = [one for one in handlers if one.type is None or ast.unparse(one.type) in _BROAD]
            if asserts and any(all(isinstance(line, ast.Pass | ast.Continue) for line in one.body) for one in broad):
                return "catches the failure of its own assert"
        case ast.For(iter=items) if not sized and _uses(items, results) and _method(items) not in ("range", "enumerate"):
            if any(isinstance(part, ast.Assert) for part in ast.walk(node)):
                return "holds for an empty result: it loops over the result without its length"
        case ast.Assert(
            test=ast.Call(args=[ast.GeneratorExp(generators=[loop, *_]) | ast.ListComp(generators=[loop, *_])]) as call
        ):
            if _method(call) == "all" and not sized and _uses(loop.iter, results):
                return "holds for an empty result: all() of nothing is true"
        case ast.Call(args=[left, right, *_]) if _method(node) in ("allclose", "isclose") and "math" not in ast.unparse(
            node.func
        ):
            if not sized and (_uses(left, results) or _uses(right, results)):
                return "holds for an empty array: allclose broadcasts shapes"
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
            if _uses(left, names) and ast.dump(left) == ast.dump(right):
                return "compares the solution with itself"
            calls = [part for part in ast.walk(left) if isinstance(part, ast.Call) and _method(part) in names]
            given = {argument.id for call in calls for argument in call.args if isinstance(argument, ast.Name)}
            later = {part.id for part in ast.walk(right) if isinstance(part, ast.Name)}
            if changed := sorted(given & later & lists):
                return f"computes what it expects from {changed[0]!r} after the solution may have changed it"
    return ""


def _method(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))


def _uses(node: ast.AST, names: set[str]) -> bool:
    return any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(node))


async def check_rows(
    tasks: Sequence[Task], reward: Reward | None = None, solution: str = "solution", workers: int = 4
) -> list[RowReport]:
    """Reports every row; those without a problem have no `lines`."""
    slots = asyncio.Semaphore(workers)

    async def one(index: int, task: Task) -> RowReport:
        async with slots:
            return await _check_row(task, row_of(task, index), reward or default_reward(task), solution)

    return list(await asyncio.gather(*(one(index, task) for index, task in enumerate(tasks))))


def default_reward(task: Task) -> Reward:
    """`unit_tests` for rows with tests, else `code_answer`."""
    return as_reward("unit_tests" if "tests" in task.fields else "code_answer")


async def _check_row(task: Task, name: str, reward: Reward, solution: str) -> RowReport:
    async def earns(prediction: str) -> float:
        return (await reward.score(Trajectory("check", task, prediction=prediction))).reward

    try:
        own = None
        if solution in task.fields:
            own = await earns(fenced(str(task.fields[solution])) if "tests" in task.fields else str(task.fields[solution]))
        elif "tests" not in task.fields and "answer" in task.fields:
            own = await earns(alternatives(task.fields["answer"])[0])
        paid = {cheat: await earns(text) for cheat, text in cheats_of(task).items()}
        tests = read_tests(task.fields["tests"])[0] if "tests" in task.fields else []
        problems = lint(tests, str(task.fields.get("prelude") or ""))
    except (AgentFlyError, ValueError, KeyError) as error:
        return RowReport(name, error=f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error))
    return RowReport(name, own, {cheat: value for cheat, value in paid.items() if value > 0}, tuple(problems))
