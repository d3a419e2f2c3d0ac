"""Ordinary Python does in the interpreter what it does in CPython: the table of snippets, cell by cell."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentfly.envs.code.env import CodeInterpreter
from agentfly.envs.code.session import CellResult

from .snippets import NEEDS, snippets

pytestmark = pytest.mark.skipif(os.name != "posix", reason="sessions need a Unix")
CASES = snippets()
Cells = list[dict[str, str | None]]


def installed(name: str) -> bool:
    package = NEEDS.get(name.partition(" ")[0])
    return package is None or importlib.util.find_spec(package) is not None


@pytest.fixture(scope="module")
def expected() -> dict[str, Cells]:
    cases = {name: cells for name, cells in CASES.items() if installed(name)}
    script = Path(__file__).with_name("reference.py")
    command = [sys.executable, "-X", "utf8", "-W", "ignore", str(script)]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, timeout=800, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def found() -> dict[str, list[CellResult]]:
    """Runs every snippet in a separate interpreter, a few at a time."""

    async def main() -> dict[str, list[CellResult]]:
        turns = asyncio.Semaphore(4)

        async def run(cells: list[str]) -> list[CellResult]:
            async with turns:
                interpreter = CodeInterpreter(limit_s=60)
                await interpreter.reset()
                try:
                    return [await interpreter.run(cell) for cell in cells]
                finally:
                    await interpreter.close()

        names = [name for name in CASES if installed(name)]
        return dict(zip(names, await asyncio.gather(*(run(CASES[name]) for name in names)), strict=True))

    return asyncio.run(main())


def test_the_table_is_large_and_has_sequences_of_cells() -> None:
    assert len(CASES) >= 150
    assert sum(len(cells) > 1 for cells in CASES.values()) >= 20


@pytest.mark.parametrize("name", CASES)
def test_a_snippet_does_what_cpython_does(name: str, expected: dict[str, Cells], found: dict[str, list[CellResult]]) -> None:
    if not installed(name):
        package = NEEDS[name.partition(" ")[0]]
        pytest.skip(f"{package} is not installed: pip install {package}")
    for cell, result in zip(expected[name], found[name], strict=True):
        assert result.alive
        assert not result.timed_out
        assert result.stdout == cell["stdout"]
        assert result.value == cell["value"]
        assert (result.error or "").strip().splitlines()[-1:] == ([cell["error"]] if cell["error"] else [])
