"""The tool `final_answer`, whose call ends the chain."""

from __future__ import annotations

from ..types import ToolResult
from .definition import tool
from .text import render


@tool(register=False)
async def final_answer(answer: str | float | bool) -> ToolResult:
    """Give the final answer and finish."""
    return ToolResult(observation=render(answer), done=True)
