"""Tools that tests serve over MCP: `python -m agentfly mcp tests/outside/tools.py:NAME ...`."""

import asyncio
import os
import sys

from agentfly import ToolResult, tool
from agentfly.testing import GuessEnv


@tool(stateful=True, register=False)
class add_note:  # noqa: N801 - the name of the tool
    """Add a note."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def __call__(self, text: str, times: int = 1) -> str:
        self.notes.extend([text] * times)
        return f"{len(self.notes)} notes"


@tool(register=False)
def fail() -> str:
    """Fail."""
    print("printed by a tool")
    raise ValueError("broken")


@tool(register=False)
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "waited"


@tool(register=False)
def die() -> str:
    """End the server."""
    print("the server dies", file=sys.stderr, flush=True)
    os.kill(os.getpid(), 9)
    return ""


@tool(register=False)
def picture() -> ToolResult:
    """A picture."""
    return ToolResult(observation="a picture:", image=b"\x89PNG", reward=0.5, done=True)


@tool(register=False)
def variables() -> list[str]:
    """The names of the environment variables, and the folder of temporary files."""
    return sorted(os.environ)


@tool(register=False)
def pid() -> int:
    """The number of the server's process."""
    return os.getpid()


everything = (add_note, fail, wait, die, picture, variables, pid)


@tool(register=False)
def guess(n: int, env: GuessEnv) -> ToolResult:
    """Guess the number.

    Args:
        n: your guess
    """
    said = env.guess(n)
    return ToolResult(observation=said, reward=1.0 if said == "correct" else -0.25, done=said == "correct")


@tool(register=False)
def secret(env: GuessEnv) -> int | None:
    """Tell the number."""
    return env.secret
