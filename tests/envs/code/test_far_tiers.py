"""The interpreter in a container and on another machine: the same cells, the same words, and tiers that are refused."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentfly.envs.code.env import CodeInterpreter
from agentfly.envs.code.session import check_tier, open_session
from agentfly.envs.code.tools import code_interpreter_tool
from agentfly.errors import ConfigError, WorldError
from agentfly.resources import ResourceManager, spec_of
from agentfly.resources.rpc.env_server import EnvServer
from agentfly.sandbox.limits import TIERS, CellResult
from agentfly.sandbox.tiers import FAR, ORDER, WORDS, not_stopped
from agentfly.tools import Context, call_tools
from agentfly.types import Task, ToolCall, Trajectory
from tests.resources.far import ServerThread, far_place, processes
from tests.resources.worlds import exists, soon_gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
WAIT_S = 120
TASK = Task("t", (), {})


@pytest.fixture(params=FAR)
def options(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What `CodeInterpreter` is given to live there."""
    if request.param == "remote":
        with ServerThread("code") as server:
            yield {"tier": f"remote:{server.url}"}
        return
    with far_place(request.param, tmp_path) as far:
        if far.docker is not None:
            yield {"tier": "docker:python:3.12-slim", "place": {"socket": far.docker.socket, "memory_mb": 300}}
        else:
            yield {"tier": "enroot:python"}


def cells(options: dict[str, Any], *codes: tuple[str, float]) -> tuple[list[CellResult], dict[str, Any]]:
    async def main() -> tuple[list[CellResult], dict[str, Any]]:
        interpreter = CodeInterpreter(**options)
        try:
            await interpreter.reset(TASK)
            return [await interpreter.run(code, limit_s) for code, limit_s in codes], await interpreter.about()
        finally:
            await interpreter.close()

    return asyncio.run(main())


def test_cells_run_there_as_they_do_here(patient: None, options: dict[str, Any]) -> None:
    results, about = cells(
        options,
        ("x = 3\nprint('hi')\nx + 1", 60),
        ("def f(n): return 1 if n < 2 else n * f(n - 1)\nf(10) + x", 60),
        ("1 / 0", 60),
        ("while True: pass", 0.5),
        ("x", 60),
        ("import os\nos._exit(3)", 60),
        ("'x' in globals()", 60),
    )
    assert results[0] == CellResult("hi\n", "", "4")
    assert results[1].value == "3628803"
    assert (results[2].error or "").endswith("ZeroDivisionError: division by zero")
    assert results[3].timed_out
    # A container keeps the default grace, so a busy machine may lose the session here.
    assert results[4].value == "3" if results[3].alive else results[4].replaced
    assert not results[5].alive
    assert "it exited with code 3" in (results[5].error or "")
    assert (results[6].value, results[6].replaced) == ("False", True)
    kind = options["tier"].partition(":")[0]
    assert about["tier"] == ("namespace" if kind == "remote" else kind)
    assert about["report"][0] == WORDS[kind]


def test_chains_do_not_see_each_other(options: dict[str, Any]) -> None:
    async def main() -> list[CellResult]:
        one, two = CodeInterpreter(**options), CodeInterpreter(**options)
        try:
            await one.run("x = 1", 60)
            return [await two.run("'x' in globals()", 60), await one.run("x", 60)]
        finally:
            await one.close()
            await two.close()

    assert [result.value for result in asyncio.run(main())] == ["False", "1"]


def test_a_call_that_is_cancelled_costs_the_session_alone(options: dict[str, Any]) -> None:
    async def main() -> CellResult:
        interpreter = CodeInterpreter(**options)
        try:
            await interpreter.run("x = 1", 60)
            call = asyncio.ensure_future(interpreter.run("import time\ntime.sleep(600)", 600))
            await asyncio.sleep(0.2)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            return await interpreter.run("'x' in globals()", 60)
        finally:
            await interpreter.close()

    result = asyncio.run(main())
    assert (result.value, result.replaced) == ("False", True)


@pytest.mark.parametrize("placement", ["thread", "process", "http"])
def test_the_interpreter_itself_may_live_elsewhere_and_the_tool_does_not_notice(placement: str) -> None:
    async def main(settings: dict[str, Any]) -> list[str]:
        manager = ResourceManager(None, spec_of(CodeInterpreter, max=1, **settings))
        async with manager, manager.lease([CodeInterpreter], TASK, "c", WAIT_S) as lease:

            async def lend(kind: type) -> Any:
                return lease[kind]

            context = Context(TASK, Trajectory("c0", TASK), lend=lend)
            tools = {"code_interpreter": code_interpreter_tool(limit_s=60)}
            calls = [ToolCall("code_interpreter", {"code": code}) for code in ("x = 4", "import os\nos._exit(1)", "1 + 1")]
            return [(await call_tools(tools, [call], context))[0].observation for call in calls]

    if placement == "http":
        with ServerThread("code") as server:
            shown = asyncio.run(main({"placement": "http", "url": server.url}))
    else:
        shown = asyncio.run(main({"placement": placement}))
    assert shown[0] == "(no output)"
    assert "the next call starts a new one" in shown[1]
    assert shown[2] == "[a new session was started; earlier variables are lost]\n2"


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"tier": "paper"},
        "no tier of sessions is called 'paper'; there are namespace, landlock, process, docker, enroot, remote",
    ),
    ({"tier": "landlock:x"}, "no tier of sessions is called 'landlock:x'"),
    ({"tier": "docker"}, "the tier 'docker' needs more: write docker:IMAGE"),
    ({"tier": "remote"}, "write remote:URL"),
    ({"tier": "remote:ftp://x"}, "url must be ws://host:port"),
    ({"tier": "docker:x", "place": {"image": "y"}}, "image is named twice"),
    ({"tier": "docker:x", "place": {"colour": 1}}, "placement 'container' has no option 'colour'"),
    ({"tier": "docker:x", "place": {"memory_mb": -1}}, "memory_mb must be an integer of at least 1"),
    ({"tier": "docker:x", "place": {"limit_s": 1}}, "limit_s and engine are not options"),
    ({"place": {"image": "x"}}, "place is for the tiers docker, enroot, remote"),
    ({"min_tier": "paper"}, "min_tier must be one of namespace, docker, landlock, enroot, process"),
    ({"tier": "docker:x", "min_tier": "namespace"}, "'docker' is below min_tier 'namespace'"),
    ({"tier": "enroot:x", "min_tier": "landlock"}, "'enroot' is below min_tier 'landlock'"),
    ({"tier": "process", "min_tier": "enroot"}, "'process' is below min_tier 'enroot'"),
    ({"limit_s": 0}, "limit_s must be above 0"),
]


@pytest.mark.parametrize(("options", "word"), REFUSED, ids=[word[:40] for _, word in REFUSED])
def test_options_that_make_no_sense_are_refused_before_anything_starts(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        CodeInterpreter(**options)
    with pytest.raises(ConfigError, match=word):
        spec_of(CodeInterpreter, options=options)


def test_a_stricter_tier_than_asked_for_is_fine() -> None:
    for tier, least in (("docker:x", "docker"), ("docker:x", "landlock"), ("namespace", "docker"), ("landlock", "enroot")):
        assert check_tier(tier, least)[0] == tier.partition(":")[0]
    assert set(ORDER) == {*TIERS, "docker", "enroot"}


def test_every_far_tier_says_what_it_stops_and_does_not() -> None:
    for tier in FAR:
        assert WORDS[tier].startswith(f"{tier}: ")
        assert not_stopped(tier, {})
        assert all(sentence.endswith(".") for sentence in (WORDS[tier], *not_stopped(tier, {})))


def test_a_server_with_a_weaker_tier_is_refused() -> None:
    async def main() -> None:
        async with EnvServer("code", options={"tier": "process"}) as server:
            with pytest.raises(ConfigError, match="the server's tier 'process' is below min_tier 'landlock'"):
                await open_session(f"remote:{server.url}", "landlock")
            while server.lent:
                await asyncio.sleep(0.01)

    with pytest.warns(UserWarning, match="sandbox tier process"):
        asyncio.run(main())


def test_a_server_that_dies_is_a_world_failure_and_not_the_models_fault() -> None:
    async def main() -> None:
        interpreter = CodeInterpreter(tier=f"remote:{server.url}")
        await interpreter.run("x = 1", 60)
        call = asyncio.ensure_future(interpreter.run("import time\ntime.sleep(600)", 600))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(server.__exit__)
        with pytest.raises(WorldError, match="its server ended the connection"):
            await call
        with pytest.raises(WorldError, match="no environment server answers"):
            await interpreter.run("1", 60)
        await interpreter.close()

    server = ServerThread("code")
    with server:
        asyncio.run(main())


PROGRAM = """
import asyncio, json, sys
from agentfly.envs.code.env import CodeInterpreter

async def main():
    options = json.loads(sys.argv[1])
    one, two = CodeInterpreter(**options), CodeInterpreter(**options)
    await asyncio.gather(one.run("x = 1", 60), two.run("x = 1", 60))
    print("ready", flush=True)
    await one.run("import subprocess\\nsubprocess.run(['sleep', '1000'])", 600)

asyncio.run(main())
"""


def test_sigkill_of_the_trainer_leaves_no_session(options: dict[str, Any], tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'src'}"}
    before = processes()
    trainer = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(options)], stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
    )
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "ready\n"
    until = time.monotonic() + 60
    while not any(is_sleep(pid) for pid in processes() - before) and time.monotonic() < until:
        time.sleep(0.02)
    sessions = {pid for pid in processes() - before - {trainer.pid} if exists(pid)}
    if "remote" in options["tier"]:  # the server lives on, with the fork server that it has started
        sessions = {pid for pid in sessions if is_sleep(pid)}
    assert sessions
    trainer.send_signal(signal.SIGKILL)
    trainer.wait(60)
    trainer.stdout.close()
    assert soon_gone(sessions)


def is_sleep(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep\0")
    except OSError:
        return False
