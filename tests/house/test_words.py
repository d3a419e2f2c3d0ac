"""One word, one thing: names of classes, docstrings of public names, and exceptions that are not swallowed."""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tests.house.reading import FILES, SRC, inside, tree_of
from tests.house.rooms import SHARED_CLASS_NAMES


def shared_class_names(trees: Iterable[tuple[Path, ast.AST]]) -> set[str]:
    """Names that classes of two or more modules have."""
    places: dict[str, set[Path]] = defaultdict(set)
    for path, tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].add(path)
    return {name for name, paths in places.items() if len(paths) > 1}


def test_a_class_name_stands_for_one_class() -> None:
    shared = shared_class_names((path, tree_of(path)) for path in FILES)
    assert shared - SHARED_CLASS_NAMES == set(), "take another name: these stand in two modules"
    assert SHARED_CLASS_NAMES - shared == set(), "these names are unique now: remove them from the list"


def test_a_shared_class_name_is_found() -> None:
    tree = ast.parse("class Plan: ...")
    assert shared_class_names([(SRC / "types.py", tree), (SRC / "errors.py", tree)]) == {"Plan"}
    assert shared_class_names([(SRC / "types.py", tree)]) == set()


def public_parts(thing: object) -> list[str]:
    """The public methods and properties that a class defines itself."""
    return [
        name
        for name, value in vars(thing).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod))
    ]


def without_docstrings(names: Iterable[tuple[str, object]]) -> list[str]:
    missing = []
    for name, thing in names:
        if not (inspect.isclass(thing) or inspect.isfunction(thing)):
            continue
        if not thing.__doc__ or thing.__doc__.startswith(f"{name}("):  # a dataclass without one gets its signature
            missing.append(name)
        if inspect.isclass(thing):
            missing += [f"{name}.{part}" for part in public_parts(thing) if not inspect.getdoc(getattr(thing, part))]
    return missing


def test_every_public_name_exists_and_has_a_docstring() -> None:
    import agentfly

    assert not without_docstrings((name, getattr(agentfly, name)) for name in agentfly.__all__)


def test_a_public_name_without_a_docstring_is_found() -> None:
    class Plain:
        def method(self) -> None: ...

    assert without_docstrings([("Plain", Plain)]) == ["Plain", "Plain.method"]


def swallowed(path: Path, tree: ast.AST) -> list[str]:
    """Handlers of every exception whose body does nothing."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and all(isinstance(part, ast.Pass) for part in node.body):
            catches_all = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            lines += [f"{inside(path)}:{node.lineno}"] * catches_all
    return lines


def test_no_exception_is_swallowed() -> None:
    assert not [line for path in FILES for line in swallowed(path, tree_of(path))]


def test_a_swallowed_exception_is_found() -> None:
    assert swallowed(SRC / "types.py", ast.parse("try:\n    f()\nexcept Exception:\n    pass")) == ["types.py:3"]
    assert not swallowed(SRC / "types.py", ast.parse("try:\n    f()\nexcept KeyError:\n    pass"))
