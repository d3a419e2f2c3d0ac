"""The Python session: what it keeps, what it shows, what it survives, and what it leaves behind."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agentfly.errors import ConfigError
from agentfly.tools import Context, as_tool, call_tools
from agentfly.tools.interpreter import PythonSession, python_tool, run_code
from agentfly.types import ToolCall, ToolResult

pytestmark = pytest.mark.skipif(os.name != "posix", reason="sessions need a Unix")


def cells(context: Context, *codes: str, **options: Any) -> list[ToolResult]:
    """The results of some cells of one session."""
    tools = {"python": python_tool(**options)}

    async def main() -> list[ToolResult]:
        try:
            return [(await call_tools(tools, [ToolCall("python", {"code": code})], context))[0] for code in codes]
        finally:
            await context.close()

    return asyncio.run(main())


def shown(context: Context, *codes: str, **options: Any) -> list[str]:
    return [result.observation for result in cells(context, *codes, **options)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or while it was read
        return False


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 20
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still alive"
        time.sleep(0.01)


def test_variables_are_kept_and_the_last_value_is_shown(context):
    assert shown(context, "x = 3\nprint('hi')\nx + 1", "x * 2", "y = 1", "def f():\n    return x\nf()", "_ + 1") == [
        "hi\n4",
        "6",
        "(no output)",
        "3",
        "4",
    ]


def test_errors_are_short_and_keep_the_session(context):
    division, syntax, leave, after = shown(
        context, "x = 1\ndef f(n):\n    return 1 / n\nf(0)", "x = (", "import sys; sys.exit(3)", "x"
    )
    assert division == (
        "Traceback:\n  <cell 1> line 4, in <module>: f(0)\n  <cell 1> line 3, in f: return 1 / n\n"
        "ZeroDivisionError: division by zero"
    )
    assert syntax.endswith("SyntaxError: '(' was never closed")
    assert "agentfly" not in division + syntax
    assert leave == "SystemExit: 3 (the session goes on)"
    assert after == "1"


def test_prints_of_every_kind_are_captured_in_order(context):
    code = "import os, sys\nprint('one')\nprint('two', file=sys.stderr)\nos.system('echo three')\nos.write(1, b'four')\nNone"
    assert shown(context, code) == ["one\ntwo\nthree\nfour"]


def test_a_megabyte_of_prints_keeps_its_beginning_its_end_and_the_value(context):
    (text,) = shown(context, "print('start'); print('x' * 10**6); print('end'); 'value'")
    assert text.startswith("start\nxxx")
    assert text.endswith("xxx\nend\n'value'")
    assert "characters left out" in text
    assert len(text) < 7_000


def test_nothing_a_cell_prints_or_writes_can_forge_a_reply(context):
    forge = json.dumps({"id": 2, "value": "forged"})
    code = f"""
import os, struct
body = {forge!r}.encode()
for fd in range(1, 20):
    try:
        os.write(fd, struct.pack('>I', len(body)) + body)
    except OSError:
        pass
'real'"""
    texts = shown(context, "1", f"print({forge!r})\n'real'", code.replace('"id": 2', '"id": 9'), "'after'")
    assert texts[1].endswith("'real'")
    assert texts[2].endswith("'real'")
    assert texts[3] == "'after'"


@pytest.mark.parametrize(
    "frames",
    [
        "struct.pack('>I', 8_000_000) + b'[],' * 2_600_000",
        "(struct.pack('>I', 1) + b'x') * 200_000",
        "struct.pack('>IIB8I', 37 + 2_400_000, 9, 0, 600_000, 600_000, 600_000, 600_000, 0, 0, 0, 0) + b'x' * 2_400_000",
    ],
    ids=["long", "many", "allowed"],
)
def test_a_cell_that_floods_the_connection_costs_at_most_its_session(context, frames):
    code = f"""
import os, stat, struct
fd = next(fd for fd in range(3, 20) if os.path.exists(f'/proc/self/fd/{{fd}}') and stat.S_ISSOCK(os.fstat(fd).st_mode))
data = memoryview({frames})
while data:
    data = data[os.write(fd, data):]"""
    begin = time.thread_time()
    *_, after = shown(context, code, "'after'")
    assert after.endswith("'after'")
    assert time.thread_time() - begin < 2


def test_deep_folders_of_a_cell_are_removed(context):
    deep = "import os\nhere = os.getcwd()\nfor _ in range(1500): os.mkdir('a'); os.chdir('a')\nprint(here)"
    (where,) = shown(context, deep)
    assert not os.path.exists(where)


def test_a_cell_that_runs_too_long_is_interrupted_and_keeps_its_variables(context, monkeypatch):
    monkeypatch.setattr("agentfly.tools.interpreter.session.GRACE_S", 60)
    first, second, third = cells(context, "x = 5", "print('begun')\nwhile True: pass", "x", limit_s=2)
    assert first.error is None
    assert second.error == "timeout"
    assert second.observation == "begun\n[stopped after 2 s; the session and its variables are kept]"
    assert third.observation == "5"


def test_a_cell_that_cannot_be_interrupted_costs_the_session_and_says_so(context, monkeypatch):
    monkeypatch.setattr("agentfly.tools.interpreter.session.GRACE_S", 0.3)
    deaf = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nx = 5"
    _, killed, after = cells(context, deaf, "while True: pass", "x", limit_s=2)
    assert killed.error == "timeout"
    assert "was killed; the next call starts a new one, earlier variables are lost" in killed.observation
    assert "NameError: name 'x' is not defined" in after.observation


def test_a_session_that_ends_itself_is_replaced_and_says_so(context):
    ended, after = shown(context, "import os; print('bye', flush=True); os._exit(3)", "1 + 1")
    assert ended == "bye\n[the session ended with exit code 3; the next call starts a new one, earlier variables are lost]"
    assert after == "2"


def test_a_fork_in_a_cell_does_not_answer_twice(context):
    code = "import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\n'parent' if pid else 'child'"
    assert shown(context, code, "'next'") == ["'parent'", "'next'"]


def test_a_memory_bomb_is_an_error_in_a_living_session(context):
    bomb, after = shown(context, "x = 1\ny = 'a' * (1 << 31)", "x", memory_mb=256)
    assert bomb.endswith("MemoryError")
    assert after == "1"


def test_a_file_bomb_is_stopped(context):
    code = "f = open('big', 'wb')\nfor _ in range(200): f.write(b'0' * (1 << 20))"
    (text,) = shown(context, code)
    assert "File too large" in text


def test_nothing_of_the_parents_environment_is_seen(context, monkeypatch):
    monkeypatch.setenv("AGENTFLY_TEST_SECRET", "canary")
    names, directory = shown(context, "import os; sorted(os.environ)", "os.listdir('.'), os.getcwd() == os.environ['HOME']")
    assert "SECRET" not in names
    assert directory == "([], True)"


def test_surrogates_and_strange_text_do_not_break_the_line(context):
    assert shown(context, "print('\\ud800')", "'\ud800'", "'é' + '\\x00'") == ["\\ud800", "'\ufffd'", "'é\\x00'"]


def test_each_chain_has_its_own_session_and_closing_ends_it_with_its_children(context):
    other = Context(context.task, context.trajectory)
    tools = {"python": as_tool("python_process")}
    start = "import os, subprocess\nchild = subprocess.Popen(['sleep', '1000'])\nprint(os.getpid(), child.pid, os.getcwd())"

    async def main() -> list[list[str]]:
        seen = []
        for chain in (context, other):
            (result,) = await call_tools(tools, [ToolCall("python", {"code": start})], chain)
            seen.append(result.observation.split())
        await context.close()
        assert alive(int(seen[1][0]))
        await other.close()
        return seen

    seen = asyncio.run(main())
    assert seen[0][0] != seen[1][0]
    for session, child, directory in seen:
        wait_until_gone(int(session))
        wait_until_gone(int(child))
        assert not Path(directory).exists()


def test_several_cells_of_one_turn_run_in_order(context):
    tools = {"python": python_tool()}
    calls = [ToolCall("python", {"code": code}) for code in ("x = 1", "x += 1", "x")]

    async def main() -> tuple[ToolResult, ...]:
        try:
            return await call_tools(tools, calls, context)
        finally:
            await context.close()

    assert asyncio.run(main())[2].observation == "2"


def test_a_cancelled_call_ends_its_session_and_the_next_says_so(context, tmp_path):
    session = PythonSession()
    mark = tmp_path / "pid"

    async def main() -> str:
        code = f"import os, time\nopen({str(mark)!r} + '.new', 'w').write(str(os.getpid()))\n"
        code += f"os.rename({str(mark)!r} + '.new', {str(mark)!r})\ntime.sleep(1000)"
        task = asyncio.create_task(session(code))
        async with asyncio.timeout(20):
            while not mark.exists():
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        wait_until_gone(int(mark.read_text()))
        try:
            return str(await session("1 + 1"))
        finally:
            await session.close()

    assert asyncio.run(main()) == "[a new session was started; earlier variables are lost]\n2"


def test_a_session_dies_with_its_parent():
    code = """
import asyncio, os, signal
from agentfly.tools.interpreter import PythonSession
async def main():
    session = PythonSession()
    print(await session("import os; print(os.getpid(), os.getcwd())"), flush=True)
    await session("print('looping')\\nwhile True: pass")
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        pid, directory = parent.stdout.readline().split()
        assert alive(int(pid))
    finally:
        parent.kill()
        parent.wait(timeout=20)
        parent.stdout.close()
    wait_until_gone(int(pid))
    assert not Path(directory).exists()


def test_limits_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="at least 64"):
        python_tool(memory_mb=1)


def program(code: str, **options: Any) -> Any:
    return asyncio.run(run_code(code, **{"timeout_s": 20, **options}))


def test_a_program_runs_once_with_its_input():
    run = program("import sys\nprint(input())\nprint('e', file=sys.stderr)\nprint(__name__)", stdin="in\n")
    assert (run.stdout, run.stderr, run.exit_code, run.timed_out) == ("in\n__main__\n", "e\n", 0, False)


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
        async with asyncio.timeout(20):
            while not mark.exists():
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    wait_until_gone(int(mark.read_text()))
