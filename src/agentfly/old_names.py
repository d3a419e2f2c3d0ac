"""Public names of version 0.1 that stand in another module now: `old_names.toml` says where, and their old module finds them.

Such a module says `__getattr__ = old_names.of(__name__)`, but not to type checkers, which ask for the new place. The table is
no Python, like that of `plugins`: a name is a text until it is used, so the arrows between rooms stay as they are.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from importlib import import_module
from importlib.resources import files
from typing import Any


def of(module: str) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a module that names have left."""

    def find(name: str) -> Any:
        table = tomllib.loads((files(__package__) / "old_names.toml").read_text(encoding="utf-8"))
        if name not in table[module]:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(table[module][name]), name)

    return find
