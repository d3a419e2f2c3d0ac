"""An agent on a scripted engine that a config can name, for worker processes without torch.

The reply of a chain names the process that sampled it and its number of replies so far; the answer is the seed of the request.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from typing import Any

from agentfly import Action, BaseAgent, Completion, ToolCall, reward, tool
from agentfly.fleet import link
from agentfly.fleet.bare import software
from agentfly.testing import ByteRenderer, GuessEnv, ScriptedEngine
from agentfly.training.workers.worker import serve
from agentfly.types import Request


def serve_older(ticket: Mapping[str, Any]) -> None:
    """A worker of another version."""
    link.software = lambda: {**software(), "agentfly": "0.0.1"}  # type: ignore[assignment]
    serve(ticket)


def _is_there(path: str) -> bool:
    return os.path.exists(path)


@tool(name="wait", register=False, timeout_s=300)
async def wait(until: str) -> str:
    """Wait.

    Args:
        until: so many seconds, or a file that is there; "death" ends the process
    """
    if until == "death":
        os.kill(os.getpid(), signal.SIGKILL)
    if "/" not in until:
        await asyncio.sleep(float(until))
    while "/" in until and not _is_there(until):
        await asyncio.sleep(0.01)
    return f"process {os.getpid()}"


@reward(name="seconds")
def seconds(trajectory: Any) -> float:
    return float(trajectory.task.fields["seconds"])


class Waits(BaseAgent):
    """Calls `wait` for as long as the task says, then answers with its seed."""

    def __init__(self, model: str, **options: Any) -> None:
        tools = {"tools": [wait], "reward": seconds, "renderer": ByteRenderer()}
        super().__init__(ScriptedEngine(reply), **({**options, **tools}))

    def parse(self, completion: Completion) -> Action:
        kind, _, rest = completion.text.partition(" ")
        if kind == "bug":
            raise ZeroDivisionError("a bug of the tool's author")
        if kind == "wait":
            return Action(calls=(ToolCall("wait", {"until": rest}),))
        return Action(answer=rest)


def reply(request: Request) -> str:
    text = bytes(token for token in request.prompt_ids if token < 256).decode()
    if "Observation" not in text:
        return f"wait {text.rpartition('wait for ')[2].split()[0]}"
    if "bug" in text:
        return "bug"
    return f"answer {request.sampling.seed}"


@tool(name="guess", register=False)
async def guess(n: int, env: GuessEnv) -> str:
    """Guess the number.

    Args:
        n: the guess
    """
    return await env.guess(n)


@reward(name="solved")
def solved(env: GuessEnv) -> float:
    return float(env.solved)


class Guesses(BaseAgent):
    """Guesses 4 and ends."""

    def __init__(self, model: str, **options: Any) -> None:
        parts = {"tools": [guess], "reward": solved, "env": GuessEnv, "renderer": ByteRenderer()}
        super().__init__(ScriptedEngine(["guess", "end"]), **({**options, **parts}))

    def parse(self, completion: Completion) -> Action:
        return Action(calls=(ToolCall("guess", {"n": 4}),)) if completion.text == "guess" else Action(answer="done")
