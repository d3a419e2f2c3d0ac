"""The files that a worker with another file system must see: AgentFly, msgpack, and the module of the environment.

The module's top is a package folder or one file. A neighbour that it imports must be named in the pool's `visible`.
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
    """`target` and `options` build an instance. `paths` must be readable, `imports` go to the front of the import path.

    `packages` are folders of packages that AgentFly needs. Their parents go to the end of the import path, so that an image's
    own copy wins; msgpack reads and writes the same bytes in pure Python if the image has another Python version.
    """

    target: str
    options: dict[str, Any]
    paths: tuple[str, ...]
    imports: tuple[str, ...]
    packages: tuple[str, ...]


def bundle_of(spec: Spec, visible: tuple[str, ...] = ()) -> Bundle:
    """Raises ConfigError if another process cannot import the environment, or a path of `visible` does not exist."""
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
        first = module.partition(".")[0]
        if first != "agentfly" and first not in sys.stdlib_module_names:
            top = _top_of(first)
            paths.append(top)
            imports.append(os.path.dirname(top))
    for path in visible:
        path = os.path.abspath(os.path.expanduser(path))
        if not os.path.exists(path):
            raise ConfigError(f"visible names {path}, which does not exist")
        paths.append(path)
        imports.append(path if os.path.isdir(path) else os.path.dirname(path))
    packages = (_top_of("msgpack"),)
    return Bundle(target, options, tuple(dict.fromkeys(paths)), tuple(dict.fromkeys(imports)), packages)


def _top_of(first: str) -> str:
    """The folder of a package, or the file of a module."""
    module = importlib.util.find_spec(first)
    if module is not None and module.submodule_search_locations:
        return os.path.abspath(next(iter(module.submodule_search_locations)))
    if module is not None and module.origin and os.path.isfile(module.origin):
        return os.path.abspath(module.origin)
    raise ConfigError(f"the file of the module {first!r} cannot be found: put it into a file")


def hello_of(spec: Spec, bundle: Bundle, number: int) -> dict[str, Any]:
    """The hello to a worker that `worker_main.become_worker` reads."""
    named = {name: os.environ[name] for name in spec.pass_env if name in os.environ}
    return {
        "path": list(bundle.imports),
        "target": bundle.target,
        "options": bundle.options,
        "per_process": spec.per_process,
        "environment": {**named, "AGENTFLY_WORKER": str(number)},
    }
