"""The program behind `make test` runs every part, names what failed, and tells an unsteady test from a broken one."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.conftest import longest_first

PROGRAM = Path(__file__).parent.parent / "scripts" / "run_tests.py"
PASSES = "def test_sound():\n    pass\n"
FAILS = "def test_broken():\n    assert False\n"
PASSES_THE_SECOND_TIME = """
from pathlib import Path

def test_shaky():
    mark = Path(__file__).with_name("ran")
    ran = mark.exists()
    mark.touch()
    assert ran
"""
LESS = "| tests/test_suite.py | 1 |\n| tests/test_a.py | 1 |"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program over a suite of its own in `tmp_path`, in processes that know nothing of this suite's settings."""
    spec = importlib.util.spec_from_file_location("run_tests", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "run_tests", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # starting pytest without plugins takes a third of the time
    (tmp_path / "tests" / "sandbox").mkdir(parents=True)
    (tmp_path / "tests" / "sandbox" / "test_walls.py").write_text(PASSES)
    (tmp_path / "tests" / "unsteady.md").write_text("")
    # The suite has the options that pytest takes from the project: `main` must work beside them.
    options = tomllib.loads((PROGRAM.parent.parent / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    (tmp_path / "pytest.ini").write_text(f"[pytest]\naddopts = {options}\nmarkers =\n  nightly: later\n  slow: later\n")
    return module


def suite(folder: Path, text: str) -> None:
    (folder / "tests" / "test_suite.py").write_text(text)


def test_a_sound_suite_passes(program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite(tmp_path, PASSES)
    assert program.main(["--workers", "1"]) == 0
    assert "tests: passed" in capsys.readouterr().out


def test_times_are_written_per_part_folder_file_and_test_into_the_section_of_the_command(
    program: ModuleType, tmp_path: Path
) -> None:
    suite(tmp_path, "import time\n\ndef test_slow():\n    time.sleep(2.1)\n")
    times = tmp_path / "tests" / "times.md"
    times.write_text(f"{program.TITLE}\n\n## make bench\n\nkept\n\n## make test\n\nformer\n\n## make test-nightly\n\n{LESS}\n")
    assert program.main(["--workers", "1", "--times", str(times)]) == 0
    title, bench, test, nightly = times.read_text().split("\n\n## ")
    assert (title, bench, nightly) == (program.TITLE, "make bench\n\nkept", f"make test-nightly\n\n{LESS}\n")
    assert test.startswith("make test\n\n| part |")
    assert "former" not in test
    for name in ("tests/sandbox", "tests", "tests/test_suite.py", "tests/test_suite.py::test_slow"):
        assert f"| {name} | " in test
    items: Any = [SimpleNamespace(path=tmp_path / "tests" / name) for name in ("test_a.py", "test_suite.py", "test_a.py")]
    longest_first(items, times)  # what is written is what orders the files
    assert [item.path.name for item in items] == ["test_suite.py", "test_a.py", "test_a.py"]


def test_both_parts_run_and_the_end_names_what_failed(
    program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite(tmp_path, FAILS)
    assert program.main(["--workers", "1"]) == 1
    end = capsys.readouterr().out
    assert "tests: FAILED" in end
    assert "-m pytest tests/test_suite.py::test_broken" in end
    assert "tests/sandbox: passed" in end


def test_a_test_that_passes_the_second_time_is_unsteady_and_fails_nothing(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")  # for two workers
    suite(tmp_path, PASSES + PASSES_THE_SECOND_TIME)
    assert program.main(["--workers", "2", "--again"]) == 0
    assert "unsteady: tests/test_suite.py::test_shaky (add it to tests/unsteady.md)" in capsys.readouterr().out


def test_the_fast_part_leaves_out_slow_tests(program: ModuleType, tmp_path: Path) -> None:
    suite(tmp_path, f"import pytest\n{PASSES}\n@pytest.mark.slow\n{FAILS}\n@pytest.mark.nightly\n{FAILS}")
    (tmp_path / "tests" / "slow.txt").write_text("# slow\ntests/scale\ntests/test_suite.py::test_broken\n")
    (tmp_path / "tests" / "scale").mkdir()
    (tmp_path / "tests" / "scale" / "test_many.py").write_text("raise RuntimeError('imported')\n")
    assert program.main(["--workers", "1", "--fast"]) == 0


def test_processes_of_the_suite_read_compiled_files(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    suite(tmp_path, "import sys\n\ndef test_sound():\n    assert not sys.dont_write_bytecode\n")
    assert program.main(["--workers", "1"]) == 0


def test_without_again_an_unsteady_test_fails_the_run(program: ModuleType, tmp_path: Path) -> None:
    suite(tmp_path, PASSES_THE_SECOND_TIME)
    assert program.main(["--workers", "1"]) == 1


def test_a_test_that_fails_twice_fails_the_run_beside_an_unsteady_one(
    program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite(tmp_path, FAILS + PASSES_THE_SECOND_TIME)
    assert program.main(["--workers", "1", "--again"]) == 1
    end = capsys.readouterr().out
    assert "unsteady: tests/test_suite.py::test_shaky" in end
    assert "failed: " in end
    assert "::test_broken" in end


def test_a_suite_that_cannot_be_read_fails_the_run(
    program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite(tmp_path, "import a_module_that_is_not_there\n")
    assert program.main(["--workers", "1", "--again"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_every_unsteady_test_that_is_listed_exists() -> None:
    root = PROGRAM.parent.parent
    rows = (root / "tests" / "unsteady.md").read_text(encoding="utf-8").partition("|---|")[2].splitlines()[1:]
    for row in rows:
        path, _, name = row.split("|")[1].strip().strip("`").partition("::")
        assert f"def {name.partition('[')[0]}(" in (root / path).read_text(encoding="utf-8"), row


@pytest.mark.parametrize("name", ["slow.txt", "nightly.txt"])
def test_what_a_list_of_tests_names_exists(name: str) -> None:
    root = PROGRAM.parent.parent
    for line in (root / "tests" / name).read_text(encoding="utf-8").splitlines():
        path, _, function = line.partition("::")
        if line and not line.startswith("#"):
            assert (root / path).exists(), line
            assert not function or f"def {function}(" in (root / path).read_text(encoding="utf-8"), line
