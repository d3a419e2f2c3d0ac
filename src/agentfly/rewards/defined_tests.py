"""Tests that are written as functions and classes for pytest or unittest, which define tests and run none.

Without a call such a text passes for every solution. `called` adds the calls, in the order of the text, as statements that any
session runs: an assert that fails, or any other exception, ends the text.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

_DEFINES = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Pass)


def called(tests: Sequence[str]) -> list[str]:
    """Returns the texts, with calls of the test functions and classes that nothing refers to.

    Raises ValueError for a test that only pytest or unittest can run, and if nothing in all texts would run.
    """
    trees = [ast.parse(test) for test in tests]
    used = {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}
    classes = {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
    made: list[str] = []
    for number, (test, tree) in enumerate(zip(tests, trees, strict=True)):
        calls: list[str] = []
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name not in used:
                try:
                    calls += _calls_of(node, classes)
                except ValueError as error:
                    raise ValueError(f"tests[{number}]: {error}") from None
        made.append("\n".join([test, *calls]))
    if all(isinstance(node, _DEFINES) or _is_idle(node) for test in made for node in ast.parse(test).body):
        raise ValueError("the field 'tests' defines functions or classes and calls none, so every solution would pass")
    return made


def _calls_of(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[str]:
    if isinstance(node, ast.ClassDef):
        methods = _methods(node, classes)
        names = [name for name in methods if name.startswith("test")]
        if not names:
            return
        unittest = any(_last(base).endswith("TestCase") for base in _bases(node, classes))
        before, after = ("setUpClass", "tearDownClass") if unittest else ("setup_class", "teardown_class")
        yield from (f"{node.name}.{before}()" for _ in range(unittest or before in methods))
        for name in names:
            if unittest:
                yield f"{node.name}({name!r}).debug()"
                continue
            _refuse_parameters(methods[name], 1)
            yield f"_case = {node.name}()"
            yield from (f"_case.{one}()" for one in ("setup_method", name, "teardown_method") if one in methods)
        yield from (f"{node.name}.{after}()" for _ in range(unittest or after in methods))
    elif node.name.startswith("test"):
        _refuse_parameters(node, 0)
        yield f"{node.name}()"


def _refuse_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef, own: int) -> None:
    """Raises ValueError for what pytest calls in another way than `name()`."""
    if isinstance(node, ast.AsyncFunctionDef):
        raise ValueError(f"{node.name} is asynchronous: call it with asyncio.run")
    asked = [*node.args.posonlyargs, *node.args.args][own:]
    if len(asked) > len(node.args.defaults):
        raise ValueError(f"{node.name} takes {asked[0].arg!r}: fixtures and parameters of pytest are not supported")


def _bases(node: ast.ClassDef, classes: dict[str, ast.ClassDef], depth: int = 0) -> list[ast.expr]:
    """Returns the bases of a class, and those of its bases that the texts define."""
    inner = [classes[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in classes and depth < 20]
    return [*node.bases, *(far for each in inner for far in _bases(each, classes, depth + 1))]


def _methods(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    above = [classes[base.id] for base in _bases(node, classes) if isinstance(base, ast.Name) and base.id in classes]
    return {
        each.name: each
        for kind in [*reversed(above), node]
        for each in kind.body
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def _is_idle(node: ast.stmt) -> bool:
    """Whether a statement is a text, a constant, or what a file does if it is the program."""
    if isinstance(node, ast.If):
        return "__name__" in {each.id for each in ast.walk(node.test) if isinstance(each, ast.Name)}
    return isinstance(node, ast.Expr | ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant)


def _last(node: ast.expr) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))
