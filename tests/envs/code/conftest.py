"""A chain's context, and a short way to run cells through the tool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from agentfly.envs.code.env import CodeInterpreter
from agentfly.envs.code.tools import code_interpreter_tool
from agentfly.tools import Context, call_tools
from agentfly.types import Task, ToolCall, ToolResult, Trajectory

Run = Callable[..., list[ToolResult]]


@pytest.fixture
def run() -> Run:
    """`run("x = 1", "x")` gives the results of some calls of one chain."""

    def calls(*codes: Any, limit_s: float = 20.0) -> list[ToolResult]:
        task = Task("t0", (), {})
        tools = {"code_interpreter": code_interpreter_tool(limit_s=limit_s)}

        async def main() -> list[ToolResult]:
            interpreter = CodeInterpreter()

            async def lend(kind: type) -> CodeInterpreter:
                assert kind is CodeInterpreter
                return interpreter

            context = Context(task, Trajectory("c0", task), lend=lend)
            try:
                await interpreter.reset(task)
                made = [ToolCall("code_interpreter", {"code": code}) for code in codes]
                return [(await call_tools(tools, [call], context))[0] for call in made]
            finally:
                await interpreter.close()

        return asyncio.run(main())

    return calls


@pytest.fixture
def shown(run: Run) -> Callable[..., list[str]]:
    return lambda *codes, **options: [result.observation for result in run(*codes, **options)]
