"""Blocking rewards, off the event loop."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ..aio.threads import run_in_thread

MAX_THREADS = 32
"""Rewards that block at the same time, per event loop."""

_slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


async def in_thread(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Return `function(**arguments)`, called in a thread. A call past the caller's deadline is abandoned."""

    def call() -> Any:
        try:
            return function(**arguments)
        except (SystemExit, KeyboardInterrupt) as error:  # raised on the event loop, these would end the program
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    async with _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_THREADS)):
        return await run_in_thread(call)
