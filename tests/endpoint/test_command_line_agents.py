"""Coding agents on the command line as clients of the endpoint: what they send is one row without a break.

Skipped where they are missing: npm install -g @openai/codex@0.169.0 @anthropic-ai/claude-code@2.1.327. They need no network.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'agentfly[serve]'")

from agentfly import OutsideAgent
from agentfly.agents.outside import Llm
from agentfly.endpoint.calls import Answer, Call, Closed
from agentfly.endpoint.server import EndpointServer, Keys
from agentfly.errors import EngineError
from agentfly.learn.samples import check_tokens, to_samples
from agentfly.rows import rows_of
from agentfly.testing import ByteRenderer, ScriptedEngine
from agentfly.types import Message, Outcome, Request, Task, Trajectory

from .scripted import Scripted, says

pytestmark = pytest.mark.nightly
LIMIT_S = 120.0
CONFIG = """
model = "policy"
model_provider = "here"
[model_providers.here]
name = "here"
base_url = "{base_url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
QUIET = {
    "IS_SANDBOX": "1", "ANTHROPIC_MODEL": "policy", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1",
}  # fmt: skip


async def run_command(words: list[str], variables: Mapping[str, str], folder: Path) -> tuple[int, str]:
    """The exit status and output of an agent in a folder, which is its home too. It and all that it started is ended."""
    (folder / "work").mkdir()
    process = await asyncio.create_subprocess_exec(
        *words, cwd=folder / "work", env={"PATH": os.environ["PATH"], "HOME": str(folder), **variables}, start_new_session=True,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(LIMIT_S):
            told, _ = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode is not None
    return process.returncode, told.decode()


async def codex(task: Task, llm: Llm, folder: Path) -> tuple[int, str]:
    (folder / ".codex").mkdir()
    (folder / ".codex/config.toml").write_text(CONFIG.format(base_url=llm.base_url))
    words = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", task.messages[0].content]
    return await run_command(words, {**llm.env, "CODEX_HOME": str(folder / ".codex")}, folder)


async def claude_code(task: Task, llm: Llm, folder: Path) -> tuple[int, str]:
    words = ["claude", "-p", task.messages[0].content, "--dangerously-skip-permissions"]
    return await run_command(words, {**llm.env, **QUIET}, folder)


AGENTS = {"codex": (codex, "codex"), "claude_code": (claude_code, "claude")}
SHELLS = {"exec_command": "cmd", "shell_command": "command", "Bash": "command"}


def shell(request: Request, *commands: str) -> str:
    """A reply that runs commands with the shell that the request offers."""
    names = [tool["function"]["name"] for tool in request.tools]
    name = next(name for name in SHELLS if name in names)
    calls = [f'{{"name": "{name}", "arguments": {{"{SHELLS[name]}": "{command}"}}}}' for command in commands]
    return "On it.\n" + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def policy(request: Request) -> str:
    """Writes a file, looks at it twice at once, and answers."""
    replies = sum(message.role == "assistant" for message in request.messages)
    if replies == 0:
        return shell(request, "echo one > a.txt")
    return shell(request, "cat a.txt", "ls") if replies == 1 else "It says one."


def play(name: str, folder: Path, replies: Any, **options: Any) -> tuple[Trajectory, list[tuple[int, str]]]:
    start, program = AGENTS[name]
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not on the PATH: see the beginning of this file")
    ended: list[tuple[int, str]] = []

    async def function(task: Task, llm: Llm) -> str:
        ended.append(await start(task, llm, folder))
        return ended[-1][1].strip()

    engine = ScriptedEngine(replies)
    agent = OutsideAgent(
        engine,
        function,
        parser="hermes",
        renderer=ByteRenderer(),
        reward="exact_match",
        sampling={"max_tokens": 4000},
        **options,
    )
    (chain,) = agent.run_sync([{"question": "make a file", "answer": "It says one."}]).trajectories
    return chain, ended


@pytest.mark.parametrize("name", AGENTS)
def test_three_calls_are_one_row(name: str, tmp_path: Path) -> None:
    chain, ((status, told),) = play(name, tmp_path, policy)
    assert (chain.outcome, status) == (Outcome.FINISHED, 0), chain.error
    assert "It says one." in told
    assert (tmp_path / "work/a.txt").read_text() == "one\n"
    assert [turn.why for turn in chain.turns] == ["first", "", ""]
    assert rows_of(chain) == [[0, 1, 2]]
    seen = [result.observation for result in chain.turns[1].results]
    assert "one" in seen[0] and "a.txt" in seen[1]
    check_tokens(chain, to_samples(chain), versions=range(1))


@pytest.mark.parametrize("name", AGENTS)
def test_a_chain_that_may_make_no_more_calls_ends_the_agent(name: str, tmp_path: Path) -> None:
    """It ends by itself, at the first call that is refused, and not after repeats."""
    chain, ended = play(name, tmp_path, policy, max_turns=1)
    assert chain.outcome is Outcome.MAX_TURNS
    assert len(chain.turns) == 1 and len(ended) == 1


@pytest.mark.parametrize("name", AGENTS)
def test_an_engine_that_fails_is_asked_once(name: str, tmp_path: Path) -> None:
    """The agent repeats its request after a 500; the chain has failed and samples no more."""
    asked = 0

    def fails(request: Request) -> str:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise EngineError("out of memory")
        return policy(request)

    chain, ended = play(name, tmp_path, fails)
    assert (chain.outcome, asked, len(ended)) == (Outcome.WORLD_FAILURE, 2, 1)
    assert "out of memory" in str(chain.error)


def test_an_agent_that_compacts_without_end_ends_at_the_limit_of_calls(tmp_path: Path) -> None:
    """Codex sums its history up whenever the usage that it reads nears its window: here, after each call."""
    full = replace(says("Summary: nothing yet."), prompt_tokens=300_000)
    if shutil.which("codex") is None:
        pytest.skip("codex is not on the PATH: see the beginning of this file")

    def work(call: Call) -> Answer:
        if not call.tools:
            return full
        name = next(name for name in SHELLS if name in [tool["function"]["name"] for tool in call.tools])
        return replace(says("", (name, {SHELLS[name]: "ls"})), prompt_tokens=300_000)

    answerer = Scripted(*[work] * 8, Closed("the chain has made its 8 calls"))

    async def main() -> tuple[int, str]:
        keys = Keys()
        async with EndpointServer(keys) as server:
            llm = Llm(server.base_url, keys.open(answerer))
            return await codex(Task("t", (Message("user", "look around"),)), llm, tmp_path)

    asyncio.run(main())
    assert 8 < len(answerer.calls) < 12
    assert sum(not call.tools for call in answerer.calls) >= 2


def crew(request: Request) -> str:
    """Sends two sub-agents at once, which run a command each; answers when both have."""
    asked = next(message.content for message in request.messages if message.role == "user" and "make a file" in message.content)
    replies = sum(message.role == "assistant" for message in request.messages)
    if "PART" in asked:
        return shell(request, "echo part") if replies == 0 else "Part done."
    if replies:
        return "It says one."
    calls = [
        f'{{"name": "Agent", "arguments": {{"description": "part {part}", "prompt": "PART {part} of: make a file"}}}}'
        for part in "AB"
    ]
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def test_two_sub_agents_are_rows_of_their_own(tmp_path: Path) -> None:
    chain, ((status, told),) = play("claude_code", tmp_path, crew)
    assert (chain.outcome, status) == (Outcome.FINISHED, 0), chain.error
    assert "It says one." in told
    # The sub-agents may end in the background: the parent then reads of each in a call of its own.
    *subs, parent = sorted(map(len, rows_of(chain)))
    assert subs == [2, 2] and parent >= 2
    whys = Counter(turn.why for turn in chain.turns)
    assert (whys["first"], whys.total() - whys[""]) == (3, 3)
    check_tokens(chain, to_samples(chain), versions=range(1))
