"""What the pages for contributors say of the code is so: paths exist, and the version is stated once more."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.house.reading import ROOT, SRC

# A path in backquotes: `learn/samples.py`, `rollout/`, `tests/house/rooms.py`.
PATH = re.compile(r"`([a-z_]+(?:/[A-Za-z_.0-9]+)*(?:/|\.py|\.toml|\.md|\.txt))`")
WRITTEN_BY_A_COMMAND = {"site/"}


def missing_paths(text: str) -> list[str]:
    """Paths of a page that stand neither in the package nor in the repository."""
    paths = {path for path in PATH.findall(text) if path not in WRITTEN_BY_A_COMMAND}
    return sorted(path for path in paths if not any((base / path).exists() for base in (ROOT, SRC)))


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_the_paths_of_a_page_exist(page: str) -> None:
    assert missing_paths((ROOT / page).read_text(encoding="utf-8")) == []


def test_a_path_that_is_gone_is_found() -> None:
    assert missing_paths("in `learn/alchemy.py` and `learn/samples.py` of `learn/`") == ["learn/alchemy.py"]


def test_the_version_is_stated_once_more_in_pyproject() -> None:
    import agentfly

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == agentfly.__version__
