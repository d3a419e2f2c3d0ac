"""The recipes by name, and the files of a new project.

A recipe is a config file: `agentfly train quickstart` runs `quickstart.toml`. The wheel holds the recipes in this folder; in a
clone they are in `recipes/` of the root. A recipe begins with a comment, whose first sentence says what the run does.
"""

from __future__ import annotations

import difflib
import re
import runpy
import shutil
from itertools import takewhile
from pathlib import Path

from ..errors import ConfigError

HERE = Path(__file__).parent
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


def recipes() -> dict[str, Path]:
    """Every recipe, by name; the first to try comes first."""
    paths = {path.stem: path for path in HERE.glob("*.toml")}
    if not paths:  # a clone: recipes/ stands beside src/
        paths = {path.stem: path for path in (HERE.parents[2] / "recipes").glob("*.toml")}
    return dict(sorted(paths.items(), key=lambda item: (item[0] != "quickstart", item[0])))


def describe_recipe(path: Path) -> str:
    """The first sentence of a recipe, which says what the run does."""
    lines = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    return " ".join(line.removeprefix("#").strip() for line in lines).split(". ")[0].removesuffix(".") + "."


def find_config(name: str | Path) -> Path:
    """The config file of a path, a run's folder or a recipe's name, or of `recipes/NAME.toml` where there is no such folder.

    A file at that path comes first. Raises ConfigError.
    """
    path = Path(name)
    if path.is_file():
        return path
    if (path / "config.toml").is_file():
        return path / "config.toml"
    paths = recipes()
    by_name = len(path.parts) == 1 or path.parts[:-1] == ("recipes",)
    wanted = path.name.removesuffix(".toml")
    if by_name and wanted in paths:
        return paths[wanted]
    of = path.resolve().parent
    if of.name == "checkpoints" and (of.parent / "config.toml").is_file():
        raise ConfigError(f"{path} is a checkpoint: name its run, {path.parent.parent}, and the checkpoint as a model")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder, neither a config file nor a run")
    if str(name).startswith("openai:"):
        raise ConfigError(f"{name} is a model: name a config file, a run or a recipe, and the model by --model or agent.model=")
    near = difflib.get_close_matches(wanted, paths, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "`agentfly recipes` lists the recipes."
    raise ConfigError(f"no such config file: {path}; {hint}")


def start_project(folder: str | Path) -> list[Path]:
    """Write a small project that trains offline: a tool, a reward, data, a recipe and a README. Returns the files.

    The folder must be absent or empty; its name becomes the name of the run. Raises ConfigError.
    """
    folder = Path(folder)
    name = folder.resolve().name
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot be the name of a project: use letters, digits, '.', '_', '+' and '-'")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder; choose another name")
    try:
        shutil.copytree(HERE / "project", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (folder / "README.md", folder / "train.toml"):
            path.write_text(path.read_text(encoding="utf-8").replace("my-task", name), encoding="utf-8")
        runpy.run_path(str(folder / "make_data.py"), run_name="__main__")
    except OSError as error:
        raise ConfigError(f"the project {folder} cannot be written: {error.strerror or error}") from error
    return sorted(path for path in folder.iterdir() if path.is_file())
