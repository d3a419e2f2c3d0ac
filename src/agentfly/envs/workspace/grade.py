"""Grades what a chain has changed, in fresh workspaces, which no line of the chain's shell has touched.

    chain's workspace -- changed regular files --> kept_changes --> fresh workspace: the task's tree, the changes, its tests

`kept_changes` drops what configures or is imported by a test runner, and every file of the tests. A task is judged in one of
three ways, by its fields:

    cases    values.py: functions are called, and the values that they return are compared here. Nothing the code does can
             change what is expected
    verifier verifier.py: a script of the task runs and writes a number, as in Harbor's format
    tests    process.py: test files run in the code's process, once as they are and once with wrong expectations (the control).
             A test counts if it passes in the one and fails in the other
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from ...errors import ConfigError, DataError
from .box import Fields
from .control import controlled
from .trees import check_path

RUNNER_FILES = frozenset((
    "conftest.py", "sitecustomize.py", "usercustomize.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml",
    "tox.ini",
    "setup.cfg", "setup.py", "pyproject.toml", "noxfile.py", "pyvenv.cfg", ".coveragerc", "Makefile",
))  # fmt: skip
RUNNER_ENDINGS = (".pth", ".egg-link", ".pyc", ".pyo", ".so", ".pyd", ".egg", ".dist-info", ".egg-info")
RUNNER_FOLDERS = frozenset((
    ".git", ".hg", "bin", ".venv", "venv", "env", "site-packages", "__pycache__", ".pytest_cache", ".tox", "node_modules",
))  # fmt: skip
RUNNER_MODULES = frozenset((
    "pytest", "_pytest", "pluggy", "iniconfig", "packaging", "py", "pygments", "exceptiongroup", "tomli", "attr", "attrs",
    "xdist", "coverage", "hypothesis", "nose", "unittest", "mock",
)) | sys.stdlib_module_names  # fmt: skip


@dataclass(frozen=True, slots=True)
class GradedTests:
    """How many of the tests that count have passed. `why` is a sentence where nothing could be judged."""

    passed: int
    tests: int
    why: str = ""
    share: float | None = None  # where the task's own judge gives a number between

    @property
    def score(self) -> float:
        return self.passed / self.tests if self.share is None else self.share

    @property
    def success(self) -> bool:
        return self.passed == self.tests


def kept_changes(
    changes: Mapping[str, tuple[int, bytes] | None], before: Mapping[str, object], tests: Mapping[str, object]
) -> dict[str, bytes | None]:
    """The changes that may go into the workspace where they are judged."""
    folders = {str(PurePosixPath(path).parent) for path in tests} - {"."}
    return {
        path: None if change is None else change[1]
        for path, change in changes.items()
        if not why_dropped(path, before, tests, folders)
    }


def why_dropped(path: str, before: Mapping[str, object], tests: Mapping[str, object], folders: set[str]) -> str:
    """Why a changed file is not judged, or an empty string."""
    try:
        pure = PurePosixPath(check_path(path))
    except DataError:
        return "it is outside the tree"
    if path in tests or any(path.startswith(f"{folder}/") for folder in folders):
        return "it belongs to the tests"
    if pure.name in RUNNER_FILES or pure.name.startswith("test_") or pure.stem.endswith("_test"):
        return "it is a test, or configures the tests"
    if pure.name.endswith(RUNNER_ENDINGS) or any(part.endswith(RUNNER_ENDINGS) for part in pure.parts):
        return "it is imported without being named"
    if RUNNER_FOLDERS.intersection(pure.parts[:-1]):
        return "it is in a folder of programs, packages or history"
    shadows = {pure.parts[0].removesuffix(".py"), pure.stem} & RUNNER_MODULES if len(pure.parts) <= 3 else set()
    if shadows and path not in before and path.endswith(".py") and not _in_package(pure, before):
        return "its name is that of a module of Python or of the test runner"
    return ""


def _in_package(pure: PurePosixPath, before: Mapping[str, object]) -> bool:
    """Whether the file is a submodule of a package of the task's tree: `app/json.py` shadows nothing."""
    return len(pure.parts) > 1 and pure.parts[0] not in RUNNER_MODULES and str(pure.parent / "__init__.py") in before


def check_tests(fields: Fields) -> None:
    """Raises DataError for a task that nothing can judge, ConfigError if what judges it is missing."""
    if fields.get("cases") is not None:
        cases = fields["cases"]
        if not isinstance(cases, list) or not cases:
            raise DataError("the field 'cases' is a list of {call, args, expected} with at least one case")
        for number, case in enumerate(cases):
            if not isinstance(case, Mapping) or not {"call", "args", "expected"} <= set(case) or ":" not in str(case["call"]):
                raise DataError(f"cases[{number}] needs 'call' (\"module:function\"), 'args' and 'expected'")
        return
    if fields.get("verifier"):
        return
    tests = fields.get("tests")
    if not isinstance(tests, Mapping) or not tests:
        raise DataError("a task of a workspace needs 'cases', or 'tests': {path: text of a test file}")
    for path in tests:
        check_path(path)
    if importlib.util.find_spec("pytest") is None:
        raise ConfigError("the tests of this task run with pytest, which is not installed: pip install pytest")
    if not wanted_tests(fields):
        raise DataError("no test of this task compares anything, so every solution would pass")


def wanted_tests(fields: Fields) -> set[str]:
    """The names of the tests that count, such as `tests/test_calc.py::test_mean`.

    These are the names in `fail_to_pass` and `pass_to_pass`, or else all of the test files; without those that compare nothing,
    for which no control can tell a passed test from a patched runner."""
    found: set[str] = set()
    for path, text in fields["tests"].items():
        if path.endswith(".py"):
            found |= {f"{path}::{name}" for name in controlled(text, path)[1]}
    named = {str(name) for key in ("fail_to_pass", "pass_to_pass") for name in fields.get(key) or ()}
    if not named:
        return found
    return {name for name in named if name.partition("[")[0] in found}
