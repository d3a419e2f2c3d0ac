"""A chain's context and a short way to make one call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from agentfly.tools import Context, Tool, call_tools
from agentfly.types import Task, ToolCall, ToolResult, Trajectory


@pytest.fixture
def context() -> Context:
    task = Task("t0", (), {"answer": "84", "difficulty": 3})
    return Context(task, Trajectory("c0", task), env="the env")


@pytest.fixture
def call(context: Context) -> Callable[..., ToolResult]:
    """`call(tool, a=1)` runs one call in a new event loop."""

    def run(tool: Tool, **arguments: Any) -> ToolResult:
        return asyncio.run(call_tools({tool.name: tool}, [ToolCall(tool.name, arguments)], context))[0]

    return run
