"""`run_code`: how a program runs, how it ends, and what it leaves behind."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from agentfly.errors import ConfigError
from agentfly.sandbox.interpreter import run_code

pytestmark = pytest.mark.skipif(os.name != "posix", reason="programs need a Unix")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or while it was read
        return False


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 120
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still alive"
        time.sleep(0.01)


def program(code: str, **options: Any) -> Any:
    return asyncio.run(run_code(code, **{"timeout_s": 120, **options}))


def test_a_program_runs_once_with_its_input():
    run = program("import sys\nprint(input())\nprint('e', file=sys.stderr)\nprint(__name__)", stdin="in\n")
    assert (run.stdout, run.stderr, run.exit_code, run.timed_out) == ("in\n__main__\n", "e\n", 0, False)


def test_a_program_sees_nothing_of_the_parents_environment(monkeypatch):
    monkeypatch.setenv("A_SECRET", "1")
    assert program("import os; print(os.environ.get('A_SECRET'))").stdout == "None\n"


def test_limits_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="at least 64"):
        program("1", memory_mb=1)


def test_how_a_program_ends_is_told_from_outside():
    failed = program("def f():\n    raise ValueError('no')\nf()")
    assert failed.exit_code == 1
    assert failed.stderr.startswith('Traceback (most recent call last):\n  File "main.py", line 3, in <module>\n    f()\n')
    assert "agentfly" not in failed.stderr
    assert program("x = (").stderr.endswith("SyntaxError: '(' was never closed\n")
    assert program("import sys; sys.exit(4)").exit_code == 4
    assert program("import os; os.kill(os.getpid(), 9)").exit_code == -9
    hung = program("print('begun', flush=True)\nwhile True: pass", timeout_s=3)
    assert (hung.stdout, hung.timed_out, hung.exit_code) == ("begun\n", True, -9)
    assert "MemoryError" in program("x = 'a' * (1 << 31)", memory_mb=256).stderr


def test_a_program_cannot_leave_a_process_behind_and_its_output_is_bounded():
    run = program("import subprocess\np = subprocess.Popen(['sleep', '1000'])\nprint(p.pid)\nprint('x' * 3_000_000)")
    wait_until_gone(int(run.stdout.split()[0]))
    assert len(run.stdout) < 1_100_000
    assert "bytes left out" in run.stdout


def test_cancelling_ends_the_program(tmp_path):
    mark = tmp_path / "pid"

    async def main() -> None:
        code = f"import os, time\nopen({str(mark)!r} + '.new', 'w').write(str(os.getpid()))\n"
        code += f"os.rename({str(mark)!r} + '.new', {str(mark)!r})\ntime.sleep(1000)"
        task = asyncio.create_task(run_code(code, timeout_s=500))
        async with asyncio.timeout(120):
            while not mark.exists():
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    wait_until_gone(int(mark.read_text()))
