"""Executes the calls of one turn and returns their results in the same order.

Calls run concurrently, at most MAX_TOGETHER at a time; the calls of one stateful tool run in the order the model wrote them.
Mistakes of the model and errors of a tool become results. A failure of the world (RolloutError) is raised after the other calls
have been cancelled and awaited.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

from ..aio.deadline import GRACE_S
from ..types import ToolCall, ToolResult
from .context import Context
from .definition import MAX_LENGTH, Tool
from .text import clean, cut, quote

log = logging.getLogger(__name__)
MAX_TOGETHER = 64
"""Limit of concurrent calls of one turn; a model can write thousands of calls."""


async def call_tools(
    tools: Mapping[str, Tool], calls: Sequence[ToolCall], context: Context, seconds: list[float] | None = None
) -> tuple[ToolResult, ...]:
    """Executes the calls of one turn. Raises RolloutError, CancelledError, ConfigError or InvariantError, nothing else.

    `seconds` receives the time of each call: 0 for one that reached no tool, or had not begun when the turn was ended.
    """
    if seconds is not None:
        seconds[:] = [0.0] * len(calls)
    if len(calls) == 1:
        call = calls[0]
        tool = tools.get(call.name)
        if tool is None or call.error is not None:
            return (_refuse(tools, call),)
        return (await _run(tool, call, context, seconds, 0),)
    return await _together(tools, calls, context, seconds)


async def _run(tool: Tool, call: ToolCall, context: Context, seconds: list[float] | None, index: int) -> ToolResult:
    since = perf_counter()
    try:
        return await tool.run(call.arguments, context)
    finally:
        if seconds is not None:
            seconds[index] = perf_counter() - since


async def _together(
    tools: Mapping[str, Tool], calls: Sequence[ToolCall], context: Context, seconds: list[float] | None
) -> tuple[ToolResult, ...]:
    results: list[ToolResult | None] = [None] * len(calls)
    lanes: dict[Any, list[int]] = {}
    for index, call in enumerate(calls):
        tool = tools.get(call.name)
        if tool is None or call.error is not None:
            results[index] = _refuse(tools, call)
        else:
            lanes.setdefault(_lane(tool, index), []).append(index)

    waiting = deque(lanes.values())

    async def work() -> None:
        while waiting:
            for index in waiting.popleft():
                results[index] = await _run(tools[calls[index].name], calls[index], context, seconds, index)

    if len(lanes) <= 1:
        await work()
    else:
        tasks = [asyncio.create_task(work()) for _ in range(min(len(lanes), MAX_TOGETHER))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)  # every call has its own deadline
        finally:
            await _stop(tasks)
        for task in tasks:
            if task.done() and not task.cancelled() and (failure := task.exception()) is not None:
                raise failure
        if not all(task.done() and not task.cancelled() for task in tasks):
            raise asyncio.CancelledError  # no call failed, but a task was cancelled from outside
    return tuple(result for result in results if result is not None)


def _lane(tool: Tool, index: int) -> Any:
    """The key of a sequence: calls with the same key run one after the other."""
    if not tool.stateful:
        return index
    return ("owner", id(tool.owner)) if tool.owner is not None else ("tool", id(tool))


async def _stop(tasks: list[asyncio.Task[None]]) -> None:
    """Cancels the tasks that still run and waits for them for a limited time."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        _, stuck = await asyncio.wait(running, timeout=2 * GRACE_S)
        if stuck:
            log.warning("%d tool calls would not be cancelled and were left behind", len(stuck))
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # only the first exception is raised; retrieving the others silences asyncio's warning


def _refuse(tools: Mapping[str, Tool], call: ToolCall) -> ToolResult:
    """The result of a call that could not be parsed or whose tool does not exist."""
    if call.error is not None:
        return ToolResult(observation=cut(clean(call.error), MAX_LENGTH), error="bad_arguments")
    names = list(tools)
    near = difflib.get_close_matches(str(call.name)[:64], names, n=1, cutoff=0.5)
    hint = f" Did you mean {quote(near[0])}?" if near else ""
    shown = ", ".join(names[:30]) + (", ..." if len(names) > 30 else "")
    listing = f" Known tools: {shown}." if names else " There are no tools."
    return ToolResult(observation=f"There is no tool {quote(str(call.name))}.{hint}{listing}", error="unknown_tool")
