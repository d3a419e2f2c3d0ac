"""Fixtures that run cells through the tool, and sandboxes that tolerate a busy machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agentfly.envs.code.env import CodeInterpreter
from agentfly.envs.code.tools import code_interpreter_tool
from agentfly.sandbox import SandboxLimits, shared_server
from agentfly.tools import Context, call_tools
from agentfly.types import Task, ToolCall, ToolResult, Trajectory

Run = Callable[..., list[ToolResult]]


@pytest.fixture
def run() -> Run:
    """`run("x = 1", ("while True: pass", 0.5))` returns the results of some calls of one chain, each with its time limit."""

    def calls(*codes: Any, limit_s: float = 60.0) -> list[ToolResult]:
        task = Task("t0", (), {})

        async def main() -> list[ToolResult]:
            interpreter = CodeInterpreter()

            async def lend(kind: type) -> CodeInterpreter:
                assert kind is CodeInterpreter
                return interpreter

            context = Context(task, Trajectory("c0", task), lend=lend)
            try:
                await interpreter.reset(task)
                results = []
                for item in codes:
                    code, limit = item if isinstance(item, tuple) else (item, limit_s)
                    tools = {"code_interpreter": code_interpreter_tool(limit_s=limit)}
                    results += await call_tools(tools, [ToolCall("code_interpreter", {"code": code})], context)
                return results
            finally:
                await interpreter.close()

        return asyncio.run(main())

    return calls


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long grace: on a busy machine an interrupted cell may take longer to reply than the default allows."""
    monkeypatch.setattr(shared_server, "DEFAULT_LIMITS", SandboxLimits(grace_s=30))


@pytest.fixture
def shown(run: Run) -> Callable[..., list[str]]:
    return lambda *codes, **options: [result.observation for result in run(*codes, **options)]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop, and therefore one sandbox server, for all tests of a file."""
    with asyncio.Runner() as made:
        yield made
