"""Names of tools, rewards, environments and other parts, and the objects they stand for.

`resolve` looks a name up in the objects registered in this process, then in the table `builtin_names.toml`, then in the entry
points of installed packages (group "agentfly.<kind>"). The table holds strings, so a module is imported only when a name in
it is used. In `gym:ID`, the table has a function for the family `gym`, which makes the member. `"module:attribute"` and
`"path/to/file.py:attribute"` are accepted wherever a name is; a module of the current folder comes first.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import tomllib
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from typing import Any

from .errors import ConfigError, MissingExtra, UnknownName


def _rows(name: str) -> dict[str, Any]:
    return tomllib.loads((files(__package__) / name).read_text(encoding="utf-8"))


BUILTIN: dict[str, dict[str, str]] = _rows("builtin_names.toml")
"""The built-in names by kind: the order of a kind is that of the documentation."""
EXTRAS: dict[str, str] = {package: extra for extra, row in _rows("extras.toml").items() for package in row.get("packages", ())}
"""The optional packages, and the extra of agentfly that installs each of them."""

OBJECT = "python:"
"""The beginning of the text that stands in a config for an object that no module holds."""

USER_FILE = "agentfly_user_"
"""The beginning of the module names of files that are loaded by their path."""

_registered: dict[str, dict[str, Any]] = {}


def register(kind: str, name: str, thing: object) -> None:
    """Register an object under a name. A later registration replaces an earlier one, so a notebook cell can be run twice."""
    _registered.setdefault(kind, {})[name] = thing


def is_registered(kind: str, name: str) -> bool:
    """Whether `register` was called with this name."""
    return name in _registered.get(kind, {})


def names(kind: str) -> list[str]:
    """All names of a kind, sorted. Imports nothing."""
    names = set(_registered.get(kind, ())) | set(BUILTIN.get(kind, ()))
    names |= {point.name for point in entry_points(group=f"agentfly.{kind}")}
    return sorted(names)


def resolve(kind: str, name: str) -> Any:
    """The object that a name stands for.

    Raises UnknownName, which suggests similar names, or MissingExtra, which gives the command that installs the package.
    """
    if name in _registered.get(kind, {}):
        return _registered[kind][name]
    if name.startswith(OBJECT):
        raise ConfigError(
            f"{name.removeprefix(OBJECT)!r} of {kind} was a Python object that no module holds: give it again from Python, or "
            f"move it to a file and name it as file.py:NAME"
        )
    if name in BUILTIN.get(kind, {}):
        return _load(BUILTIN[kind][name], name)
    for point in entry_points(group=f"agentfly.{kind}"):
        if point.name == name:
            return _load(point.value, name)
    family, _, member = name.partition(":")
    if (made_by := BUILTIN.get(f"{kind}_families", {}).get(family)) is not None:
        return _load(made_by, name)(member)
    if ":" in name:
        _see_current_folder(name.rpartition(":")[0])
        return _load(name, name)
    near = difflib.get_close_matches(name, names(kind), n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(repr(n) for n in near)}?" if near else f"known: {', '.join(names(kind)) or 'none'}."
    raise UnknownName(f"no {kind.removesuffix('s')} is called {name!r}; {hint}")


def reference_of(thing: object) -> str:
    """Returns what `resolve` finds a class or function by: "module:NAME" or "file.py:NAME"; OBJECT and its name if nothing."""
    module, name = sys.modules.get(getattr(thing, "__module__", "")), getattr(thing, "__qualname__", type(thing).__name__)
    # A script must not run again to find what it holds.
    if module is None or module.__name__ == "__main__" or getattr(module, name, None) is not thing:
        return f"{OBJECT}{name}"
    return f"{module.__file__ if module.__name__.startswith(USER_FILE) else module.__name__}:{name}"


def builtin(kind: str, name: str, module: str) -> Any:
    """The built-in object of a name, for the `__getattr__` of a module. Raises AttributeError for other names."""
    if name not in BUILTIN[kind]:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return _load(BUILTIN[kind][name], name)


def _load(target: str, name: str) -> Any:
    module_name, _, attribute = target.rpartition(":")
    module = _load_file(Path(module_name)) if module_name.endswith(".py") else _import(module_name, name)
    try:
        thing: object = module
        for part in attribute.split("."):
            thing = getattr(thing, part)
        return thing
    except AttributeError as error:
        raise UnknownName(f"{target!r}: {module_name} has no {attribute!r}") from error


def _see_current_folder(module_name: str) -> None:
    """Let a module of the current folder be imported, as `python -m` does; the `agentfly` command does not add that folder."""
    first, here = module_name.partition(".")[0], Path.cwd()
    if first in sys.modules or not ((here / f"{first}.py").is_file() or (here / first).is_dir()):
        return
    if str(here) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(here))
        importlib.invalidate_caches()


def _import(module_name: str, name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in EXTRAS:
            raise missing_extra(repr(name), missing) from error
        raise ConfigError(f"{name!r}: cannot import {module_name}: {error}") from error


def missing_extra(what: str, package: str) -> MissingExtra:
    """The error for an optional package that is not installed, with the command that installs it."""
    return MissingExtra(f"{what} needs the package {package!r}: pip install 'agentfly[{EXTRAS[package]}]'")


def _load_file(path: Path) -> Any:
    path = path.resolve()
    if not path.is_file():
        raise ConfigError(f"no such Python file: {path}")
    key = f"{USER_FILE}{path.stem}_{abs(hash(str(path))):x}"
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[key]
        raise ConfigError(f"{path.name} failed while it was imported: {type(error).__name__}: {error}") from error
    return module
