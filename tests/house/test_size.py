"""Rooms, files and functions keep their limits of lines, and folders their limit of modules."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from tests.house import rooms
from tests.house.reading import FILES, ROOT, SRC, inside, lines_of_code, module_name, room_of, tree_of

Functions = ast.FunctionDef | ast.AsyncFunctionDef


def over(sizes: Mapping[str, int], limit: int, allowed: Mapping[str, int]) -> list[str]:
    """What is larger than the limit, or than its own row; and rows that nothing needs any more."""
    large = [f"{name} has {size} lines" for name, size in sizes.items() if size > allowed.get(name, limit)]
    return large + [f"{name} needs no row: remove it" for name in allowed if sizes.get(name, 0) <= limit]


def sizes_of_functions(path: Path, tree: ast.AST) -> dict[str, int]:
    functions = (node for node in ast.walk(tree) if isinstance(node, Functions))
    return {f"{inside(path)}:{node.name}": (node.end_lineno or node.lineno) - node.lineno + 1 for node in functions}


def prose_of(docstring: str) -> int:
    """Lines of a docstring. Drawings, tables and lists do not count."""
    return sum(bool(line.strip()) and not line.startswith((" ", "|", "-")) for line in docstring.splitlines())


def rooms_over_their_limit(sizes: Mapping[str, int]) -> list[str]:
    return [f"{room} has {size} lines of code" for room, size in sizes.items() if size > rooms.ROOMS[room].limit]


def sizes_of_rooms() -> Counter[str]:
    sizes: Counter[str] = Counter()
    for path in FILES:
        sizes[room_of(path)] += lines_of_code(path)
    return sizes


def test_every_room_keeps_its_limit_of_lines() -> None:
    assert not rooms_over_their_limit(sizes_of_rooms()), "remove something, or say in the commit what the room gets them for"


def test_a_room_over_its_limit_is_found() -> None:
    assert rooms_over_their_limit({"types": rooms.ROOMS["types"].limit + 1}) == [
        f"types has {rooms.ROOMS['types'].limit + 1} lines of code"
    ]


def test_files_keep_their_limit_of_lines() -> None:
    sizes = {inside(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert not over(sizes, rooms.MAX_LINES_OF_A_FILE, rooms.LONG_FILES)


def test_functions_keep_their_limit_of_lines() -> None:
    sizes: dict[str, int] = {}
    for path in FILES:
        for name, size in sizes_of_functions(path, tree_of(path)).items():
            sizes[name] = max(size, sizes.get(name, 0))
    assert not over(sizes, rooms.MAX_LINES_OF_A_FUNCTION, rooms.LONG_FUNCTIONS)


def test_a_long_function_and_an_idle_row_are_found() -> None:
    sizes = sizes_of_functions(SRC / "types.py", ast.parse("def long():\n" + "    x = 1\n" * 900))
    assert over(sizes, 80, {}) == ["types.py:long has 901 lines"]
    assert over(sizes, 80, {"types.py:long": 901}) == []
    assert over({"types.py:short": 3}, 80, {"types.py:short": 90}) == ["types.py:short needs no row: remove it"]


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES} - {SRC}), ids=lambda path: path.name)
def test_a_folder_keeps_its_limit_of_modules(folder: Path) -> None:
    assert len(list(folder.glob("*.py"))) <= rooms.MAX_FILES_OF_A_FOLDER


def without_a_docstring(docstrings: Iterable[tuple[str, str | None]], size: Callable[[str], int] = prose_of) -> list[str]:
    """Modules that do not say what they are for, or take too long."""
    return [name for name, text in docstrings if not text or size(text) > rooms.MAX_DOCSTRING_OF_A_MODULE]


def test_every_module_says_what_it_is_for_in_a_few_lines() -> None:
    assert not without_a_docstring((module_name(path), ast.get_docstring(tree_of(path))) for path in FILES)


def test_a_missing_and_a_long_docstring_are_found() -> None:
    drawing = "What it is for.\n\n" + "    drawn\n" * 40
    assert without_a_docstring([("a", None), ("b", "word\n" * 43), ("c", drawing)]) == ["a", "b"]


def count_any(text: str) -> int:
    return len(re.findall(r": Any\b", text))


def test_values_without_a_type_become_fewer() -> None:
    assert sum(count_any(path.read_text(encoding="utf-8")) for path in FILES) <= rooms.MAX_ANY


def test_values_without_a_type_are_counted() -> None:
    assert count_any("def f(x: Any, y: int = 1, z: Anything) -> None: ...") == 1


def test_the_script_of_figures_counts_the_lines_that_the_limits_count(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["house_figures.py"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    runpy.run_path(str(ROOT / "scripts" / "house_figures.py"), run_name="__main__")
    assert f" / {sum(sizes_of_rooms().values()):,} |" in capsys.readouterr().out
