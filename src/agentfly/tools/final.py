"""`final_answer`: a call that ends the chain. An answer comes in; it goes out as the text of a result that is `done`."""

from __future__ import annotations

from ..types import ToolResult
from .definition import tool
from .text import render


@tool(register=False)
async def final_answer(answer: str | float | bool) -> ToolResult:
    """Give the final answer and finish."""
    return ToolResult(observation=render(answer), done=True)
