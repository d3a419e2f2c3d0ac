"""Arrows point one way and in no circle, between rooms, folders and files; heavy packages stay in their rooms."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.house.reading import (
    FILES,
    SRC,
    circle_of,
    folder_graphs,
    import_graph,
    imports_of,
    inside,
    longest_chain,
    room_of,
    tree_of,
)
from tests.house.rooms import ALSO, FOLDERS_IN_A_CIRCLE, HEAVY, IMPORT_BY_NAME, LIGHT_ENOUGH, MAX_IMPORT_CHAIN, ROOMS


def wrong_arrows(path: Path, tree: ast.AST) -> list[str]:
    """Imports of a room that does not lie below, also in functions, for types only, and by a module's name in a text."""
    room = room_of(path)
    wrong = []
    for name, line in imports_of(tree, path):
        parts = name.split(".")
        target = parts[1] if parts[0] == "agentfly" and len(parts) > 1 else room
        if target in ROOMS and target != room and (room, target) not in ALSO and ROOMS[target].rank >= ROOMS[room].rank:
            wrong.append(f"{inside(path)}:{line}: {room} imports {name}")
    return wrong


def names_not_written_out(path: Path, tree: ast.AST) -> list[str]:
    """Calls of `import_module` whose name is no text, so that no test can follow the arrow."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module")]
    hidden = [call for call in calls if not isinstance(call.args[0], ast.Constant)]
    return [f"{inside(path)}:{call.lineno}" for call in hidden] if inside(path) not in IMPORT_BY_NAME else []


def misplaced_packages(path: Path, tree: ast.AST) -> list[str]:
    imported = ((name.partition(".")[0], line) for name, line in imports_of(tree, path))
    return [f"{inside(path)}:{at} imports {name}" for name, at in imported if not inside(path).startswith(HEAVY.get(name, ""))]


def test_every_module_belongs_to_a_room_and_every_room_exists() -> None:
    assert {room_of(path) for path in FILES} == set(ROOMS), "a room has no row in tests/house/rooms.py, or a row no room"


def test_arrows_point_one_way() -> None:
    wrong = [fault for path in FILES if room_of(path) != "__init__" for fault in wrong_arrows(path, tree_of(path))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "line",
    [
        "from agentfly.training import loop",
        "def f():\n    from agentfly.training.loop import Trainer",
        "import importlib\nimportlib.import_module('agentfly.training.loop')",
        "TARGET = 'agentfly.training.loop:Trainer'",
    ],
)
def test_an_arrow_upwards_is_found_however_it_is_written(line: str) -> None:
    assert wrong_arrows(SRC / "types.py", ast.parse(line))


def test_the_names_of_imported_modules_can_be_read() -> None:
    assert not [fault for path in FILES for fault in names_not_written_out(path, tree_of(path))]


def test_an_import_by_a_computed_name_is_found() -> None:
    assert names_not_written_out(
        SRC / "types.py", ast.parse("from importlib import import_module\nimport_module('agentfly.' + x)")
    )


def test_heavy_packages_stay_in_their_rooms() -> None:
    wrong = [fault for path in FILES for fault in misplaced_packages(path, tree_of(path))]
    assert not wrong, "\n".join(wrong)


def test_a_heavy_package_in_another_room_is_found() -> None:
    assert misplaced_packages(SRC / "types.py", ast.parse("def f():\n    import torch.nn"))
    assert not misplaced_packages(SRC / "learn" / "learner.py", ast.parse("import torch.nn"))


def loaded_by(modules: list[str], more: str = "") -> set[str]:
    """The heavy packages that a new process has loaded after these imports."""
    code = f"import sys, importlib; [importlib.import_module(name) for name in {modules!r}]; {more}\nprint(*set(sys.modules))"
    return set(subprocess.check_output([sys.executable, "-c", code], text=True).split()) & set(HEAVY)


def test_importing_the_package_and_its_command_line_loads_nothing_heavy() -> None:
    assert loaded_by(["agentfly", "agentfly.cli"]) == set()


def test_importing_all_rooms_loads_hardly_anything_heavy() -> None:
    assert loaded_by([f"agentfly.{room}" for room in ROOMS if not room.startswith("__")]) <= LIGHT_ENOUGH
    assert "sqlite3" not in HEAVY
    assert loaded_by(["agentfly"], "import numpy") == {"numpy"}, "the test would see what is loaded"


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle_of(import_graph()) == {}


def circles_of_folders(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Modules and folders of one folder that import each other, by the name of the folder."""
    graphs = {name.removeprefix("agentfly."): arrows for name, arrows in folder_graphs(graph).items() if name != "agentfly"}
    circles = {name: {node.rpartition(".")[2] for node in circle_of(arrows)} for name, arrows in graphs.items()}
    return {name: circle for name, circle in circles.items() if circle}


def test_folders_import_each_other_in_no_circle_but_those_that_are_listed() -> None:
    assert circles_of_folders(import_graph()) == FOLDERS_IN_A_CIRCLE


def test_circles_are_found() -> None:
    graph = {**import_graph(), "agentfly.errors": {"agentfly.types"}}
    assert "agentfly.types" in circle_of(graph)
    graph = {**import_graph(), "agentfly.runs.bodies.codec": {"agentfly.runs.store"}}
    assert circles_of_folders(graph)["runs"] >= {"bodies", "store"}


def test_the_longest_chain_of_imports_is_no_longer_than_said() -> None:
    chain = longest_chain(import_graph())
    assert len(chain) == MAX_IMPORT_CHAIN, " > ".join(chain)


def test_a_longer_chain_is_found() -> None:
    assert longest_chain({"a": {"b"}, "b": {"c"}, "c": set()}) == ["a", "b", "c"]
