"""The interpreter and its tool: what is kept, what the model reads, what bad input does, and what is left behind."""

from __future__ import annotations

import asyncio
import os

import pytest

from agentfly import plugins
from agentfly.envs.code.env import MAX_CODE, CodeInterpreter
from agentfly.envs.code.session import CellResult, open_session
from agentfly.envs.code.tools import HEAD, TAIL, code_interpreter, code_interpreter_tool, describe, python, shorten
from agentfly.errors import ConfigError, WorldError
from agentfly.resources import ResourceManager, spec_of
from agentfly.tools import Context, call_tools
from agentfly.types import Task, ToolCall, ToolResult, Trajectory

pytestmark = pytest.mark.skipif(os.name != "posix", reason="sessions need a Unix")


def test_names_stay_and_the_last_value_is_shown(shown):
    assert shown("x = 3\nprint('hi')\nx + 1", "x * 2", "y = 1") == ["hi\n4", "6", "(no output)"]


def test_an_error_is_a_short_traceback_and_the_session_goes_on(shown):
    first, second = shown("def f():\n    return 1 / 0\nkept = 1\nf()", "kept")
    assert first.splitlines()[0].startswith("Traceback")
    assert first.endswith("ZeroDivisionError: division by zero")
    assert "line 2, in f" in first
    assert second == "1"


def test_a_cell_that_takes_too_long_is_stopped_and_its_variables_are_kept(patient, run):
    _, late, after = run("x = 7", ("while True: pass", 0.5), "x")
    assert late.observation == "[stopped after 0.5 s; the session and its variables are kept]"
    assert late.error == "timeout"
    assert after.observation == "7"


def test_a_cell_that_will_not_stop_costs_the_session_and_the_model_is_told(run):
    deaf = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nx = 7"
    _, late, after, later = run(deaf, ("while True: pass", 0.5), "'x' in globals()", "1")
    assert "did not stop after 0.5 s and was killed; the next call starts a new one" in late.observation
    assert late.error == "timeout"
    assert after.observation == "[a new session was started; earlier variables are lost]\nFalse"
    assert later.observation == "1"


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("#" * (MAX_CODE + 1), f"The code has {MAX_CODE + 1:,} characters; at most {MAX_CODE:,} can be run."),
        ("x = 1 # " + "a" * 1_048_576, "at most 200,000 can be run"),
        ("print('a\0b')", "The code contains a null character at position 8"),
    ],
    ids=["long", "a megabyte", "null"],
)
def test_code_that_cannot_be_run_is_refused_in_a_sentence_and_the_session_goes_on(shown, code, word):
    _, refused, after = shown("kept = 5", code, "kept")
    assert word in refused
    assert refused.endswith("Nothing was run; the session goes on.")
    assert after == "5"


def test_text_that_is_not_unicode_is_refused():
    async def main() -> list[CellResult]:
        interpreter = CodeInterpreter()
        try:
            return [await interpreter.run(code) for code in (b"print('\xff')", "print('\ud800')", "print('é')".encode())]
        finally:
            await interpreter.close()

    refused, half, good = asyncio.run(main())
    assert half.error is not None
    assert half.error.startswith("The code contains half of a surrogate pair at position 7")
    assert refused.error is not None
    assert refused.error.startswith("The code is not valid UTF-8 (byte 7).")
    assert good.stdout == "é\n"


def test_endless_output_is_cut_and_stopped(patient, run):
    begin = "n = 0\nwhile n < 10_000:\n    print('word', n)\n    n += 1"
    long, endless, after = run(begin, ("while True:\n    print('word', n)\n    n += 1", 1.0), "n > 0")
    assert long.observation.startswith("word 0\nword 1\n")
    assert "characters left out" in long.observation
    assert "stopped after 1 s" in endless.observation
    assert len(endless.observation) < HEAD + TAIL + 300
    assert after.observation == "True"


def test_a_long_value_and_a_long_text_are_cut_with_a_marker(shown):
    value, printed = shown("list(range(100_000))", "print('x' * 50_000)")
    for text in (value, printed):
        assert "left out" in text or "more characters" in text
        assert len(text) < HEAD + TAIL + 300
    assert shorten("a" * 20_000) == "a" * HEAD + "\n[... 14,000 characters left out ...]\n" + "a" * TAIL
    assert shorten(shorten("a" * 20_000)) == shorten("a" * 20_000)


def test_exiting_politely_keeps_the_session(shown):
    first, second = shown("x = 1\nimport sys\nsys.exit(3)", "x")
    assert "SystemExit: 3" in first
    assert second == "1"


def test_exiting_hard_replaces_the_session_and_the_model_is_told(shown):
    first, second, third = shown("x = 1\nimport os\nos._exit(3)", "'x' in globals()", "2")
    assert "the next call starts a new one, earlier variables are lost]" in first
    assert second == "[a new session was started; earlier variables are lost]\nFalse"
    assert third == "2"


def test_a_session_survives_deleting_its_own_files(shown):
    remove = "import os, shutil\nopen('a', 'w').close()\nshutil.rmtree(os.getcwd(), ignore_errors=True)\nos.listdir('/') != []"
    assert shown("x = 4", remove, "x", "import json\njson.dumps([x])") == ["(no output)", "True", "4", "'[4]'"]


def test_input_gives_a_clear_error(shown):
    first, second = shown("name = input('Your name? ')", "1 + 1")
    assert "input() does not work here, a cell has no terminal" in first
    assert second == "2"


def test_two_interpreters_share_nothing():
    async def main() -> list[str | None]:
        one, two = CodeInterpreter(), CodeInterpreter()
        try:
            await asyncio.gather(one.run("x = 'one'"), two.run("x = 'two'"))
            return [result.value for result in await asyncio.gather(one.run("x"), two.run("x"))]
        finally:
            await asyncio.gather(one.close(), two.close())

    assert asyncio.run(main()) == ["'one'", "'two'"]


def test_reset_leaves_no_trace_of_the_last_chain():
    async def main() -> tuple[CellResult, bool]:
        interpreter = CodeInterpreter()
        try:
            await interpreter.run("secret = 1\nimport math\nmath.pi = 3\nopen('left.txt', 'w').close()")
            await interpreter.reset(Task("next", (), {}))
            found = await interpreter.run("import math, os\n('secret' in globals(), math.pi == 3, os.path.exists('left.txt'))")
            return found, interpreter.replaced
        finally:
            await interpreter.close()

    found, replaced = asyncio.run(main())
    assert found.value == "(False, False, False)"
    assert not replaced


def test_cells_that_are_sent_together_run_one_after_the_other_in_order():
    async def main() -> list[str]:
        task = Task("t", (), {})
        interpreter = CodeInterpreter()

        async def lend(kind: type) -> CodeInterpreter:
            return interpreter

        context = Context(task, Trajectory("c", task), lend=lend)
        calls = [ToolCall("code_interpreter", {"code": code}) for code in ("x = [1]", "x.append(2)", "x")]
        try:
            return [result.observation for result in await call_tools({"code_interpreter": code_interpreter}, calls, context)]
        finally:
            await interpreter.close()

    assert asyncio.run(main())[-1] == "[1, 2]"


def test_a_cancelled_cell_leaves_the_interpreter_usable_and_says_what_was_lost():
    async def main() -> tuple[CellResult, bool]:
        interpreter = CodeInterpreter()
        try:
            await interpreter.run("x = 1")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(interpreter.run("while True: pass"), 0.3)
            return await interpreter.run("'x' in globals()"), interpreter.replaced
        finally:
            await interpreter.close()

    after, replaced = asyncio.run(main())
    assert after.value == "False"
    assert replaced


def test_a_closed_interpreter_refuses_cells_until_it_is_reset_and_closes_twice():
    async def main() -> str | None:
        interpreter = CodeInterpreter()
        await interpreter.run("1")
        await interpreter.close()
        await interpreter.close()
        assert not interpreter.healthy()
        with pytest.raises(WorldError, match="closed: reset it"):
            await interpreter.run("1")
        await interpreter.reset(Task("t", (), {}))
        try:
            return (await interpreter.run("1 + 1")).value
        finally:
            await interpreter.close()

    assert asyncio.run(main()) == "2"


def test_no_descriptor_is_left_after_many_episodes():
    async def main() -> tuple[int, int]:
        interpreter = CodeInterpreter()
        counts = []
        for _ in range(2):
            for _ in range(4):
                await interpreter.reset(Task("t", (), {}))
                await interpreter.run("x = 1")
            await interpreter.close()
            await interpreter.reset(Task("t", (), {}))
            counts.append(len(os.listdir("/proc/self/fd")))
        return counts[0], counts[1]

    before, after = asyncio.run(main())
    assert after <= before


def test_the_tool_and_the_environment_have_names():
    assert plugins.resolve("tools", "code_interpreter") is code_interpreter
    assert plugins.resolve("envs", "code") is CodeInterpreter
    assert code_interpreter.schema["function"]["parameters"]["required"] == ["code"]
    assert list(code_interpreter.schema["function"]["parameters"]["properties"]) == ["code"]
    assert python.name == "python"
    assert code_interpreter.envs == {CodeInterpreter}


def test_figures_come_back_as_an_image_and_a_word():
    assert describe(CellResult(stdout="plotted\n", images=("png",)), 5) == "plotted\n[figure]"
    assert describe(CellResult(images=("a", "b")), 5) == "[figure; the last of 2 is shown]"


def test_figures_of_the_real_matplotlib_come_back_as_png(run):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'agentfly[plot]'")
    draw = "import matplotlib.pyplot as plt\nplt.plot([1, 4, 9])\nplt.title('squares')\nprint('drawn')"
    first, two, none = run(
        draw, "plt.figure(); plt.bar([1], [2])\nplt.figure(); plt.show()", "plt.get_fignums()", limit_s=120.0
    )
    assert first.observation.endswith("drawn\n[figure]")
    assert first.image[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(first.image) > 1_000
    assert two.observation.endswith("[figure; the last of 2 is shown]")
    assert (none.observation, none.image) == ("[]", None)  # shown once, then closed


def test_the_tool_obeys_the_time_limit_of_the_environments_own_options(patient):
    async def main() -> list[ToolResult]:
        spec = spec_of(CodeInterpreter, options={"limit_s": 0.5})
        task = Task("t0", (), {})
        async with ResourceManager(None, spec) as manager, manager.lease([CodeInterpreter], task) as lease:

            async def lend(kind: type) -> object:
                return lease[kind]

            context = Context(task, Trajectory("c0", task), lend=lend)
            tools = {"python": python, "own": code_interpreter_tool(name="own", limit_s=0.3)}
            names = ("python", "own")
            return [(await call_tools(tools, [ToolCall(n, {"code": "while True: pass"})], context))[0] for n in names]

    followed, own = asyncio.run(main())
    assert followed.observation == "[stopped after 0.5 s; the session and its variables are kept]"
    assert own.observation == "[stopped after 0.3 s; the session and its variables are kept]"
    assert followed.error == own.error == "timeout"


def test_deadlines_around_a_cell_make_room_for_its_limit():
    assert spec_of(CodeInterpreter).call_timeout_s == 120.0
    assert spec_of(CodeInterpreter, options={"limit_s": 300}).call_timeout_s == 340.0
    assert python.timeout_s > 340.0
    assert code_interpreter_tool(limit_s=300).timeout_s == 340.0
    with pytest.raises(ConfigError, match="call_timeout_s is 60, but with its options a call may take 340 s"):
        spec_of(CodeInterpreter, options={"limit_s": 300}, call_timeout_s=60)


def test_an_unknown_tier_and_a_limit_of_nothing_are_refused():
    with pytest.raises(ConfigError, match="no tier of sessions is called 'castle'"):
        asyncio.run(open_session("castle"))
    with pytest.raises(ConfigError, match="no tier of sessions is called 'castle'"):
        CodeInterpreter("castle")
    with pytest.raises(ConfigError, match="limit_s must be above 0"):
        CodeInterpreter(limit_s=0)


def test_the_cells_that_ran_in_the_session_are_its_state(patient) -> None:
    async def key(*cells: str, limit_s: float = 60.0) -> str:
        env = CodeInterpreter(tier="process")
        await env.reset()
        for cell in cells:
            await env.run(cell, limit_s)
        made = env.state_key()
        await env.close()
        return made

    async def main() -> None:
        one = await key("x = 1", "x += 1")
        assert (
            one
            == await key("x = 1\n", "refused\0", "  x += 1")
            == await key("y = 5", "import os; os._exit(1)", "x = 1", "x += 1")
        )
        assert len({one, await key(), await key("x = 1"), await key("x += 1", "x = 1")}) == 4
        assert await key("x = 1", "while True: x += 1", limit_s=0.5) == "", "nobody knows how far it came"

    asyncio.run(main())
