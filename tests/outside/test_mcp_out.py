"""Our tools and environments as an MCP server: the messages, standard input, and HTTP with a bearer."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentfly import tool
from agentfly.cli import main
from agentfly.errors import ConfigError
from agentfly.outside.mcp_out import ToolServer
from agentfly.testing import GuessEnv
from agentfly.types import Message, Task
from tests.outside import tools as served

HERE = Path(__file__).parent
TOKEN = "a-token-of-the-test"


@tool(register=False)
def guess(number: int, env: GuessEnv) -> str:
    """Guess the number."""
    return env.guess(number)


def ask(server: ToolServer, *messages: Any) -> list[Any]:
    async def run() -> list[Any]:
        async with server:
            return [await server.answer(message) for message in messages]

    return asyncio.run(run())


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": name, "arguments": arguments}}


def test_a_client_sees_the_tools_and_calls_them() -> None:
    server = ToolServer([served.add_note, served.picture, served.fail])
    opened, silent, listed, added, again, shown, failed = ask(
        server,
        {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {"protocolVersion": "2025-06-18"}},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": "a", "method": "tools/list"},
        call("add_note", text="x"),
        call("add_note", text="y", times=2),
        call("picture"),
        call("fail"),
    )
    assert opened["result"]["protocolVersion"] == "2025-06-18"
    assert silent is None
    assert (listed["id"], [each["name"] for each in listed["result"]["tools"]]) == ("a", ["add_note", "picture", "fail"])
    assert listed["result"]["tools"][0]["inputSchema"]["required"] == ["text"]
    assert added["result"] == {"content": [{"type": "text", "text": "1 notes"}], "isError": False}
    assert again["result"]["content"][0]["text"] == "3 notes", "a stateful tool keeps its state between calls"
    assert shown["result"]["content"][1] == {"type": "image", "mimeType": "image/png", "data": "iVBORw=="}
    assert shown["result"]["_meta"] == {"agentfly/reward": 0.5, "agentfly/done": True}
    assert failed["result"]["isError"] is True


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ([], -32600),
        ({"id": 1}, -32600),
        ({"id": 1, "method": "tools/list", "params": []}, None),
        ({"id": 1, "method": "tools/list", "params": [1]}, -32600),
        ({"id": 1, "method": "resources/list"}, -32601),
        ({"id": 1, "method": "tools/call", "params": {}}, -32602),
        ({"id": 1, "method": "tools/call", "params": {"name": "fail", "arguments": [1]}}, -32602),
    ],
)
def test_what_is_no_request_is_refused_by_its_code(message: Any, code: int | None) -> None:
    (answer,) = ask(ToolServer([served.fail]), message)
    assert answer.get("error", {}).get("code") == code


def test_mistakes_of_the_client_are_results_that_a_model_can_read() -> None:
    unknown, wrong = ask(ToolServer([served.add_note]), call("add_notes"), call("add_note", text=1))
    assert unknown["result"]["isError"]
    assert 'Did you mean "add_note"?' in unknown["result"]["content"][0]["text"]
    assert '"text" must be a string' in wrong["result"]["content"][0]["text"]
    assert wrong["result"]["_meta"] == {"agentfly/error": "bad_arguments"}


def test_an_environment_is_reset_for_the_task_and_its_observation_is_in_the_instructions() -> None:
    task = Task("t0", (Message("user", "Find the number."),), {"secret": 3})
    opened, right = ask(
        ToolServer([guess], env=GuessEnv, task=task), {"id": 0, "method": "initialize"}, call("guess", number=3)
    )
    assert "Find the number." in opened["result"]["instructions"]
    assert right["result"]["content"][0]["text"] == "correct"


def test_bad_input_of_the_command_is_one_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_TOKEN", raising=False)
    for words, problem in [
        (["no_such_tool"], "no tool is called 'no_such_tool'"),
        (["add", "--tasks", "arithmetic", "--index", "-1"], "has no task -1"),
        (["add", "--token-env", "NO_TOKEN"], "are for HTTP"),
        (["add", "--port", "0", "--token-env", "NO_TOKEN"], "holds no token"),
        (["add", "--port", "0", "--host", "0.0.0.0"], "can be reached from other machines and needs a token"),
        (["add", "add"], "two tools are called 'add'"),
    ]:
        assert main(["mcp", *words]) == 2
        assert problem in capsys.readouterr().err
    with pytest.raises(ConfigError, match="needs the field 'answer'"):
        ToolServer([tool(lambda answer: answer, name="tell", description="Tell.", inject=("answer",), register=False)])


def test_a_program_talks_over_standard_input_until_it_ends() -> None:
    words = [sys.executable, "-m", "agentfly", "mcp", f"{HERE / 'tools.py'}:fail", f"{HERE / 'tools.py'}:variables"]
    lines = [call("fail"), {"id": 8, "method": "ping"}]
    text = "\n".join(["{broken", "", *map(json.dumps, lines)]) + "\n"
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=120, check=True)
    answers = {answer["id"]: answer for answer in map(json.loads, done.stdout.splitlines())}
    assert answers[None]["error"]["code"] == -32700
    assert answers[7]["result"]["content"][0]["text"] == "ValueError: broken"
    assert answers[8]["result"] == {}
    assert "printed by a tool" in done.stderr, "and not between the answers"


@pytest.fixture
def url() -> Iterator[str]:
    words = [
        sys.executable,
        "-m",
        "agentfly",
        "mcp",
        f"{HERE / 'tools.py'}:add_note",
        "--port",
        "0",
        "--token-env",
        "ITS_TOKEN",
    ]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env={**os.environ, "ITS_TOKEN": TOKEN})
    try:
        assert process.stderr is not None
        said = process.stderr.readline()
        assert "1 tools at http://127.0.0.1:" in said
        yield said.split()[3]
    finally:
        process.terminate()
        assert process.wait(60) in (0, 143)
        process.stderr.close()


def test_a_client_of_the_package_uses_it_over_http_with_the_token(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mcp", reason="needs the package mcp: pip install 'agentfly[mcp]'")
    from agentfly.outside import mcp_tools
    from tests.outside.test_mcp_in import Chain, in_chains

    with pytest.raises(ConfigError, match="the tools of 'ours' cannot be listed"):
        mcp_tools("ours", url=url)
    monkeypatch.setenv("ITS_TOKEN", TOKEN)
    tools = {each.name: each for each in mcp_tools("ours", url=url, headers={"Authorization": "Bearer $ITS_TOKEN"})}

    async def play(chain: Chain) -> str:
        return (await chain.call("add_note", text="a", times=3)).observation

    assert in_chains(tools, play) == "3 notes"
