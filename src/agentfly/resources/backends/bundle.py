"""What a place with a file system of its own must see of ours: a spec in, paths and import words out.

That is AgentFly's own package and the top of the module (a package's folder, or one file) that the environment is in, nothing
beside it: a neighbour that it imports must be named in the pool's `visible`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ..spec import Spec, importable

PACKAGE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Bundle:
    """`target` and `options` build an instance; `paths` must be readable there, `imports` go in front of its import path."""

    target: str
    options: dict[str, Any]
    paths: tuple[str, ...]
    imports: tuple[str, ...]


def bundle_of(spec: Spec, visible: tuple[str, ...] = ()) -> Bundle:
    target, options = importable(spec)
    paths, imports = [str(PACKAGE)], [str(PACKAGE.parent)]
    inner = options.get("target") if hasattr(spec.make, "__agentfly_target__") else None
    for word in (target, inner):
        if not isinstance(word, str):
            continue
        module = word.rpartition(":")[0]
        if module.endswith(".py"):
            paths.append(os.path.abspath(module))
            continue
        top = _top_of(module, spec.name)
        if top is not None:
            paths.append(top)
            imports.append(os.path.dirname(top))
    for path in visible:
        path = os.path.abspath(os.path.expanduser(path))
        if not os.path.exists(path):
            raise ConfigError(f"environment {spec.name!r}: visible names {path}, which is not there")
        paths.append(path)
        imports.append(path if os.path.isdir(path) else os.path.dirname(path))
    return Bundle(target, options, tuple(dict.fromkeys(paths)), tuple(dict.fromkeys(imports)))


def _top_of(module: str, name: str) -> str | None:
    """The folder or file that the first part of a module's name stands for; None for AgentFly and Python's own."""
    first = module.partition(".")[0]
    if first == "agentfly" or first in sys.stdlib_module_names:
        return None
    found = importlib.util.find_spec(first)
    if found is not None and found.submodule_search_locations:
        return os.path.abspath(next(iter(found.submodule_search_locations)))
    if found is not None and found.origin and os.path.isfile(found.origin):
        return os.path.abspath(found.origin)
    raise ConfigError(f"environment {name!r}: where the module {first!r} lies cannot be found: put it into a file")


def environment_of(spec: Spec, number: int) -> dict[str, str]:
    """The variables that a worker gets beside those of its place: what the spec names, and its own number."""
    named = {name: os.environ[name] for name in spec.pass_env if name in os.environ}
    return {**named, "AGENTFLY_WORKER": str(number)}


def hello_of(spec: Spec, bundle: Bundle, number: int) -> dict[str, Any]:
    """The first frame to a worker that reads it with `inside`."""
    return {
        "path": list(bundle.imports),
        "target": bundle.target,
        "options": bundle.options,
        "per_process": spec.per_process,
        "environment": environment_of(spec, number),
    }
