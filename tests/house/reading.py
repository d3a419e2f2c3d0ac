"""Reads the package: its files, their imports (late, type-only, and by a name in a string), and their lines of code."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SRC = ROOT / "src" / "agentfly"
FILES = sorted(SRC.rglob("*.py"))
TARGET = re.compile(r"agentfly(\.\w+)+(:\w+)?")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def inside(path: Path) -> str:
    return path.relative_to(SRC).as_posix()


def room_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(("agentfly", *(parts[:-1] if parts[-1] == "__init__" else parts)))


MODULES = {module_name(path): path for path in FILES}


def imports_of(tree: ast.AST, path: Path) -> Iterator[tuple[str, int]]:
    """Absolute names of what a file imports, with lines; a text `agentfly.a:b` counts as an import of `agentfly.a`."""
    package = ["agentfly", *path.relative_to(SRC).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and TARGET.fullmatch(node.value):
            name = node.value.partition(":")[0]
            if name in MODULES:
                yield name, node.lineno


def module_of(name: str) -> str | None:
    """The module of the package that an imported name belongs to."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


@cache
@cache
def import_graph() -> dict[str, set[str]]:
    """Every module and the modules of the package that it imports."""
    graph = {}
    for name, path in MODULES.items():
        targets = {module_of(imported) for imported, _ in imports_of(tree_of(path), path)}
        graph[name] = {target for target in targets if target is not None} - {name}
    return graph


def circle_of(graph: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """The nodes that form circles, and their targets among them: nodes without a target or without a source are removed."""
    rest = {name: set(targets) - {name} for name, targets in graph.items()}
    while True:
        used = {target for targets in rest.values() for target in targets}
        inner = {name: {target for target in targets if target in rest} for name, targets in rest.items() if name in used}
        inner = {name: targets for name, targets in inner.items() if targets}
        if inner == rest:
            return rest
        rest = inner


def folder_graphs(graph: Mapping[str, Iterable[str]]) -> dict[str, dict[str, set[str]]]:
    """For every folder, the arrows between its own modules and folders."""
    folders: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for module, targets in graph.items():
        for target in targets:
            one, other = module.split("."), target.split(".")
            same = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
            if same is not None:  # otherwise one holds the other
                folder = folders[".".join(one[:same])]
                folder[".".join(one[: same + 1])].add(".".join(other[: same + 1]))
    return folders


def longest_chain(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """The longest path of imports, from a module down to one that imports nothing of the package."""

    @cache
    def below(name: str) -> list[str]:
        return [name, *max(map(below, graph[name]), key=len, default=[])]

    return max(map(below, graph), key=len)


@cache
def lines_of_code(path: Path) -> int:
    """Lines that hold code: blank lines, comments and docstrings do not count."""
    docstrings: set[int] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type not in layout:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)
