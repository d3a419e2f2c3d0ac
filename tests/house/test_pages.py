"""What the pages for contributors and pyproject.toml say of the code is so: paths, the version, and the extras exist."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any

import pytest

from tests.house.reading import ROOT, SRC

# A path in backquotes: `learn/samples.py`, `rollout/`, `tests/house/rooms.py`.
PATH = re.compile(r"`([a-z_]+(?:/[A-Za-z_.0-9]+)*(?:/|\.py|\.toml|\.md|\.txt))`")
WRITTEN_BY_A_COMMAND = {"site/"}


def missing_paths(text: str) -> list[str]:
    """Paths of a page that stand neither in the package nor in the repository. NAME stands for a new thing's name."""
    paths = {path for path in PATH.findall(text) if path not in WRITTEN_BY_A_COMMAND and "NAME" not in path}
    return sorted(path for path in paths if not any((base / path).exists() for base in (ROOT, SRC)))


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_the_paths_of_a_page_exist(page: str) -> None:
    assert missing_paths((ROOT / page).read_text(encoding="utf-8")) == []


def test_a_path_that_is_gone_is_found() -> None:
    assert missing_paths("in `learn/alchemy.py` and `learn/samples.py` of `learn/`") == ["learn/alchemy.py"]


PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = tomllib.loads((SRC / "extras.toml").read_text(encoding="utf-8"))


def test_the_version_is_stated_once_more_in_pyproject() -> None:
    import agentfly

    assert PYPROJECT["project"]["version"] == agentfly.__version__


def wrong_extras(extras: Mapping[str, Any], project: Mapping[str, Any]) -> list[str]:
    """Extras with a row in one of the two files only, and packages of a row that mypy asks types of."""
    untyped = {
        name for row in project["tool"]["mypy"]["overrides"] for name in row["module"] if row.get("ignore_missing_imports")
    }
    wrong = sorted(extras.keys() ^ project["project"]["optional-dependencies"].keys())
    return wrong + [name for row in extras.values() for name in row.get("packages", ()) if f"{name}.*" not in untyped]


def test_every_extra_has_one_row_that_mypy_knows() -> None:
    assert not wrong_extras(EXTRAS, PYPROJECT), "write it in extras.toml and pyproject.toml, then run: python docs/generate.py"


def test_an_extra_without_a_row_and_a_package_that_mypy_does_not_know_are_found() -> None:
    assert wrong_extras({**EXTRAS, "plot": {"packages": {"alchemy": []}}, "new": {}}, PYPROJECT) == ["new", "alchemy"]


def test_a_missing_package_is_answered_with_its_extra() -> None:
    from agentfly.plugins import missing_extra

    assert str(missing_extra("a .png file", "matplotlib")).endswith("pip install 'agentfly[plot]'")
