"""The agent of `tests.tiny` with a tool whose time varies, under names that a config can give."""

from __future__ import annotations

import asyncio
import random

from agentfly import tool
from tests.tiny import TwoTurns

_times = random.Random(0)


@tool(name="look", register=False)
async def look() -> str:
    """Look around."""
    await asyncio.sleep(min(0.1, 0.004 * _times.lognormvariate(0, 1.5)))
    return "nothing here"


class Slow(TwoTurns):
    """Every reply but the last is a call of `look`."""
