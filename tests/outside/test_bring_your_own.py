"""The programs of docs/bring-your-own.md: short, and they do what the page says."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.outside.test_openenv import url as url
from tests.test_docs import ROOT, read_blocks

PAGE = ROOT / "docs" / "bring-your-own.md"
BLOCKS = read_blocks(PAGE.read_text(encoding="utf-8"))
PROGRAMS = {block.file_name: block.text for block in BLOCKS if (block.file_name or "").startswith("with_")}
MAX_LINES = 30
NEEDS = {
    "with_mcp.py": "mcp",
    "with_gymnasium.py": "gymnasium",
    "with_textarena.py": "textarena",
    "with_reasoning_gym.py": "reasoning_gym",
}
PRINTS = {
    "with_mcp.py": "['84']",
    "with_gymnasium.py": "(3, ",
    "with_textarena.py": "[",
    "with_reasoning_gym.py": "[",
    "with_user.py": "[",
    "with_openenv.py": "step(n: integer) [",
}


def test_each_program_is_short_and_has_a_test() -> None:
    assert set(PROGRAMS) == set(PRINTS)
    assert all(len(text.splitlines()) <= MAX_LINES for text in PROGRAMS.values())


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_the_page_runs(name: str, tmp_path: Path, url: str) -> None:
    package = NEEDS.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"needs the package {package}")
    # A server does not get this variable by itself; the tests may run from a folder that is not installed.
    text = PROGRAMS[name].replace("command=sys.executable", 'command=sys.executable, env={"PYTHONPATH": "$PYTHONPATH"}')
    (tmp_path / name).write_text(text, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    run = subprocess.run([sys.executable, name, url], cwd=tmp_path, capture_output=True, text=True, timeout=300, env=env)
    assert run.returncode == 0, run.stderr
    assert PRINTS[name] in run.stdout
    assert "world_failure" not in run.stdout
