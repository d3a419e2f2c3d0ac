"""OpenEnv in both directions: ours with ours by day, with theirs where OPENENV_PYTHON is a Python with the package openenv."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentfly import ReactAgent
from agentfly.cli import main
from agentfly.data import load_tasks
from agentfly.errors import ConfigError, WorldError
from agentfly.outside.openenv_out import OpenEnvServer
from agentfly.outside.openenv_session import env_of, shown
from agentfly.resources import Budget, ResourceManager, spec_of
from agentfly.testing import ByteRenderer, GuessEnv, ScriptedEngine
from agentfly.tools import as_tool
from agentfly.types import Message, Outcome, Request, Task
from tests.outside.tools import guess, secret

HERE = Path(__file__).parent
THEIRS = os.environ.get("OPENENV_PYTHON", "")
needs_openenv = pytest.mark.skipif(
    not THEIRS, reason="set OPENENV_PYTHON to the Python of a virtual environment with: pip install openenv"
)
SECRETS = (3, 8)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Our server of a guessing game, in a process."""
    rows = tmp_path_factory.mktemp("rows") / "secrets.jsonl"
    rows.write_text("".join(json.dumps({"question": f"Game {n}.", "secret": n}) + "\n" for n in SECRETS))
    words = [sys.executable, "-m", "agentfly", "openenv", f"{HERE / 'tools.py'}:guess", "--env", "guess"]
    process = subprocess.Popen([*words, "--tasks", str(rows), "--port", "0"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = process.stderr.readline()
        assert said.startswith("2 tasks at http://127.0.0.1:")
        yield said.split()[3]
    finally:
        process.terminate()
        assert process.wait(60) in (0, 143)
        process.stderr.close()


def halving(argument: str, high: int) -> ScriptedEngine:
    """A model that halves the interval."""

    def reply(request: Request) -> str:
        ends, tried = [1, high], 0
        for message in request.messages:
            if message.role == "assistant":
                tried = int(re.findall(r"(\d+)", message.content)[-1])
            elif message.content.startswith("Observation: higher"):
                ends[0] = tried + 1
            elif message.content.startswith("Observation: lower"):
                ends[1] = tried - 1
        return f'Action: step\nInput: {{"{argument}": {sum(ends) // 2}}}'

    return ScriptedEngine(reply)


def test_an_agent_plays_the_episodes_of_a_server(url: str) -> None:
    name = f"openenv:{url}"
    rows = load_tasks(name, count=2)
    assert [row.fields["question"] for row in rows] == ["Game 3.", "Game 8."]
    agent = ReactAgent(halving("n", 10), renderer=ByteRenderer(), env=name, tools=[name], reward="episode_score")
    assert str(agent.tools["step"]) == "step(n: integer)"
    chains = agent.run_sync(rows, num_chains=2).trajectories
    assert {(chain.outcome, chain.prediction) for chain in chains} == {(Outcome.FINISHED, "correct")}
    assert [chain.reward for chain in chains] == [1.0 - 0.25 * (len(chain.turns) - 1) for chain in chains]


def in_session(url: str, *frames: Any) -> list[dict[str, Any]]:
    from websockets.sync.client import connect

    with connect(f"ws{url.removeprefix('http')}/ws", proxy=None) as client:
        answers = []
        for frame in frames:
            client.send(frame if isinstance(frame, str) else json.dumps(frame))
            answers.append(json.loads(client.recv()))
        return answers


def test_frames_are_answered_by_observations_and_mistakes_by_their_code(url: str) -> None:
    first, low, right, over, state, again = in_session(
        url,
        {"type": "reset", "data": {"seed": 1}},
        {"type": "step", "data": {"n": 5, "metadata": {}}},
        {"type": "step", "data": {"n": 8}},
        {"type": "step", "data": {"n": 8}},
        {"type": "state"},
        {"type": "reset"},
    )
    assert first == {"type": "observation", "data": {"observation": {"text": "Game 8."}, "reward": None, "done": False}}
    assert (low["data"]["reward"], low["data"]["done"]) == (-0.25, False)
    assert (right["data"]["reward"], right["data"]["done"]) == (1.0, True)
    assert over["data"]["observation"]["text"] == "The episode is over."
    assert state == {"type": "state", "data": {"episode_id": "1", "step_count": 2}}
    assert again["data"]["observation"]["text"] == "Game 3.", "without a seed the next task"
    for frame, code in [
        ("{", "INVALID_JSON"),
        ("[]", "UNKNOWN_TYPE"),
        ({"type": "jump"}, "UNKNOWN_TYPE"),
        ({"type": "step", "data": [1]}, "VALIDATION_ERROR"),
        ({"type": "reset", "data": {"seed": "x"}}, "VALIDATION_ERROR"),
        ({"type": "step", "data": {"m": 1}}, "VALIDATION_ERROR"),
    ]:
        (answer,) = in_session(url, frame)
        assert (answer["type"], answer["data"]["code"]) == ("error", code)


def read(url: str, path: str, **headers: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, headers=headers), timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_health_and_schema_are_answered_to_this_machine_alone(url: str) -> None:
    assert read(url, "/health") == (200, {"status": "healthy"})
    assert read(url, "/schema")[1]["action"]["required"] == ["n"]
    assert read(url, "/docs")[0] == 404
    assert read(url, "/schema", Host="evil.example")[0] == 403
    assert read(url, "/schema", Origin="http://evil.example")[0] == 403


def test_several_tools_are_named_in_the_action_and_sessions_are_counted() -> None:
    async def run() -> None:
        task = Task("t0", (Message("user", "Play."),), {"secret": 3})
        server = OpenEnvServer([guess, secret], env=GuessEnv, tasks=[task], max_sessions=1, token="a-token-of-ours")
        assert server.schema()["action"]["properties"]["tool"]["enum"] == ["guess", "secret"]
        async with server:
            assert (await asyncio.to_thread(read, server.url, "/health"))[0] == 401
            from websockets.asyncio.client import connect

            where, headers = f"ws{server.url.removeprefix('http')}/ws", {"Authorization": "Bearer a-token-of-ours"}
            async with connect(where, additional_headers=headers, proxy=None) as one:
                await one.send(json.dumps({"type": "step", "data": {"tool": "secret"}}))
                assert json.loads(await one.recv())["data"]["observation"]["text"] == "3"
                await one.send(json.dumps({"type": "step", "data": {"n": 3}}))
                assert json.loads(await one.recv())["data"]["code"] == "VALIDATION_ERROR"
                async with connect(where, additional_headers=headers, proxy=None) as two:
                    assert json.loads(await two.recv())["data"]["code"] == "CAPACITY_REACHED"

    asyncio.run(run())


def test_a_server_that_ends_is_the_failure_of_its_chains() -> None:
    async def run() -> None:
        task = Task("t0", (), {"secret": 3, "seed": 0})
        async with OpenEnvServer([guess], env=GuessEnv, tasks=[task]) as server:
            kind = env_of(server.url)
            async with ResourceManager(Budget(), spec_of(kind)) as manager, manager.lease([kind], task) as lease:
                assert (await lease.call(kind, "step", {"n": 1}))["observation"] == "higher"
                assert (await lease.call(kind, "step", {"m": 1}))["error"] == "bad_arguments"
                await server.__aexit__()
                with pytest.raises(WorldError, match="is gone"):
                    await lease.call(kind, "step", {"n": 1})

    asyncio.run(run())


def test_bad_input_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for name, problem in [
        ("openenv:", "write openenv:http://host:port"),
        ("openenv:localhost:1", "write openenv:http://host:port"),
        ("openenv:http://127.0.0.1:1", "cannot be reached"),
    ]:
        with pytest.raises(ConfigError, match=problem):
            as_tool(name)
    assert main(["openenv", "add", "--host", "0.0.0.0"]) == 2
    assert "needs a token" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ({"text": "hello", "done": False, "reward": 1}, "hello"),
        ({"a": 1, "b": "é", "metadata": {}}, '{"a": 1, "b": "é"}'),
        ("plain", "plain"),
        ({"n": 3}, '{"n": 3}'),
    ],
)
def test_an_observation_is_shown_as_text_where_it_is_one(observation: object, text: str) -> None:
    assert shown(observation) == text


# ---- against the package


@needs_openenv
def test_our_agent_plays_on_a_server_of_the_package() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [THEIRS, str(HERE / "openenv_server.py"), str(port)]
    process = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": ""})
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until and process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        name = f"openenv:http://127.0.0.1:{port}"
        agent = ReactAgent(halving("number", 8), renderer=ByteRenderer(), env=name, tools=[name], reward="episode_score")
        assert str(agent.tools["step"]) == 'step(number: integer, comment: string = "")'
        chains = agent.run_sync(load_tasks(name, count=3), num_chains=2).trajectories
        assert {(chain.outcome, chain.prediction) for chain in chains} == {(Outcome.FINISHED, "right")}
        assert all(chain.reward is not None and chain.reward > 0.6 for chain in chains)
    finally:
        process.kill()
        process.wait()


THEIR_CLIENT = """
import sys
from openenv.core.generic_client import GenericEnvClient
with GenericEnvClient(base_url=sys.argv[1]).sync() as env:
    print(env.reset(seed=1).observation["text"])
    for n in (5, 8):
        made = env.step({"n": n})
        print(made.observation["text"], made.reward, made.done)
    print(env.state())
    try:
        env.reset(seed=0)
        env.step({"m": 1})
    except RuntimeError as error:
        print(error)
"""


@needs_openenv
def test_their_client_plays_on_our_server(url: str) -> None:
    environment = {**os.environ, "PYTHONPATH": ""}
    words = [THEIRS, "-c", THEIR_CLIENT, url]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:3] == ["Game 8.", "higher -0.25 False", "correct 1.0 True"]
    assert "'step_count': 2" in lines[3]
    assert "VALIDATION_ERROR" in lines[4]
