"""The agent of `tests.tiny` with an environment that an environment server can create, under names that a config can give."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from agentfly import Environment, tool
from agentfly.types import Task
from tests.tiny import TwoTurns


class Room(Environment):
    """One look takes `slow_s`, until there is a file `fast` in the folder; twenty times as long if there is a file `hold`."""

    def __init__(self, folder: str, slow_s: float = 1.0) -> None:
        self.fast, self.slow_s = Path(folder) / "fast", slow_s
        self.looks = 0

    def reset(self, task: Task) -> None:
        self.looks = 0

    async def look(self) -> str:
        self.looks += 1
        for _ in range(20):
            if self.fast.exists():
                break
            await asyncio.sleep(self.slow_s)
            if not self.fast.with_name("hold").exists():
                break
        return f"look {self.looks} in process {os.getpid()}"

    def close(self) -> None:
        """Nothing is held."""


@tool(name="look", register=False)
async def look(env: Room) -> str:
    """Look around."""
    return await env.look()


class Looks(TwoTurns):
    """Every reply but the last is a call of `look`."""
